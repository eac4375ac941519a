"""What a request asked for, and what has happened to it, under the next leader."""

import pytest
from recovery_rig import Call, House

from services.scheduler.core.sequence import Sequence
from tessera.values.finish import Finish, FinishReason

OWN = {"priority": -2, "cache_salt": "a tenant", "max_model_length": 13}


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def sequence_of(house: House, call: Call) -> Sequence:
    sequence = house.lead.scheduler.request(call.submission.request_id)
    assert sequence is not None
    return sequence


@pytest.mark.parametrize("num_turns", [0, 2, 40])
@pytest.mark.parametrize("is_stored", [True, False])
def test_its_own_fields_stay_with_a_request(num_turns: int, is_stored: bool) -> None:
    """From the store, or from its gateway, which submits it again; before it runs, while it runs, after its end."""
    house = House()
    if is_stored or num_turns == 40:
        call = house.call(1, numbers(6), max_tokens=20, **OWN)
        house.write()
        house.turn(num_turns)
    else:
        house.turn(num_turns)
        call = house.call(1, numbers(6), max_tokens=20, **OWN)
    house.take_over()
    found = sequence_of(house, call).submission
    assert {name: getattr(found, name) for name in OWN} == OWN
    assert sequence_of(house, call).table.namespace, "nobody else's prefixes are hit"
    house.run()
    house.assert_as_undisturbed(call)
    assert sequence_of(house, call).finish == Finish(FinishReason.MAX_MODEL_LEN, 7)


def test_preemptions_are_counted_on_under_the_next_leader() -> None:
    house = House(num_blocks=5, enable_prefix_caching=False)
    calls = [house.call(number, numbers(6, 10 * number), max_tokens=12) for number in (1, 2)]
    house.write()
    while not any(sequence_of(house, call).timings.num_preemptions for call in calls):
        house.turn()
    house.turn(4)
    before = [sequence_of(house, call).timings.num_preemptions for call in calls]
    house.write()
    house.take_over()
    house.run()
    house.assert_as_undisturbed(*calls)
    after = [sequence_of(house, call).timings.num_preemptions for call in calls]
    here = house.lead.scheduler.load().num_preemptions
    assert sum(before) >= 1 and sum(after) == sum(before) + here, "those of both leaders"


def test_an_abort_stays_an_abort() -> None:
    house = House()
    call = house.call(1, numbers(6), max_tokens=20)
    house.turn(3)
    house.abort(call)
    house.write()
    house.take_over()
    sequence = sequence_of(house, call)
    assert sequence.status.name == "ABORTED"
    assert sequence.finish is not None and sequence.finish.reason is FinishReason.ABORTED
