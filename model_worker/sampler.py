"""From logits to one token per row. A token depends on (logits, sampling parameters, seed, output index, the tokens before it) alone.

In vLLM's order, which docs/sampling.md tells: the rules of `model_worker.logit_rules` (allowed ids, bad words, min_tokens, bias, penalties), then
the draw of `model_worker.token_draw` (temperature, top_k, top_p, min_p; vLLM v1 has min_p in front of top_k). Log-probabilities are of the
logits before all of that (`model_worker.logprobs`).

A greedy row without rules costs its share of one argmax over the batch. Rows that need more are grouped by what they need, and worked on in
chunks that fit a core's cache, by several threads. Neither group nor chunk nor thread changes what a row gives.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from model_worker.draws import Draws
from model_worker.logit_rules import apply_rules
from model_worker.logprobs import NO_IDS, logprobs_of
from model_worker.sample_rows import SampleRows
from model_worker.sampling_table import KINDS, OFF, Filter, Kind
from model_worker.token_draw import Narrowed, draw_narrowed, draw_unfiltered, draw_whole, likelihoods_left, narrow
from model_worker.workspace import Workspace, rows_per_chunk
from tessera.values.logprobs import Logprobs

NO_TOKEN = -1

NOT_FINITE = "the model computed NaN or infinite logits"
NOTHING_LEFT = "allowed_token_ids, bad_words_ids, logit_bias and min_tokens leave no token of the vocabulary"


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """`token_ids` int32 `[N]`, NO_TOKEN where a row does not sample or `failures` has it: row -> why it has no token. `logprobs` of the
    rows that want them and have a token; None where no row does."""

    token_ids: np.ndarray
    failures: dict[int, str]
    logprobs: Logprobs | None


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One call: `best` float32 `[N]`, the highest logit of each row before the rules."""

    logits: np.ndarray
    rows: SampleRows
    best: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Outcome:
    """Of the rows of a chunk, by their numbers: `token_ids` int32, NO_TOKEN where a row is in `narrowed` or has no token left."""

    rows: np.ndarray
    token_ids: np.ndarray
    narrowed: list[Narrowed]
    exhausted: np.ndarray


class Sampler:
    """Draws tokens for a model whose end-of-sequence ids are `eos_token_ids`, with up to `num_threads` threads. Called by one thread."""

    def __init__(self, eos_token_ids: Sequence[int], num_threads: int = 1) -> None:
        self._eos_token_ids = np.array(eos_token_ids, np.int64)
        self._spaces: list[Workspace] = []
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "sampler") if num_threads > 1 else None

    def sample(self, logits: np.ndarray, rows: SampleRows) -> Sampled:
        """One token per row of `logits`, float32 `[N, vocab]` on the host, C-contiguous, not mutated."""
        token_ids, failures = self.draw(logits, rows)
        return Sampled(token_ids, failures, sampled_logprobs(logits, token_ids, rows))

    def probabilities(self, logits: np.ndarray, rows: SampleRows) -> np.ndarray:
        """What `sample` draws from, float64 of the shape of `logits`, for rows with a temperature, finite logits and some token left."""
        logits = logits.copy()
        apply_rules(logits, rows, self._eos_token_ids[self._eos_token_ids < logits.shape[1]])
        everyone = np.arange(len(logits))
        found = likelihoods_left(logits, logits.max(axis=1), Draws.of(rows, everyone)).astype(np.float64)
        found /= found.sum(axis=1, keepdims=True)
        return found

    def draw(self, logits: np.ndarray, rows: SampleRows) -> tuple[np.ndarray, dict[int, str]]:
        """`sample` without log-probabilities: `token_ids` and `failures` of `Sampled`."""
        token_ids, best, is_finite = _scan(logits)
        samples = rows.samples & is_finite
        token_ids[~samples] = NO_TOKEN
        failures = {int(row): NOT_FINITE for row in np.flatnonzero(~is_finite)}
        narrowed: list[Narrowed] = []
        step = _Step(logits, rows, best)
        for outcome in self._outcomes(step, list(_grouped(step, samples))):
            token_ids[outcome.rows] = outcome.token_ids
            narrowed += outcome.narrowed
            failures.update({int(row): NOTHING_LEFT for row in outcome.exhausted})
        if narrowed:
            together = Narrowed.joined(narrowed)
            token_ids[together.rows] = draw_narrowed(together, logits.shape[1])
        return token_ids, failures

    def _outcomes(self, step: _Step, chunks: list[tuple[Kind, np.ndarray]]) -> list[_Outcome]:
        """Of all chunks, which the threads deal with in turn."""
        vocab_size, num_shares = step.logits.shape[1], min(self._num_threads, len(chunks))
        if self._spaces and self._spaces[0].vocab_size != vocab_size:
            self._spaces.clear()
        self._spaces += [Workspace(vocab_size) for _ in range(num_shares - len(self._spaces))]

        def share(first: int) -> list[_Outcome]:
            return [self._work(step, kind, chunk, self._spaces[first]) for kind, chunk in chunks[first::num_shares]]

        apply = map if self._threads is None or num_shares == 1 else self._threads.map
        shares = apply(share, range(num_shares))
        return list(chain.from_iterable(shares))

    def _work(self, step: _Step, kind: Kind, chunk: np.ndarray, space: Workspace) -> _Outcome:
        """Whatever the rows `chunk` need, all of one kind."""
        logits, best = _taken(step.logits, chunk, space.logits, is_changed=kind.is_ruled), step.best[chunk]
        token_ids, has_token = np.full(len(chunk), NO_TOKEN, np.int32), np.ones(len(chunk), np.bool_)
        if kind.is_ruled:
            eos_token_ids = self._eos_token_ids[self._eos_token_ids < logits.shape[1]]
            apply_rules(logits, step.rows.only(chunk), eos_token_ids)
            token_ids = logits.argmax(axis=1).astype(np.int32)
            best = logits[np.arange(len(chunk)), token_ids]
            has_token = np.isfinite(best)
            token_ids[~has_token] = NO_TOKEN
        narrowed: list[Narrowed] = []
        if kind.is_drawn and has_token.all():
            token_ids, narrowed = _drawn(logits, best, Draws.of(step.rows, chunk), kind.filter, space)
        elif kind.is_drawn and has_token.any():
            left = np.flatnonzero(has_token)
            token_ids[left], parts = _drawn(logits[left], best[left], Draws.of(step.rows, chunk[left]), kind.filter, space)
            narrowed = [replace(part, rows=left[part.rows]) for part in parts]
        return _Outcome(chunk, token_ids, [replace(part, rows=chunk[part.rows]) for part in narrowed], chunk[~has_token])


def _drawn(
    logits: np.ndarray, best: np.ndarray, draws: Draws, by: Filter, space: Workspace
) -> tuple[np.ndarray, list[Narrowed]]:
    """The tokens of rows with one filter, int32 `[R]`; NO_TOKEN for those that are left few candidates, which are in the second part."""
    narrowed, is_whole = narrow(logits, best, draws, by, space), np.ones(len(logits), np.bool_)
    token_ids = np.full(len(logits), NO_TOKEN, np.int32)
    for part in narrowed:
        is_whole[part.rows] = False
        if by is Filter.NONE:
            token_ids[part.rows] = draw_unfiltered(logits, part, space)
    if is_whole.all():
        token_ids = draw_whole(logits, best, draws, space)
    elif is_whole.any():
        whole = np.flatnonzero(is_whole)
        token_ids[whole] = draw_whole(logits[whole], best[whole], draws.only(whole), space)
    return token_ids, [] if by is Filter.NONE else narrowed


def _grouped(step: _Step, samples: np.ndarray) -> Iterator[tuple[Kind, np.ndarray]]:
    """The rows that sample (bool `[N]`) and are not done with their best token, in chunks of one kind."""
    kinds = step.rows.table.kinds[step.rows.slots] * samples
    for kind in np.flatnonzero(np.bincount(kinds, minlength=len(KINDS))[1:]) + 1:
        for chunk in _chunks(np.flatnonzero(kinds == kind), rows_per_chunk(step.logits.shape[1])):
            yield KINDS[kind], chunk


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


def _taken(logits: np.ndarray, rows: np.ndarray, buffer: np.ndarray, *, is_changed: bool) -> np.ndarray:
    """Some rows of the logits, by ascending numbers: in `buffer` unless they lie together and will not be changed."""
    if rows[-1] - rows[0] == len(rows) - 1 and not is_changed:
        return logits[rows[0] : rows[-1] + 1]
    return np.take(logits, rows, axis=0, out=buffer[: len(rows)], mode="clip")


def sampled_logprobs(logits: np.ndarray, token_ids: np.ndarray, rows: SampleRows) -> Logprobs | None:
    """Those that the rows want which have a token (not NO_TOKEN); None where no row does."""
    num_top = np.where(token_ids == NO_TOKEN, OFF, rows.table.logprobs[rows.slots])
    if (num_top == OFF).all():
        return None
    asked = [rows.table.logprob_ids.get(slot, NO_IDS) for slot in rows.slots.tolist()]
    return logprobs_of(logits, token_ids, num_top, asked)
