"""Prompts: as long as planned, free of special ids, and alike exactly where the workload says so."""

from hypothesis import given
from hypothesis import strategies as st

from services.bench.prompts import Prompts
from services.bench.trace import TRACE_BLOCK_TOKENS
from services.bench.workload import PlannedRequest

SPECIAL = (0, 2, 199)


def prompts(seed: int = 1, shared: int = 0) -> Prompts:
    return Prompts(200, SPECIAL, seed, shared)


@given(st.integers(0, 2**70), st.integers(1, 300), st.integers(0, 200), st.integers(0, 2**41))
def test_a_prompt_has_its_length_and_ordinary_ids(seed: int, tokens: int, shared: int, index: int) -> None:
    ids = prompts(seed, shared).token_ids(PlannedRequest(index, tokens, 1))
    assert len(ids) == tokens
    assert all(type(token_id) is int and 0 < token_id < 199 and token_id != 2 for token_id in ids)


def test_every_ordinary_id_is_drawn() -> None:
    ids = prompts().token_ids(PlannedRequest(0, 20_000, 1))
    assert set(ids) == set(range(200)) - set(SPECIAL)


def test_a_prompt_does_not_depend_on_those_before() -> None:
    plan = [PlannedRequest(index, 40, 1) for index in range(4)]
    together, alone = prompts(), prompts()
    for request in plan[:-1]:
        together.token_ids(request)
    assert together.token_ids(plan[-1]) == alone.token_ids(plan[-1])
    assert prompts(seed=2).token_ids(plan[-1]) != alone.token_ids(plan[-1])
    assert len({tuple(alone.token_ids(request)) for request in plan}) == 4


def test_the_shared_prefix_is_all_that_prompts_share() -> None:
    source = prompts(shared=30)
    one, other = (source.token_ids(PlannedRequest(index, 60, 1)) for index in range(2))
    assert one[:30] == other[:30] and one[30:] != other[30:]
    assert source.token_ids(PlannedRequest(5, 20, 1)) == one[:20]


def test_prompts_of_a_trace_share_the_blocks_of_their_ids() -> None:
    source, block = prompts(), TRACE_BLOCK_TOKENS
    first = source.token_ids(PlannedRequest(0, 3 * block, 1, block_ids=(0, 1, 2)))
    other = source.token_ids(PlannedRequest(1, 3 * block, 1, block_ids=(0, 1, 7)))
    assert first[: 2 * block] == other[: 2 * block] and first[2 * block :] != other[2 * block :]
    part = source.token_ids(PlannedRequest(2, block + 5, 1, block_ids=(0, 1)))
    assert part == first[: block + 5]
    longer = source.token_ids(PlannedRequest(3, 2 * block, 1, block_ids=(0,)))
    assert longer[:block] == first[:block] and longer[block:] != first[block : 2 * block]
