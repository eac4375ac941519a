"""Our Llama against transformers' on the same weights, however the work is cut into batches."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_driver import PagedDriver
from tiny_llama import Pair, reference_greedy, reference_logits

LOGIT_TOLERANCE = 1e-4


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(199), k=length)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("length", [1, 16, 61])
def test_logits_of_a_whole_prompt(pair: Pair, block_size: int, length: int) -> None:
    driver = PagedDriver(pair.ours, pair.pool(block_size))
    logits = driver.step([(driver.start(prompt(length)), length)], every_logit=True)
    expected = reference_logits(pair.theirs, prompt(length))
    assert expected.std() > 0.5, "the reference tells tokens apart"
    assert (logits - expected).abs().max() <= LOGIT_TOLERANCE


def test_only_wanted_logits_come_back_in_the_order_wanted(pair: Pair) -> None:
    driver = PagedDriver(pair.ours, pair.pool(4))
    runs = [driver.start(prompt(5)), driver.start(prompt(9))]
    logits = driver.step([(runs[0], 5), (runs[1], 9)])
    assert logits.dtype == torch.float32
    expected = torch.stack([reference_logits(pair.theirs, prompt(n))[-1] for n in (5, 9)])
    assert (logits - expected).abs().max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("chunk", [None, 7])
def test_32_greedy_tokens_of_a_ragged_batch(pair: Pair, chunk: int | None, prefix_caching: bool) -> None:
    shared = prompt(24, seed=1)
    prompts = [prompt(1), prompt(40), shared + prompt(5), shared + prompt(17), shared]
    driver = PagedDriver(pair.ours, pair.pool(4), chunk, prefix_caching)
    driver.generate([shared], 1)
    runs = driver.generate(prompts, 32)
    assert [run.outputs for run in runs] == [reference_greedy(pair.theirs, ids, 32) for ids in prompts]
    assert [run.cached for run in runs] == ([0, 0, 24, 24, 20] if prefix_caching else [0] * 5)


def test_a_prefix_computed_by_another_row_of_the_same_batch(pair: Pair) -> None:
    driver = PagedDriver(pair.ours, pair.pool(4))
    first, second = driver.start(prompt(8)), driver.start(prompt(8) + prompt(3))
    first.table = [17, 5]
    second.table, second.computed = [17, 5], 8
    logits = driver.step([(second, 3), (first, 8)])
    assert (logits[0] - reference_logits(pair.theirs, second.ids)[-1]).abs().max() <= LOGIT_TOLERANCE


def test_stale_blocks_of_others_do_not_matter(pair: Pair) -> None:
    """Blocks handed on hold another request's values, or NaN when that request failed: nothing of them may show."""
    kv = pair.pool(16)
    for layer in range(kv.num_layers):
        kv.keys(layer)[: kv.num_blocks] = float("nan")
        kv.values(layer)[: kv.num_blocks] = float("nan")
    driver = PagedDriver(pair.ours, kv, chunk=9)
    prompts = [prompt(3), prompt(30), prompt(47)]
    runs = driver.generate(prompts, 20)
    assert [run.outputs for run in runs] == [reference_greedy(pair.theirs, ids, 20) for ids in prompts]


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), block_size=st.sampled_from([1, 3, 16]), caching=st.booleans())
def test_any_cut_of_the_work_gives_the_same_logits(pair: Pair, data: st.DataObject, block_size: int, caching: bool) -> None:
    """Steps compute any number of positions of any runs, in any mixture; runs start late and share prefixes."""
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=5))
    seeds = data.draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
    prompts = [prompt(50, seed)[:length] for length, seed in zip(lengths, seeds, strict=True)]
    driver = PagedDriver(pair.ours, pair.pool(block_size), prefix_caching=caching)
    expected = {seed: reference_logits(pair.theirs, prompt(50, seed)) for seed in set(seeds)}
    waiting, running = list(zip(prompts, seeds, strict=True)), []
    while waiting or running:
        for _ in range(data.draw(st.integers(0 if running else 1, len(waiting)))):
            ids, seed = waiting.pop()
            running.append((driver.start(ids), seed))
        least = 0 if len(running) > 1 else 1
        counts = [(run, seed, data.draw(st.integers(least, len(run.ids) - run.computed))) for run, seed in running]
        rows = sorted((row for row in counts if row[2]), key=lambda row: row[2])
        if not rows:
            continue
        logits = driver.step([(run, n) for run, _, n in rows])
        for (run, seed, _), row in zip(rows, logits, strict=True):
            assert (row - expected[seed][run.computed - 1]).abs().max() <= LOGIT_TOLERANCE
        running = [(run, seed) for run, seed in running if run.computed < len(run.ids)]


def test_long_contexts_are_cut_into_tiles_and_groups(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.kernels.torch_attention.QUERY_TILE", 4)
    monkeypatch.setattr("model_worker.kernels.torch_attention.GROUP_TOKENS_MAX", 40)
    prompts = [prompt(n, seed=2) for n in (33, 9, 21, 2, 30)]
    runs = PagedDriver(pair.ours, pair.pool(4), chunk=10).generate(prompts, 8)
    assert [run.outputs for run in runs] == [reference_greedy(pair.theirs, ids, 8) for ids in prompts]
