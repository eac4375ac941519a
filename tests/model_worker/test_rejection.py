"""Rejection sampling: whatever is drafted, and by whom, the tokens are distributed as the model's own."""

from typing import Any

import numpy as np
import pytest
from engine_driver import MAX_LEN, PROMPT, VOCAB, EngineDriver, Row, continuation, drop, entry
from hypothesis import given, settings
from hypothesis import strategies as st
from row_maker import sample_rows

from model_worker.models.deterministic import DeterministicLM, deterministic_config, next_tokens
from model_worker.noise import uniforms
from model_worker.sampler import NO_TOKEN, Sampler
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts
from model_worker.speculation.rejection import ACCEPTANCE, DRAFT, RESIDUAL, RejectionSampler, accepted_or_drawn, drawn_at
from tessera.values.sampling import SamplingParams

DRAWS = 200_000
P = np.array([0.3, 0.02, 0.0, 0.25, 0.08, 0.2, 0.15])
QS = {
    "alike": np.array([0.35, 0.03, 0.0, 0.2, 0.07, 0.2, 0.15]),
    "other": np.array([0.02, 0.5, 0.2, 0.02, 0.2, 0.05, 0.01]),
    "the same": P,
}


def fits(tokens: np.ndarray, p: np.ndarray) -> bool:
    """Chi-square at one in a thousand (its quantile as Wilson and Hilferty have it); the seeds are fixed. And nothing that cannot be."""
    counts, expected = np.bincount(tokens, minlength=len(p)), p * len(tokens)
    possible = p > 0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = np.count_nonzero(possible) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    return not counts[~possible].any() and statistic < quantile


def streams(count: int) -> tuple[np.ndarray, ...]:
    seeds, index = np.arange(count, dtype=np.uint64), np.full(count, 7, np.uint64)
    return tuple(uniforms(seeds, index, stream) for stream in (DRAFT, ACCEPTANCE, RESIDUAL))


@pytest.mark.parametrize("name", list(QS))
def test_two_hundred_thousand_tokens_are_distributed_as_the_model_s_where_drafts_are_drawn(name: str) -> None:
    q = np.broadcast_to(QS[name], (DRAWS, len(P)))
    places, chances, others = streams(DRAWS)
    drafts = drawn_at(q, places)
    assert fits(drafts, QS[name])
    tokens = accepted_or_drawn(np.broadcast_to(P, q.shape), q, drafts, chances, others)
    assert fits(tokens, P)
    kept, expected = np.count_nonzero(tokens == drafts), DRAWS * np.minimum(P, QS[name]).sum()
    assert abs(kept - expected) < 5 * np.sqrt(DRAWS) / 2, "as many stand as can: sum of min(p, q)"


@pytest.mark.parametrize("draft", range(len(P)))
def test_two_hundred_thousand_tokens_are_distributed_as_the_model_s_where_drafts_are_certain(draft: int) -> None:
    _, chances, others = streams(DRAWS)
    drafts = np.full(DRAWS, draft, np.int32)
    tokens = accepted_or_drawn(np.broadcast_to(P, (DRAWS, len(P))), None, drafts, chances, others)
    assert fits(tokens, P)
    assert abs(np.count_nonzero(tokens == draft) - DRAWS * P[draft]) < 5 * np.sqrt(DRAWS) / 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=6).filter(any), st.integers(0, 2**32), st.data())
def test_a_token_in_place_of_a_draft_is_one_that_the_model_gives_more_weight(
    weights: list[float], seed: int, data: Any
) -> None:
    p = np.array([weights]) / sum(weights)
    others = data.draw(st.lists(st.floats(0, 1), min_size=len(weights), max_size=len(weights)).filter(any))
    q = np.array([others]) / sum(others)
    draft = int(data.draw(st.sampled_from(np.flatnonzero(q[0] > 0).tolist())))
    rng = np.random.default_rng(seed)
    (token,) = accepted_or_drawn(p, q, np.array([draft], np.int32), rng.random(1), rng.random(1)).tolist()
    assert token == draft or p[0, token] > q[0, token]


@pytest.mark.parametrize("place", [0.0, 0.5, 1 - 2.0**-53])
def test_a_place_never_falls_on_a_token_without_weight(place: float) -> None:
    weights = np.array([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 0.0, 1e-300, 0.0, 0.0]])
    tokens = drawn_at(weights, np.full(2, place))
    assert (weights[np.arange(2), tokens] > 0).all()


def test_uniform_numbers_are_those_of_their_seed_index_and_stream() -> None:
    seeds, indices = np.repeat(np.arange(300, dtype=np.uint64), 10), np.tile(np.arange(10, dtype=np.uint64), 300)
    numbers = [uniforms(seeds, indices, stream) for stream in (1, 2, 3)]
    assert all(part.min() >= 0 and part.max() < 1 and abs(part.mean() - 0.5) < 0.03 for part in numbers)
    assert len(np.unique(np.concatenate(numbers))) == 9000
    assert uniforms(seeds[35:36], indices[35:36], 2) == numbers[1][35]


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 0.6, "top_k": 4},
        {"top_p": 0.8, "min_p": 0.05},
        {"frequency_penalty": 1.0, "repetition_penalty": 1.3, "logit_bias": ((2, 1.5),)},
        {"allowed_token_ids": (0, 2, 3, 7), "temperature": 1.7},
    ],
)
@pytest.mark.parametrize("draft", [2, 5])
def test_all_rules_act_before_a_draft_is_decided_on(rules: dict[str, Any], draft: int) -> None:
    """What rejection sampling gives, against what the sampler draws of the same logits."""
    count = 3_000
    logits = np.broadcast_to(np.linspace(-1.5, 1.5, 9).astype(np.float32)[[4, 7, 2, 8, 0, 5, 1, 3, 6]], (count, 9)).copy()
    params = [SamplingParams(seed=seed, **{"temperature": 1.0} | rules) for seed in range(count)]
    sampler = Sampler(())
    rows = sample_rows(params, [3] * count, 9, prompts=[(1, 2)] * count, outputs=[(2, 5, 5)] * count)
    own, _ = sampler.draw(logits, rows)
    tokens = own.copy()
    RejectionSampler(sampler).revise(tokens, logits, rows, np.full(count, draft, np.int32), None)
    p = sampler.probabilities(logits[:1], rows.only(np.arange(1)))[0]
    assert fits(own, p) and fits(tokens, p)
    assert np.count_nonzero(tokens == draft) == np.count_nonzero(
        uniforms(np.arange(count, dtype=np.uint64), np.full(count, 3, np.uint64), ACCEPTANCE) < p[draft]
    )


def test_rows_without_a_draft_or_a_temperature_keep_their_own_tokens() -> None:
    params = [SamplingParams(seed=seed, temperature=float(seed % 2)) for seed in range(4)]
    logits = np.random.default_rng(2).normal(size=(4, 9)).astype(np.float32)
    sampler, rows = Sampler(()), sample_rows(params, [0] * 4, 9)
    own, _ = sampler.draw(logits, rows)
    own[3] = NO_TOKEN
    tokens = own.copy()
    RejectionSampler(sampler).revise(tokens, logits, rows, np.array([7, -1, 7, 7], np.int32), None)
    assert tokens.tolist() == own.tolist()


class Second:
    """Proposes what the deterministic model likes second best, as far as there is room."""

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        token_ids = np.zeros((len(slots), int(rooms.max())), np.int32)
        for row, slot in enumerate(slots.tolist()):
            ids = table.token_ids[slot, : table.num_ids[slot]].tolist()
            for place in range(token_ids.shape[1]):
                ids.append(next_tokens(ids, VOCAB)[1])
                token_ids[row, place] = ids[-1]
        return Drafts(rooms.copy(), token_ids)


def outputs(seeds: range, temperature: float, rejects: bool, lengths: int = 4) -> list[list[int]]:
    """Of the first tokens of requests with these seeds, by one engine, each with a row of drafts behind its first token."""
    driver = EngineDriver(DeterministicLM(deterministic_config(VOCAB, MAX_LEN)), proposer=Second(), rejects=rejects)
    found = []
    for seed in seeds:
        sampling = SamplingParams(seed=seed, temperature=temperature)
        first = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2, 4, 5, 6], sampling=sampling)], num_decodes=0)
        more = driver.run([Row(0, lengths, 6 + lengths)], num_decodes=1, seen_step=driver.step)
        found.append([*first.token_ids.tolist(), *more.token_ids.tolist()])
        driver.run(drops=[drop(0)], durable_step=driver.step)
    return found


def test_a_row_accepts_as_often_as_the_model_would_draw_the_draft_and_goes_on_from_what_it_took_instead() -> None:
    found = outputs(range(240), 1.0, rejects=True)
    again = outputs(range(0, 240, 40), 1.0, rejects=True)
    assert again == found[::40], "the same drafts in the same rows give the same tokens"
    share = np.exp(15) / (np.exp(16) + np.exp(15) + VOCAB - 2)
    taken = np.array([len(tokens) - 2 for tokens in found])
    assert abs((taken >= 1).mean() - share) < 5 * np.sqrt(share / 240)
    for tokens in found:
        for place, token in enumerate(tokens):
            assert token in next_tokens(PROMPT + tokens[:place], VOCAB)
        refused = tokens[-1] if len(tokens) < 5 else None
        assert refused is None or refused == next_tokens(PROMPT + tokens[:-1], VOCAB)[0], (
            "in place of the second best, the best"
        )


def test_greedy_rows_are_the_same_under_both_verifications() -> None:
    assert outputs(range(2), 0.0, rejects=True) == outputs(range(2), 0.0, rejects=False) == [continuation(PROMPT, 2)] * 2
