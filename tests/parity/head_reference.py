"""Heads in plain torch (`mtp_reference`, `eagle_reference`): what they would draft, and how they learn it from a model's own output."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel


class HeadReference(Protocol):
    """One layer on the model's hidden states."""

    def enter(self, ids: Tensor) -> Tensor:
        """What it takes of the model at each of `ids` `[B, T]`, `[B, T, hidden_size]`."""
        ...

    def __call__(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What it has at each position, given the tokens behind them."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Of what it has."""
        ...


@torch.inference_mode()
def drafts_in_plain_torch(layers: Sequence[HeadReference], ids: list[int], count: int) -> list[int]:
    """The best drafts behind `ids`, of whole sequences computed anew for each. Layer i builds on layer i - 1 one position before, the first on
    the model or, behind the known ids, on what the draft before came from."""
    hidden, tokens = layers[0].enter(torch.tensor([ids[:-1]])), ids[1:]
    drafts: list[int] = []
    while len(drafts) < count:
        found, lasts = hidden, []
        for layer in layers:
            found = layer(torch.tensor([tokens]), found)
            lasts.append(found[:, -1:])
            found = torch.cat((torch.zeros_like(found[:, :1]), found[:, :-1]), dim=1)
        last = lasts[len(drafts) % len(layers)]
        drafts.append(int(layers[0].logits(last[0, 0]).argmax()))
        hidden, tokens = torch.cat((hidden, last), dim=1), [*tokens, drafts[-1]]
    return drafts


@torch.no_grad()
def own_output(model: PreTrainedModel, count: int, length: int) -> Tensor:
    """`count` sequences of the model behind three random tokens each, half of them greedy, half drawn at temperature 1, int64 `[count, length]`."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(model.config.vocab_size, (count, 3), generator=generator)
    is_greedy = torch.arange(count).unsqueeze(1) % 2 == 0
    while ids.shape[1] < length:
        logits = model(ids, use_cache=False).logits[:, -1]
        drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        ids = torch.cat((ids, torch.where(is_greedy, logits.argmax(dim=-1, keepdim=True), drawn)), dim=1)
    return ids


def train(head: HeadReference, model: PreTrainedModel, sequences: Tensor, rounds: int, rate: float = 3e-3) -> list[float]:
    """Teach the head to say what the model says one token further on, by the cross entropy of the two. The losses."""
    assert isinstance(head, torch.nn.Module)
    with torch.no_grad():
        wanted = model(sequences, use_cache=False).logits[:, 1:].softmax(dim=-1)
    for values in model.parameters():
        values.requires_grad_(False)
    optimizer = torch.optim.Adam(head.parameters(), lr=rate)
    losses = []
    order = torch.Generator().manual_seed(1)
    for _ in range(rounds):
        some = torch.randperm(len(sequences), generator=order)[:32]
        hidden = head.enter(sequences[some, :-1])
        found = head.logits(head(sequences[some, 1:], hidden))
        loss = -(wanted[some] * found.log_softmax(dim=-1)).sum(dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
