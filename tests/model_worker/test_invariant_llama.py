"""The kernels of batch-invariant workers in a whole model: one context has one set of logits, bit for bit, however it was come by."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_driver import PagedDriver, Run
from random_llama import build, config, pool

from model_worker.host_pool import HostPool
from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import cpu_library
from model_worker.kernels.interface import Kernels
from model_worker.kernels.invariant_backend import InvariantKernels
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import IN_FLOAT32, KVStore
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig

SHAPES = {
    "gqa": config(),
    "mha-biases": config(
        num_heads=4, num_kv_heads=4, head_dim=24, attention_bias=True, mlp_bias=True, tie_word_embeddings=False
    ),
    "one-kv-head-for-40": config(num_heads=40, num_kv_heads=1, head_dim=8),
    "panels": config(hidden_size=704, intermediate_size=1536, num_layers=1, num_heads=9, num_kv_heads=3, head_dim=64),
}
LENGTH = 90
LONG = 700  # more than one piece of the attention kernel's 512 keys

KERNELS = InvariantKernels()


def ours(dtype: torch.dtype) -> Callable[[], Kernels]:
    return lambda: CpuKernels(cpu_library(torch.get_num_threads()), dtype)


MAKERS: dict[str, Callable[[], Kernels]] = {
    "torch": lambda: KERNELS,
    "f32": ours(torch.float32),
    "f16": ours(torch.float16),
    "bf16": ours(torch.bfloat16),
}
BOUNDS = {"torch": 2e-4, "f32": 2e-4, "f16": 3e-2, "bf16": 2e-1}
"""Of a difference to the plain kernels, in standard deviations: other orders of sums, and weights and KV in 11 bits, weights and inputs in 8."""


@dataclass(frozen=True)
class Case:
    """A model, how its pools keep numbers, and what made its kernels."""

    model: CausalLM
    store: KVStore
    kind: str


@pytest.fixture(scope="module", params=[(shape, kind) for kind in MAKERS for shape in SHAPES], ids="-".join)
def case(request: pytest.FixtureRequest) -> Case:
    shape, kind = request.param
    kernels = MAKERS[kind]()
    return Case(build(SHAPES[shape], kernels), kernels.kv_store(), kind)


def plain(shape: ModelConfig) -> Case:
    """On the kernels of a worker that is not batch-invariant."""
    return Case(build(shape, TorchKernels()), IN_FLOAT32, "plain")


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(199), k=length)


def driver(case: Case, block_size: int = 16, **options: bool) -> PagedDriver:
    return PagedDriver(case.model, pool(case.model.config, block_size, store=case.store), **options)


def whole(case: Case, ids: list[int], block_size: int = 16) -> torch.Tensor:
    """Logits `[len(ids), vocab]` of a prompt that is computed alone and in one piece."""
    alone = driver(case, block_size)
    return alone.step([(alone.start(ids), len(ids))], every_logit=True)


def own(logits: torch.Tensor, rows: list[tuple[Run, int]], run: Run) -> torch.Tensor:
    """Of the logits of all tokens of `rows` those of `run`."""
    row = [other for other, _ in rows].index(run)
    first = sum(count for _, count in rows[:row])
    return logits[first : first + rows[row][1]]


def test_decoding_gives_what_a_prefill_of_the_same_positions_gives(case: Case) -> None:
    ids, at = prompt(LONG), driver(case)
    expected, run = whole(case, ids), at.start(ids)
    for start in (0, 500, LONG - 10):
        if start:
            at.step([(run, start - run.computed)])
        decoded = torch.cat([at.step([(run, 1)]) for _ in range(10)])
        assert torch.equal(decoded, expected[start : start + 10])


def test_the_logits_are_those_of_the_plain_kernels_up_to_rounding(case: Case) -> None:
    ids = prompt(LENGTH)
    expected = whole(plain(case.model.config), ids)
    assert expected.std() > 0.5, "the reference tells tokens apart"
    assert (whole(case, ids) - expected).abs().max() / expected.std() < BOUNDS[case.kind]


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), caching=st.booleans())
def test_any_cut_of_the_work_gives_the_same_bits(case: Case, data: st.DataObject, caching: bool) -> None:
    """Steps compute any number of positions of any runs, in any mixture; runs start late and share prefixes."""
    block_size = data.draw(st.sampled_from([1, 3, 16, 48] if case.kind == "torch" else [16, 48]))
    lengths = data.draw(st.lists(st.integers(1, LENGTH), min_size=1, max_size=6))
    seeds = data.draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
    expected = {seed: whole(case, prompt(LENGTH, seed)) for seed in set(seeds)}
    at = driver(case, block_size, prefix_caching=caching)
    waiting = [(prompt(LENGTH, seed)[:length], seed) for length, seed in zip(lengths, seeds, strict=True)]
    running: list[tuple[Run, int]] = []
    while waiting or running:
        for _ in range(data.draw(st.integers(0 if running else 1, len(waiting)))):
            ids, seed = waiting.pop()
            running.append((at.start(ids), seed))
        least = 0 if len(running) > 1 else 1
        counts = [(run, seed, data.draw(st.integers(least, len(run.ids) - run.computed))) for run, seed in running]
        rows = sorted((row for row in counts if row[2]), key=lambda row: row[2])
        if not rows:
            continue
        logits = at.step([(run, n) for run, _, n in rows])
        for (run, seed, _), row in zip(rows, logits, strict=True):
            assert torch.equal(row, expected[seed][run.computed - 1])
        running = [(run, seed) for run, seed in running if run.computed < len(run.ids)]


def cut_at_random(case: Case, ids: list[int], rng: random.Random) -> torch.Tensor:
    """Logits of every position of `ids`, computed in chunks of random sizes beside others that come and go."""
    at = driver(case)
    run, parts = at.start(ids), []
    others = [at.start(prompt(200, seed)) for seed in range(4)]
    while run.computed < len(ids):
        rows = [(run, min(rng.choice((1, 2, 7, 33, 120, 250)), len(ids) - run.computed))]
        rows += [(other, rng.choice((1, 1, 5, 20))) for other in others if rng.random() < 0.7 and other.computed < 180]
        rows.sort(key=lambda row: row[1])
        parts.append(own(at.step(rows, every_logit=True), rows, run))
    return torch.cat(parts)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_prompt_in_random_chunks_beside_others(case: Case, seed: int) -> None:
    ids = prompt(LONG)
    assert torch.equal(cut_at_random(case, ids, random.Random(seed)), whole(case, ids))


def test_without_the_mode_chunks_and_batches_show() -> None:
    """The test above can fail."""
    at, ids = plain(SHAPES["gqa"]), prompt(LONG)
    assert not torch.equal(cut_at_random(at, ids, random.Random(0)), whole(at, ids))


def test_a_cached_prefix_is_as_good_as_a_cold_one(case: Case) -> None:
    shared, at = prompt(50, seed=1), driver(case, prefix_caching=True)
    at.generate([shared], 1)
    ids = shared + prompt(30)
    run = at.start(ids)
    assert run.cached == 48
    logits = at.step([(run, len(ids) - run.computed)], every_logit=True)
    assert torch.equal(logits, whole(case, ids)[run.cached :])


def test_what_was_swapped_out_and_in_goes_on_with_the_same_bits(case: Case) -> None:
    ids, at = prompt(LENGTH), driver(case)
    run = at.start(ids)
    at.step([(run, 40)])
    host, homes = HostPool(at.kv, 8), np.arange(len(run.table))
    host.swap_out(np.stack((np.array(run.table), homes), axis=1))
    at.kv.zero_blocks(np.array(run.table))
    at.step([(at.start(prompt(60, seed=1)), 60)])
    run.table = at.take_blocks(len(homes))
    host.swap_in(np.stack((homes, np.array(run.table)), axis=1))
    assert torch.equal(at.step([(run, LENGTH - 40)], every_logit=True), whole(case, ids)[40:])


def test_what_lies_in_others_blocks_does_not_matter(case: Case) -> None:
    ids, at = prompt(LENGTH), driver(case)
    for layer in range(at.kv.num_layers):
        at.kv.keys(layer)[: at.kv.num_blocks] = float("nan")
        at.kv.values(layer)[: at.kv.num_blocks] = float("nan")
    run = at.start(ids)
    parts = [at.step([(run, n)], every_logit=True) for n in (1, 30, 1, LENGTH - 32)]
    assert torch.equal(torch.cat(parts), whole(case, ids))


def test_a_model_built_anew_on_two_threads_gives_the_same_bits(case: Case) -> None:
    ids = prompt(LONG)
    expected = whole(case, ids)
    torch.set_num_threads(2)
    try:
        kernels = InvariantKernels() if case.kind == "torch" else MAKERS[case.kind]()
        assert torch.equal(whole(Case(build(case.model.config, kernels), case.store, case.kind), ids), expected)
    finally:
        torch.set_num_threads(1)


def test_another_process_gives_the_same_bits() -> None:
    """It computes in chunks of 7, on two threads."""
    script = """
import sys, torch
from random_llama import build, config, pool
from paged_driver import PagedDriver
from model_worker.kernels.invariant_backend import InvariantKernels, ask_mkl_for_invariance
ask_mkl_for_invariance()
torch.set_num_threads(2)
model = build(config(), InvariantKernels())
at = PagedDriver(model, pool(config(), 16))
run = at.start(list(range(90)))
parts = [at.step([(run, min(7, 90 - run.computed))], every_logit=True) for _ in range(0, 90, 7)]
sys.stdout.buffer.write(torch.cat(parts).numpy().tobytes())
"""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    child = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=True
    )
    expected = whole(Case(build(config(), KERNELS), IN_FLOAT32, "torch"), list(range(90)))
    assert child.stdout == expected.numpy().tobytes()
