"""From logits to one token per row. A token depends on (logits, sampling parameters, seed, output index, the tokens before it) alone.

In vLLM's order, which docs/sampling.md tells: the rules of `model_worker.logit_rules` (allowed ids, bad words, min_tokens, bias, penalties), then
the draw of `model_worker.draws` (temperature, top_k, top_p, min_p; vLLM v1 has min_p in front of top_k). Log-probabilities are of the
logits before all of that (`model_worker.logprobs`).

A greedy row without rules costs its share of one argmax over the batch. Rows that need more are grouped by what they need, and worked on in
chunks that fit a core's cache. Neither group nor chunk changes what a row gives.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from model_worker.draws import Draws, Filter, Narrowed, draw_narrowed, draw_unfiltered, is_wide, narrow
from model_worker.logit_rules import apply_rules
from model_worker.logprobs import NO_IDS, logprobs_of, rows_per_chunk
from model_worker.sample_rows import SampleRows
from model_worker.sampling_table import OFF
from tessera.values.logprobs import Logprobs

NO_TOKEN = -1

NOT_FINITE = "the model computed NaN or infinite logits"
_NOTHING_LEFT = "allowed_token_ids, bad_words_ids, logit_bias and min_tokens leave no token of the vocabulary"


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """`token_ids` int32 `[N]`, NO_TOKEN where a row does not sample or `failures` has it: row -> why it has no token. `logprobs` of the
    rows that want them and have a token; None where no row does."""

    token_ids: np.ndarray
    failures: dict[int, str]
    logprobs: Logprobs | None


class Sampler:
    """Draws tokens for a model whose end-of-sequence ids are `eos_token_ids`."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = np.array(eos_token_ids, np.int64)

    def sample(self, logits: np.ndarray, rows: SampleRows) -> Sampled:
        """One token per row of `logits`, float32 `[N, vocab]` on the host, C-contiguous, not mutated."""
        token_ids, best, is_finite = _scan(logits)
        failures = {int(row): NOT_FINITE for row in np.flatnonzero(~is_finite)}
        table, slots = rows.table, rows.slots
        samples = rows.samples & is_finite
        is_drawn, is_ruled = table.temperatures[slots] > 0, table.ruled[slots]
        pending: list[tuple[np.ndarray, Narrowed]] = []
        filters = np.where(is_drawn, Draws.of(rows).filters, Filter.NONE)
        # Greedy or drawn, with rules or without, and one filter: what a chunk has, all its rows have.
        groups = (filters * 2 + is_ruled) * 2 + is_drawn
        for group in np.unique(groups[samples & (is_drawn | is_ruled)]).tolist():
            members = np.flatnonzero(samples & (groups == group))
            for chunk in _chunks(members, rows_per_chunk(logits.shape[1])):
                chunk_logits, chunk_best = logits[chunk], best[chunk]
                if group & 2:
                    chunk, chunk_logits, chunk_best = self._ruled(chunk_logits, rows, chunk, token_ids, failures)
                if not group & 1 or not len(chunk):
                    continue
                draws, by = Draws.of(rows.only(chunk)), Filter(group >> 2)
                if by is Filter.NONE:
                    token_ids[chunk] = draw_unfiltered(chunk_logits, chunk_best, draws)
                    continue
                narrowed = narrow(chunk_logits, chunk_best, draws, by)
                if is_wide(narrowed, logits.shape[1]):
                    token_ids[chunk] = draw_narrowed(narrowed, logits.shape[1])
                else:
                    pending.append((chunk, narrowed))
        if pending:
            chunks, parts = zip(*pending, strict=True)
            token_ids[np.concatenate(chunks)] = draw_narrowed(Narrowed.joined(list(parts)), logits.shape[1])
        token_ids[~samples] = NO_TOKEN
        token_ids[list(failures)] = NO_TOKEN
        return Sampled(token_ids, failures, _logprobs(logits, token_ids, rows))

    def _ruled(
        self, logits: np.ndarray, rows: SampleRows, chunk: np.ndarray, token_ids: np.ndarray, failures: dict[int, str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Apply the rules to the rows `chunk`, whose `logits` are overwritten, and enter their best tokens. Returns the rows that have a
        token left, their logits and their best ones."""
        eos_token_ids = self._eos_token_ids[self._eos_token_ids < logits.shape[1]]
        apply_rules(logits, rows.only(chunk), eos_token_ids)
        token_ids[chunk] = logits.argmax(axis=1)
        best = logits[np.arange(len(chunk)), token_ids[chunk]]
        left = np.isfinite(best)
        if left.all():
            return chunk, logits, best
        failures.update({int(row): _NOTHING_LEFT for row in chunk[~left]})
        return chunk[left], logits[left], best[left]


def _scan(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The first of the best tokens of each row (int32 `[N]`), its logit, and whether all of the row is finite (bool)."""
    token_ids, best = np.empty(len(logits), np.int32), np.empty(len(logits), np.float32)
    lowest = np.empty(len(logits), np.float32)
    for chunk in _chunks(np.arange(len(logits)), rows_per_chunk(logits.shape[1])):
        some = slice(int(chunk[0]), int(chunk[-1]) + 1)
        token_ids[some] = logits[some].argmax(axis=1)
        logits[some].min(axis=1, out=lowest[some])
        best[some] = logits[chunk, token_ids[some]]
    return token_ids, best, np.isfinite(lowest) & np.isfinite(best)  # a NaN is its row's minimum and maximum


def _chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for first in range(0, len(rows), size):
        yield rows[first : first + size]


def _logprobs(logits: np.ndarray, token_ids: np.ndarray, rows: SampleRows) -> Logprobs | None:
    num_top = np.where(token_ids == NO_TOKEN, OFF, rows.table.logprobs[rows.slots])
    if (num_top == OFF).all():
        return None
    asked = [rows.table.logprob_ids.get(slot, NO_IDS) for slot in rows.slots.tolist()]
    return logprobs_of(logits, token_ids, num_top, asked)
