"""The engine's log-probabilities, of prompts and of sampled tokens, are transformers', however the prompt is cut, cached and resumed."""

import numpy as np
import pytest
import torch
from engine_driver import EngineDriver, Row, drop, entry
from tiny_llama import Pair, reference_logits

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from tessera.values.batch import ScheduledBatchOutput
from tessera.values.logprobs import Logprobs
from tessera.values.sampling import SamplingParams

PROMPT = [198, 5, 5, 5, 80, 41, 77, 2, 60]
SCORED = SamplingParams(seed=0, temperature=0.0, prompt_logprobs=3, logprobs=2)
PLAIN = SamplingParams(seed=0, temperature=0.0)
TOLERANCE = 1e-4


def by_token(found: Logprobs | None) -> list[tuple[list[int], list[float], int]]:
    """(ids, log-probabilities, rank) of each token."""
    if found is None:
        return []
    ends = np.cumsum(found.counts)[:-1]
    ids, logprobs = np.split(found.token_ids, ends), np.split(found.logprobs, ends)
    return [(some.tolist(), values.tolist(), int(rank)) for some, values, rank in zip(ids, logprobs, found.ranks, strict=True)]


def check(found: list[tuple[list[int], list[float], int]], ids: list[int], first: int, pair: Pair, num_top: int) -> None:
    """`found` is of the tokens `ids[first:]`."""
    expected = torch.log_softmax(reference_logits(pair.theirs, ids).double(), dim=-1)
    assert len(found) == len(ids) - first
    for place, (token_ids, logprobs, rank) in enumerate(found, first):
        foretold = expected[place - 1]
        assert token_ids == [ids[place], *foretold.topk(num_top).indices.tolist()]
        np.testing.assert_allclose(logprobs, foretold[token_ids], atol=TOLERANCE)
        assert rank == int((foretold >= foretold[ids[place]]).sum())


def prompt_tokens(output: ScheduledBatchOutput) -> list[tuple[list[int], list[float], int]]:
    return [] if output.prompt_logprobs is None else by_token(output.prompt_logprobs.tokens)


def test_a_prompt_in_one_pass_and_the_tokens_after_it(pair: Pair) -> None:
    driver = EngineDriver(pair.ours)
    output = driver.run([Row(0, 9, 9)], [entry(0, PROMPT, [0, 1, 2], sampling=SCORED)])
    check(prompt_tokens(output), PROMPT, 1, pair, 3)
    ids, found = [*PROMPT, *output.token_ids.tolist()], by_token(output.logprobs)
    for length in (10, 11, 12):
        output = driver.run([Row(0, 1, length)])
        assert output.prompt_logprobs is None, "a decode comes past no prompt token"
        ids += output.token_ids.tolist()
        found += by_token(output.logprobs)
    check(found, ids, 9, pair, 2)


def test_a_prompt_in_chunks_beside_others(pair: Pair) -> None:
    """One position, then five, then three; beside it a plain prompt, and a short one that asks for the tokens' own alone."""
    driver = EngineDriver(pair.ours)
    output = driver.run([Row(0, 1, 1)], [entry(0, PROMPT, [0, 1, 2], sampling=SCORED)])
    found = prompt_tokens(output)
    own = SamplingParams(seed=0, temperature=0.0, prompt_logprobs=0)
    output = driver.run(
        [Row(1, 4, 4), Row(0, 5, 6), Row(2, 3, 3)],
        [entry(1, [7, 8, 9, 10], [3], "b", sampling=PLAIN), entry(2, [11, 12, 13], [4], "c", sampling=own)],
    )
    assert output.prompt_logprobs is not None and output.prompt_logprobs.row_counts.tolist() == [0, 5, 2]
    both = prompt_tokens(output)
    found += both[:5]
    check(both[5:], [11, 12, 13], 1, pair, 0)
    assert output.logprobs is None and output.token_counts.tolist() == [1, 0, 1]
    found += prompt_tokens(driver.run([Row(0, 3, 9)]))
    check(found, PROMPT, 1, pair, 3)


def test_over_a_prefix_that_another_has_computed(pair: Pair) -> None:
    """The blocks are shared; the positions are computed again for their logits, and nobody's KV changes by it. Tokens sampled behind a
    prefix that is taken as it is have the same log-probabilities."""
    driver = EngineDriver(pair.ours)
    driver.run([Row(0, 9, 9)], [entry(0, PROMPT, [0, 1, 2], "a")])
    longer = [*PROMPT[:8], 31, 32]
    output = driver.run([Row(1, 10, 10)], [entry(1, longer, [5, 6, 7], "b", sampling=SCORED)])
    check(prompt_tokens(output), longer, 1, pair, 3)
    cold = by_token(output.logprobs)
    output = driver.run([Row(2, 2, 10)], [entry(2, longer, [0, 1, 8], "c", cached=8, sampling=SCORED)])
    cached = by_token(output.logprobs)
    check(cached, [*longer, *output.token_ids.tolist()], 10, pair, 2)
    assert cached[0][0] == cold[0][0]
    # Of the prompt, only what lies behind the cached part: the scheduler lets no such request take one.
    check(prompt_tokens(output), longer, 9, pair, 3)


def test_a_resumed_request_gives_those_of_its_prompt_again_and_none_of_its_output(pair: Pair) -> None:
    driver = EngineDriver(pair.ours)
    token = int(driver.run([Row(0, 9, 9)], [entry(0, PROMPT, [0, 1, 2], "a", sampling=SCORED)]).token_ids[0])
    resumed = entry(1, [*PROMPT, token], [5, 6, 7], "a", attempt=2, prompt_len=9, sampling=SCORED)
    output = driver.run([Row(1, 10, 10)], [resumed], [drop(0, "a")])
    check(prompt_tokens(output), PROMPT, 1, pair, 3)
    check(by_token(output.logprobs), [*PROMPT, token, *output.token_ids.tolist()], 10, pair, 2)


class BrokenLM:
    """Ours, with passes of more than one row failing, or one prompt position without numbers."""

    def __init__(self, model: CausalLM) -> None:
        self.config, self._model = model.config, model
        self.fails_together, self.nan_row = False, -1

    def slots(self) -> dict[str, WeightSlot]:
        return self._model.slots()

    def forward(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        if self.fails_together and batch.num_rows > 1:
            raise RuntimeError("the device is gone")
        logits = self._model.forward(batch, kv).clone()
        if self.nan_row >= 0:
            logits[self.nan_row, 5] = float("nan")
        return logits


def test_rows_that_are_computed_one_by_one_keep_theirs(pair: Pair) -> None:
    model = BrokenLM(pair.ours)
    driver = EngineDriver(model)
    model.fails_together = True
    output = driver.run(
        [Row(0, 9, 9), Row(1, 4, 4), Row(2, 3, 3)],
        [
            entry(0, PROMPT, [0, 1, 2], "a", sampling=SCORED),
            entry(1, [7, 8, 9, 10], [3], "b"),
            entry(2, [11, 12, 13], [4], "c", sampling=SCORED),
        ],
    )
    assert output.prompt_logprobs is not None and output.prompt_logprobs.row_counts.tolist() == [8, 0, 2]
    found = prompt_tokens(output)
    check(found[:8], PROMPT, 1, pair, 3)
    check(found[8:], [11, 12, 13], 1, pair, 3)


@pytest.mark.parametrize("pair", ["gqa-tied"], indirect=True)
def test_nan_at_a_prompt_position_ends_that_request_alone(pair: Pair) -> None:
    model = BrokenLM(pair.ours)
    driver = EngineDriver(model)
    model.nan_row = 4  # behind the three rows' own: the second token of the first prompt
    rows = [Row(0, 9, 9), Row(1, 4, 4), Row(2, 3, 3)]
    entries = [
        entry(0, PROMPT, [0, 1, 2], "a", sampling=SCORED),
        entry(1, [7, 8, 9, 10], [3, 5], "b", sampling=SCORED),
        entry(2, [11, 12, 13], [4], "c", sampling=PLAIN),
    ]
    output = driver.run(rows, entries)
    assert [error.row for error in output.row_errors] == [0] and output.token_counts.tolist() == [0, 1, 1]
    assert len(by_token(output.logprobs)) == 2, "one entry per token that is given"
    model.nan_row = -1
    assert driver.run([Row(0, 1, 10), Row(1, 1, 5), Row(2, 1, 4)]).token_counts.tolist() == [0, 1, 1]
