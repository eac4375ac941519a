"""Logits on a device of their own give the tokens that they give on the host, bit for bit, and few of them leave the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_maker import sample_rows

from model_worker import device_race
from model_worker.device_sampler import DeviceSampler
from model_worker.draws import Draws
from model_worker.kernels.best_tokens import first_best
from model_worker.sample_rows import SampleRows
from model_worker.sampler import NO_TOKEN, Sampler
from model_worker.token_draw import top_p_reach
from tessera.values.sampling import SamplingParams
from tests.model_worker.far_device import FAR, counting, far

__all__ = ["far"]

VOCAB = 300
HOST = Sampler((2, 9))
SAMPLER = DeviceSampler(HOST)
GREEDY = SamplingParams(seed=0, temperature=0.0)

plain = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-30, 0.1, 0.7, 1.0, 1.8, 100.0]),
)
filtered = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 1.8, 100.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 299, 300]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95, 1 - 1e-6, 1.0]),
    min_p=st.sampled_from([0.0, 1e-5, 0.1, 1.0]),
)
ruled = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([0.0, 1.0]),
    top_k=st.sampled_from([0, 5]),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.sampled_from([(), (5, 6)]),
    logit_bias=st.sampled_from([(), ((7, 30.0), (8, -5.0))]),
    allowed_token_ids=st.sampled_from([(), (2, 9), (1, 2, 3, 250)]),
)


@st.composite
def some_logits(draw: st.DrawFn, count: int) -> np.ndarray:
    """Of every shape: flat, steep, coarse (with many equals), and some that are no numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(size=(count, VOCAB)).astype(np.float32)
    for row in range(count):
        logits[row] *= np.float32(draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0, 1e4])))
        if draw(st.booleans()):
            logits[row] = np.round(logits[row])
        if draw(st.integers(0, 7)) == 0:
            logits[row, draw(st.integers(0, VOCAB - 1))] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    return logits


def drawn_alike(logits: np.ndarray, there: torch.Tensor, rows: SampleRows, wanted: np.ndarray) -> None:
    """What a device gives is what the host gives; where rows are wanted, it holds their logits."""
    token_ids, failures = HOST.draw(logits, rows)
    drawn = SAMPLER.draw_there(there, rows, wanted)
    assert drawn.token_ids.dtype == np.int32 and drawn.token_ids.tolist() == token_ids.tolist()
    assert drawn.failures == failures
    held = drawn.held.rows
    assert isinstance(held, np.ndarray) and set(np.flatnonzero(wanted & (token_ids != NO_TOKEN))) <= set(held.tolist())
    assert np.array_equal(drawn.held.values, logits[held])


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.usefixtures("far")
def test_tokens_and_failures_are_the_host_s(*, is_far: bool) -> None:
    @settings(max_examples=20 if is_far else 40, deadline=None)
    @given(data=st.data())
    def alike(data: st.DataObject) -> None:
        asked = data.draw(st.lists(st.tuples(plain | filtered | ruled, st.integers(0, 2**20)), min_size=1, max_size=6))
        logits = data.draw(some_logits(len(asked)))
        rows = sample_rows([params for params, _ in asked], [index for _, index in asked], VOCAB)
        rows = replace(rows, samples=np.array([data.draw(st.integers(0, 7)) > 0 for _ in asked]))
        wanted = np.array([data.draw(st.integers(0, 3)) == 0 for _ in asked])
        there = torch.from_numpy(logits.copy())
        drawn_alike(logits, there.to(FAR) if is_far else there, rows, wanted)

    alike()


def test_on_the_host_nothing_is_copied() -> None:
    logits = torch.randn(3, VOCAB)
    drawn = SAMPLER.draw(logits, sample_rows([GREEDY] * 3, [0] * 3, VOCAB))
    assert drawn.held.rows == slice(None) and drawn.held.values.ctypes.data == logits.data_ptr()
    assert drawn.token_ids.tolist() == logits.argmax(dim=1).tolist()


@pytest.mark.usefixtures("far")
def test_of_greedy_rows_the_host_sees_their_tokens_alone() -> None:
    logits = torch.randn(5, VOCAB)
    logits[3, 7] = torch.nan
    rows = sample_rows([GREEDY] * 5, [0] * 5, VOCAB)
    there = logits.to(FAR)
    with counting() as copied:
        drawn = SAMPLER.draw(there, rows)
    assert sum(copied) == 3 * 5 and set(drawn.failures) == {3}
    wanted = np.arange(5) == 2
    with counting() as copied:
        drawn = SAMPLER.draw(there, rows, wanted)
    assert sum(copied) == 3 * 5 + VOCAB and np.array_equal(drawn.held.values, logits[2:3].numpy())


def test_the_first_of_the_best_is_found_with_its_logit() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, -torch.inf, 0.0], [0.0, 1.0, torch.nan], [-3.0, -2.0, -2.5]])
    best = first_best(logits)
    assert best.token_ids[[0, 3]].tolist() == [1, 1] and best.logits[[0, 3]].tolist() == [2.0, -2.0]
    assert best.is_finite.tolist() == [True, False, False, True]


@pytest.mark.usefixtures("far")
def test_of_rows_without_a_filter_the_host_sees_those_who_may_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of a few rows each, some of which do not lie together."""
    vocab = 4000
    monkeypatch.setattr(device_race, "_ELEMENTS_MAX", 3 * vocab)
    torch.manual_seed(3)
    logits = torch.randn(24, vocab) * torch.logspace(-2, 1.5, 24)[:, None]
    params = [SamplingParams(seed=row, temperature=0.7) for row in range(24)]
    params[5] = GREEDY
    rows = sample_rows(params, list(range(24)), vocab)
    there = logits.to(FAR)
    with counting() as copied:
        drawn = SAMPLER.draw(there, rows)
    assert drawn.token_ids.tolist() == HOST.draw(logits.numpy(), rows)[0].tolist()
    assert sum(copied) < 3 * 24 + 4 * 24 * 10


@pytest.mark.usefixtures("far")
def test_of_rows_with_filters_the_host_sees_the_likeliest_tokens_unless_these_are_too_few() -> None:
    vocab = 2000
    torch.manual_seed(3)
    logits = 4 * torch.randn(8, vocab)
    logits[6] *= 0.01  # half of these, and all of those, are more than what is looked at
    logits[7] = 1.0
    few = [{"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.8, "min_p": 0.01}]
    params = [SamplingParams(seed=row, **few[row % 4]) for row in range(6)]  # type: ignore[arg-type]
    params += [SamplingParams(seed=6, top_p=0.5), SamplingParams(seed=7, top_k=5)]
    rows = sample_rows(params, list(range(8)), vocab)
    there = logits.to(FAR)
    with counting() as copied:
        drawn = SAMPLER.draw(there, rows)
    assert drawn.token_ids.tolist() == HOST.draw(logits.numpy(), rows)[0].tolist()
    assert isinstance(drawn.held.rows, np.ndarray) and drawn.held.rows.tolist() == [6, 7]
    assert sum(copied) == 3 * 8 + 8 * 2 * 256 + 3 + 2 * vocab


@pytest.mark.parametrize("top_p", [0.3, 0.5, 0.75])
def test_where_the_cut_of_top_p_could_be_one_token_further_the_host_decides(top_p: float) -> None:
    """Four equals: half of them is two of four, or three if the mass is a little more."""
    logits = torch.full((1, 600), -60.0)
    logits[0, [3, 50, 70, 599]] = 2.0
    logits[0, [7, 8, 9]] = torch.tensor([1.0, 0.5, 0.2])
    params = [SamplingParams(seed=5, top_p=top_p)]
    rows = sample_rows(params, [1], 600)
    expected = HOST.draw(logits.numpy(), rows)[0].tolist()
    assert SAMPLER.draw_there(logits, rows).token_ids.tolist() == expected
    tops, best = logits.numpy().copy(), np.array([2.0], np.float32)
    tops[0] = -np.sort(-tops[0])
    mass = np.exp(tops[0] - 2.0, dtype=np.float32).sum(dtype=np.float64)
    draws = Draws.of(rows, np.array([0]))
    for cut in (1, 2, 3, 5):
        running = np.cumsum(np.exp(tops[0] - 2.0), dtype=np.float64)
        exact = np.array([running[cut - 1] / top_p])
        assert top_p_reach(tops, best, draws, exact).tolist() == [601]
    assert top_p_reach(tops, best, draws, np.array([mass])).tolist() == [4]


@pytest.mark.parametrize("logit", [0.0, 1.0, torch.nan, torch.inf])
@pytest.mark.usefixtures("far")
def test_a_rehearsal_takes_whatever_logits_there_are(logit: float) -> None:
    device_race.rehearse(torch.full((3, VOCAB), logit).to(FAR))
