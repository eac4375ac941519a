"""A model around ours that compares every logit with the reference, wherever the scheduler has it computed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM, TappedLM

Context = tuple[int, ...]
"""The token ids that a position sees, its own last."""


class CheckedModel:
    """To be used with one pool. It notes which token each slot of the pool holds, so what a position sees is read off the block tables:
    a wrong table shows as an unknown context.

    `difference` is the largest one so far, `compared` are the contexts of the reference that were seen.
    """

    def __init__(self, model: CausalLM, expected: Mapping[Context, Tensor]) -> None:
        self.config = model.config
        self.difference = 0.0
        self.compared: set[Context] = set()
        self._model = model
        self._expected = expected
        self._token_of_slot = torch.empty(0, dtype=torch.int64)

    def slots(self) -> dict[str, WeightSlot]:
        """The model's."""
        return self._model.slots()

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """The model's, after a look at the logits of every position."""
        logits = self._model.forward(replace(batch, logits_rows=torch.arange(batch.num_tokens)), kv)
        self._look(batch, kv, logits)
        return logits.index_select(0, batch.logits_rows)

    def forward_tapped(self, batch: Batch, kv: KVPool, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The same."""
        everything = replace(batch, logits_rows=torch.arange(batch.num_tokens))
        logits, hidden = cast(TappedLM, self._model).forward_tapped(everything, kv, taps)
        self._look(batch, kv, logits)
        return logits.index_select(0, batch.logits_rows), hidden

    def _look(self, batch: Batch, kv: KVPool, logits: Tensor) -> None:
        if not self._token_of_slot.numel():
            self._token_of_slot = torch.full(((kv.num_blocks + 1) * kv.block_size,), -1)
        self._token_of_slot[batch.slot_mapping] = batch.input_ids
        rows = torch.arange(batch.num_rows).repeat_interleave(batch.cu_seqlens_q.diff().long())
        for token, (row, position) in enumerate(zip(rows.tolist(), batch.positions.tolist(), strict=True)):
            seen = torch.arange(position + 1)
            blocks = batch.block_tables[row][seen // kv.block_size].long()
            context = tuple(self._token_of_slot[blocks * kv.block_size + seen % kv.block_size].tolist())
            expected = self._expected.get(context)
            if expected is not None:
                self.difference = max(self.difference, float((logits[token] - expected).abs().max()))
                self.compared.add(context)
