"""What every slot asks of the sampler, as columns, so that a step takes the parameters of all its rows in a few array operations."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from tessera.values.sampling import SamplingParams
from tessera.values.sampling_limits import SEQUENCE_IDS_MAX

OFF = -1
"""For a number of log-probabilities: none are wanted."""


class Filter(IntEnum):
    """What the few tokens that a drawn row leaves are found by."""

    NONE = 0
    TOP_K = 1
    TOP_P = 2
    MIN_P = 3


@dataclass(frozen=True, slots=True)
class Kind:
    """What rows that are worked on together have in common: whether rules change their logits, whether they are drawn or take the best
    token, and how the draw begins."""

    is_ruled: bool
    is_drawn: bool
    filter: Filter


KINDS = tuple(Kind(bool(number & 2), bool(number & 1), Filter(number >> 2)) for number in range(16))
"""By number."""

PLAIN = 0
"""The kind that needs nothing but its best token."""

NO_ID = -1
"""Stands where a bad word has no id. Of no token."""


@dataclass(frozen=True, slots=True, eq=False)
class BadWords:
    """`last` int64 `[W]`: what is ruled out. `prefixes` int32 `[W, SEQUENCE_IDS_MAX - 1]`: the ids before it, to the right, NO_ID in front."""

    last: np.ndarray
    prefixes: np.ndarray


class SamplingTable:
    """Sampling parameters by slot, for a vocabulary of `vocab_size` ids. Ids beyond it are left out: they cannot be drawn anyway.

    Columns `[num_slots]`: `seeds` uint64; `temperatures`, `top_ps`, `min_ps` float64; `top_ks` (0 is off), `min_tokens`, `logprobs`,
    `prompt_logprobs` (OFF or the number of likeliest ids) int64; `presence`, `frequency`, `repetition` float32. `penalised` (bool): any of
    the last three is on. `kinds` int64: place in KINDS.

    Lists, by slot and only where it has any: `stop_ids` and `allowed_ids` int64 `[N]`; `biases`: ids int64 and biases float32 `[N]`;
    `bad_words`; `logprob_ids` int64 `[N]`.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seeds = np.zeros(num_slots, np.uint64)
        self.temperatures, self.top_ps, self.min_ps = (np.zeros(num_slots) for _ in range(3))
        self.top_ks, self.min_tokens, self.logprobs, self.prompt_logprobs = (np.zeros(num_slots, np.int64) for _ in range(4))
        self.presence, self.frequency, self.repetition = (np.zeros(num_slots, np.float32) for _ in range(3))
        self.penalised, self.kinds = np.zeros(num_slots, np.bool_), np.zeros(num_slots, np.int64)
        self.stop_ids: dict[int, np.ndarray] = {}
        self.allowed_ids: dict[int, np.ndarray] = {}
        self.biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.bad_words: dict[int, BadWords] = {}
        self.logprob_ids: dict[int, np.ndarray] = {}

    def set(self, slot: int, params: SamplingParams) -> None:
        """Give a slot its parameters, in place of those that it had."""
        self.seeds[slot] = params.seed
        self.temperatures[slot] = params.temperature
        self.top_ps[slot] = params.top_p
        self.min_ps[slot] = params.min_p
        self.top_ks[slot] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.min_tokens[slot] = params.min_tokens
        self.logprobs[slot] = OFF if not params.wants_logprobs else params.logprobs or 0
        self.prompt_logprobs[slot] = OFF if params.prompt_logprobs is None else params.prompt_logprobs
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.penalised[slot] = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1)
        self._set_lists(slot, params)
        self.kinds[slot] = KINDS.index(self._kind(slot))

    def _kind(self, slot: int) -> Kind:
        is_ruled = self.penalised[slot] or any(
            slot in lists for lists in (self.stop_ids, self.allowed_ids, self.biases, self.bad_words)
        )
        is_drawn = self.temperatures[slot] > 0
        by = Filter.NONE
        if is_drawn and self.top_ks[slot] > 0:
            by = Filter.TOP_K
        elif is_drawn and self.top_ps[slot] < 1:
            by = Filter.TOP_P
        elif is_drawn and self.min_ps[slot] > 0:
            by = Filter.MIN_P
        return Kind(bool(is_ruled), bool(is_drawn), by)

    def _set_lists(self, slot: int, params: SamplingParams) -> None:
        for lists in (self.stop_ids, self.allowed_ids, self.biases, self.bad_words, self.logprob_ids):
            lists.pop(slot, None)
        if params.min_tokens > 0:
            self.stop_ids[slot] = self._known(params.stop_token_ids)
        if params.allowed_token_ids:
            self.allowed_ids[slot] = self._known(params.allowed_token_ids)
        if params.logprob_token_ids:
            self.logprob_ids[slot] = self._known(params.logprob_token_ids)
        known = [pair for pair in params.logit_bias if pair[0] < self.vocab_size]
        if known:
            self.biases[slot] = np.array([token for token, _ in known]), np.array([bias for _, bias in known], np.float32)
        words = [word for word in params.bad_words_ids if word[-1] < self.vocab_size]
        if words:
            prefixes = np.full((len(words), SEQUENCE_IDS_MAX - 1), NO_ID, np.int32)
            for prefix, word in zip(prefixes, words, strict=True):
                prefix[len(prefix) + 1 - len(word) :] = word[:-1]
            self.bad_words[slot] = BadWords(np.array([word[-1] for word in words]), prefixes)

    def _known(self, token_ids: tuple[int, ...]) -> np.ndarray:
        ids = np.array(token_ids, np.int64)
        return ids[ids < self.vocab_size]
