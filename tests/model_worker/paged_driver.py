"""Drives a model over a paged pool as a scheduler would: chunks, shared prefixes, decodes beside prefills. Greedy."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM


@dataclass(eq=False)
class Run:
    """One sequence: its ids so far (prompt, then outputs), its table, and how many positions are computed."""

    ids: list[int]
    prompt_len: int
    table: list[int] = field(default_factory=list)
    computed: int = 0
    cached: int = 0

    @property
    def outputs(self) -> list[int]:
        return self.ids[self.prompt_len :]


def build_batch(rows: list[tuple[Run, int]], block_size: int, every_logit: bool = False) -> Batch:
    """The batch that computes the next n positions of each (run, n); decodes must come first. Logits of each row's last token, or of all."""
    counts = [n for _, n in rows]
    spans = [range(run.computed, run.computed + n) for run, n in rows]
    width = max(len(run.table) for run, _ in rows)
    num_decodes = next((i for i, n in enumerate(counts) if n > 1), len(counts))
    ends = torch.tensor([0, *counts]).cumsum(0)
    return Batch(
        input_ids=torch.tensor([run.ids[p] for (run, _), span in zip(rows, spans, strict=True) for p in span]),
        positions=torch.tensor([p for span in spans for p in span]),
        slot_mapping=torch.tensor(
            [
                run.table[p // block_size] * block_size + p % block_size
                for (run, _), span in zip(rows, spans, strict=True)
                for p in span
            ]
        ),
        cu_seqlens_q=ends.to(torch.int32),
        context_lens=torch.tensor([span.stop for span in spans], dtype=torch.int32),
        block_tables=torch.tensor([run.table + [-1] * (width - len(run.table)) for run, _ in rows], dtype=torch.int32),
        num_decodes=num_decodes,
        logits_rows=torch.arange(int(ends[-1])) if every_logit else ends[1:] - 1,
    )


class PagedDriver:
    """Blocks are handed out in a shuffled order and never freed; with prefix caching whole computed blocks are shared by content."""

    def __init__(
        self, model: CausalLM, kv: KVPool, chunk: int | None = None, prefix_caching: bool = False, seed: int = 0
    ) -> None:
        self.model = model
        self.kv = kv
        self.chunk = chunk
        self.prefix_caching = prefix_caching
        self._free = list(range(kv.num_blocks))
        random.Random(seed).shuffle(self._free)
        self._published: dict[tuple[int, ...], int] = {}

    def start(self, prompt: list[int]) -> Run:
        """A run with its cached prefix in place; at least one token is left to compute."""
        run = Run(list(prompt), len(prompt))
        size = self.kv.block_size
        while self.prefix_caching and len(run.table) < (len(prompt) - 1) // size:
            block = self._published.get(tuple(prompt[: (len(run.table) + 1) * size]))
            if block is None:
                break
            run.table.append(block)
        run.computed = run.cached = len(run.table) * size
        return run

    def take_blocks(self, count: int) -> list[int]:
        """Blocks that nobody has had yet; none for a count below 1."""
        return [self._free.pop() for _ in range(count)]

    def step(self, rows: list[tuple[Run, int]], every_logit: bool = False) -> Tensor:
        """Compute the next n positions of each (run, n); returns their logits. Blocks are appended, and published once full."""
        size = self.kv.block_size
        for run, n in rows:
            run.table += self.take_blocks(-(-(run.computed + n) // size) - len(run.table))
        logits = self.model.forward(build_batch(rows, size, every_logit), self.kv)
        for run, n in rows:
            run.computed += n
            for count in range(1, run.computed // size + 1):
                self._published.setdefault(tuple(run.ids[: count * size]), run.table[count - 1])
        return logits

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[Run]:
        """All prompts at once: every running sequence decodes while the others' chunks are computed."""
        runs = [self.start(prompt) for prompt in prompts]
        while unfinished := [run for run in runs if len(run.outputs) < max_tokens]:
            left = [(run, len(run.ids) - run.computed) for run in unfinished]
            rows = sorted(((run, n if self.chunk is None else min(n, self.chunk)) for run, n in left), key=lambda row: row[1])
            tokens = self.step(rows).argmax(dim=1).tolist()
            for (run, _), token in zip(rows, tokens, strict=True):
                if run.computed == len(run.ids):
                    run.ids.append(token)
        return runs
