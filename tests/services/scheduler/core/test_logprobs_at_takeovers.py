"""Log-probabilities outlive who told them: leaders, workers and gateways go, and every token has its own once."""

from dataclasses import replace

import numpy as np
import pytest
from recovery_rig import WORKER, Call, House

from services.scheduler.core.errors import BadOutput
from services.scheduler.store.memory import MemoryStore

PROMPT = [5, 6, 7, 8, 9, 10]
WANTED = {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 12}


def assert_whole(house: House, *calls: Call) -> None:
    """As undisturbed, and with everything that was asked for."""
    house.assert_as_undisturbed(*calls)
    assert [call.check_logprobs() for call in calls] == [0] * len(calls)


def test_each_token_has_its_own_and_the_prompt_with_the_first() -> None:
    house = House()
    calls = [
        house.call(1, PROMPT, **WANTED),
        house.call(2, PROMPT, max_tokens=9),
        house.call(3, PROMPT, logprob_token_ids=(3, 5)),
    ]
    house.run()
    assert_whole(house, *calls)
    assert calls[0].prompt_logprobs is not None and len(calls[0].prompt_logprobs) == len(PROMPT) - 1
    assert [logprobs.token_ids.tolist()[1:] for logprobs in calls[2].logprobs] == [[3, 5]] * len(calls[2].tokens)
    assert not any(logprobs.counts.any() for logprobs in calls[1].logprobs) and calls[1].prompt_logprobs is None


@pytest.mark.parametrize("num_turns", range(1, 9))
@pytest.mark.parametrize("num_lost", range(3))
def test_steps_that_nobody_heard_of_are_computed_again_in_the_same_slot(num_turns: int, num_lost: int) -> None:
    """The worker has gone on for `num_lost` steps behind what was written. Only the positions of tokens that nobody had heard of are computed
    a second time. Who wants none has nothing computed again."""
    house = House(max_batches_in_flight=2)
    call, plain = house.call(1, PROMPT, logprobs=2, max_tokens=12), house.call(2, PROMPT[:3], max_tokens=12)
    house.turn(num_turns)
    for _ in range(num_lost):
        house.execute()
    house.take_over()
    house.run()
    assert_whole(house, call, plain)
    again = house.worker.computed_positions - (len(PROMPT) + 11) - (3 + 11)
    assert again <= num_lost and house.lead.scheduler.load().recomputed_positions == 0


def test_a_block_that_another_shares_is_not_written_again() -> None:
    """The first fills a block that nobody has heard of but the leader, who lets a second request begin with it; then he dies. The slot is
    given up, and the block found again."""
    house = House(max_batches_in_flight=1)
    call = house.call(1, PROMPT, logprobs=2, max_tokens=20)
    known = house.lead.scheduler.request(call.submission.request_id)
    assert known is not None
    house.turn()
    while known.output_len < 7:
        house.execute()
        house.hear()
    other = house.call(2, [*PROMPT, *known.output_token_ids()], max_tokens=5)
    for _ in range(2):
        house.execute()
        house.hear()
    tables = [slot.block_table.tolist() for slot in house.worker.report().slots]
    assert len({*tables[0]} & {*tables[1]}) == 3
    house.take_over()
    house.run()
    assert_whole(house, call, other)


def test_tokens_that_were_written_but_not_read_come_with_theirs_from_the_store() -> None:
    house = House()
    call = house.call(1, PROMPT, **WANTED)
    house.turn(3)
    seen = len(call.tokens)
    for _ in range(2):
        house.execute()
        house.hear()
        house.write()
    house.take_over()
    assert len(house.lead.scheduler.request(call.submission.request_id).output_token_ids()) > seen  # type: ignore[union-attr]
    house.run()
    assert_whole(house, call)


def test_a_client_that_comes_back_at_another_gateway_has_all_of_them_from_its_offset_on() -> None:
    house = House()
    call = house.call(1, PROMPT, name="mine", **WANTED)
    house.turn(6)
    house.take_over()
    again = house.resume(call, 9, "g2", 1, received=call.received[:2])
    house.run()
    assert_whole(house, again)
    whole = house.resume(again, 10, "g3", 2, received=())
    house.run()
    assert_whole(house, whole)


def test_a_prompt_in_the_midst_of_its_prefill_is_told_whole() -> None:
    house = House(max_num_batched_tokens=4, max_num_seqs=2)
    prompt = list(range(3, 20))
    call = house.call(1, prompt, **WANTED)
    house.turn(2)
    house.take_over()
    house.run()
    assert_whole(house, call)


@pytest.mark.parametrize("swaps", [False, True])
def test_a_preempted_request_keeps_them(swaps: bool) -> None:
    house = House(
        num_blocks=5,
        num_host_blocks=8 if swaps else 0,
        enable_prefix_caching=False,
        preemption_mode="swap" if swaps else "recompute",
    )
    calls = [house.call(number, [number, *PROMPT[1:]], **WANTED) for number in (1, 2)]
    house.run()
    assert house.lead.scheduler.load().num_preemptions > 0
    assert_whole(house, *calls)


def test_a_cached_prefix_hides_no_prompt_token() -> None:
    """Of nine tokens the first eight are cached; the second and the third request have them computed again, and are told eight each."""
    house, told = House(), []
    for number, prompt in enumerate(([*range(11, 20)], [*range(11, 20)], [*range(11, 19), 30], [*range(11, 20)]), 1):
        call = house.call(number, prompt, max_tokens=2, prompt_logprobs=1)
        house.run()
        assert_whole(house, call)
        assert call.prompt_logprobs is not None
        told.append(call.prompt_logprobs)
    assert told[0] == told[1] == told[3] and len(told[0]) == 8
    assert told[2].between(0, 7) == told[0].between(0, 7)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_a_step_that_gives_many_tokens_tells_of_each_and_of_none_that_is_cut(num_drafts: int) -> None:
    house = House(num_speculative_tokens=num_drafts)
    house.worker.propose = lambda room: (room, room)  # all right
    calls = [house.call(1, PROMPT, logprobs=1, max_tokens=2), house.call(2, PROMPT, logprobs=0, max_tokens=7)]
    house.run()
    assert_whole(house, *calls)
    assert [len(call.logprobs) for call in calls] == [2, 7]


def test_a_worker_that_is_gone_takes_none_along() -> None:
    house = House(num_workers=2)
    calls = [house.call(number, PROMPT, **WANTED) for number in (1, 2)]
    house.turn(4)
    house.execute(WORKER)
    house.workers[WORKER].restart()
    house.workers[WORKER].queue.clear()
    house.outputs[WORKER].clear()
    house.lead.lose(WORKER)
    house.run()
    assert_whole(house, *calls)


def test_what_only_a_gateway_holds_has_none_for_others() -> None:
    """The store was lost, and with it what its leader knew: the gateway's tokens are kept, and a client that asks for them again is told that
    nobody has their log-probabilities. All later tokens have theirs."""
    house = House()
    call = house.call(1, PROMPT, name="mine", **WANTED)
    house.turn(5)
    held = len(call.tokens)
    house.store = MemoryStore()
    house.take_over()
    again = house.resume(call, 9, "g2", 1, received=())
    house.run()
    house.assert_as_undisturbed(again)
    found = [bool(logprobs.counts.any()) for logprobs in again.logprobs]
    assert found == [False] * held + [True] * (12 - held) and held > 2
    assert again.prompt_logprobs is None


@pytest.mark.parametrize("given", [{"logprobs": 0}, {"prompt_logprobs": 0}])
def test_an_output_without_what_was_asked_for_is_refused_and_changes_nothing(given: dict[str, int]) -> None:
    house = House()
    call = house.call(1, PROMPT, max_tokens=3, **given)
    house.call(2, PROMPT, max_tokens=3)
    house.execute()
    output = house.outputs[WORKER].pop(0)
    with pytest.raises(BadOutput, match="row 0"):
        house.lead.hear(WORKER, replace(output, logprobs=None, prompt_logprobs=None))
    house.outputs[WORKER].append(output)
    house.hear()
    house.run()
    assert_whole(house, call)


def test_who_wants_some_counts_in_no_lane_and_all_others_do() -> None:
    house = House()
    house.call(1, PROMPT, **WANTED)
    house.call(2, PROMPT, max_tokens=12)
    house.call(3, PROMPT, max_tokens=12, prompt_logprobs=0)
    house.turn(5)
    replica = house.lead.scheduler.replica(WORKER)
    assert replica is not None
    assert {np.frombuffer(one, ">u8")[1] for one in replica.lane_rows().request_ids} == {2, 3}
