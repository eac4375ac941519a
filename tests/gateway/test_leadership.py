"""Whom a gateway listens to, whatever several schedulers say and in whatever order."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.leadership import Answer, Leadership
from tessera.values.identity import NO_EPOCH, Epoch


def epoch(number: int, instance: str = "a") -> Epoch:
    return Epoch(number, instance.encode() * 16)


def test_the_highest_epoch_leads_and_an_older_one_is_refused() -> None:
    house: Leadership[str] = Leadership()
    assert house.invited("first", epoch(5)) is Answer.FOLLOW
    assert house.counts("first", epoch(5))
    assert house.invited("second", epoch(4)) is Answer.REFUSE
    assert house.invited("second", epoch(5, "b")) is Answer.REFUSE, "an equal number counts only from the same instance"
    assert house.invited("second", epoch(6)) is Answer.FOLLOW
    assert not house.counts("first", epoch(5)), "from the invitation on"
    assert house.gone("second") is None
    assert (house.leader, house.highest) == (None, epoch(6))
    assert house.invited("first", epoch(5)) is Answer.REFUSE, "also while nobody leads"


def test_one_leader_at_two_addresses_is_followed_once() -> None:
    house: Leadership[str] = Leadership()
    assert house.invited("name", epoch(1)) is Answer.FOLLOW
    assert house.invited("address", epoch(1)) is Answer.KEEP
    assert not house.counts("address", epoch(1))
    assert house.gone("name") == "address"
    assert house.counts("address", epoch(1))


def test_a_leader_may_invite_again() -> None:
    house: Leadership[str] = Leadership()
    for number in (1, 1, 3):
        assert house.invited("one", epoch(number)) is Answer.FOLLOW


moves = st.tuples(st.sampled_from("abc"), st.none() | st.tuples(st.integers(1, 4), st.sampled_from("xy")))


@given(st.lists(moves, max_size=30))
def test_the_epoch_never_falls_and_only_its_own_inviter_leads(played: list[tuple[str, tuple[int, str] | None]]) -> None:
    house: Leadership[str] = Leadership()
    standing: dict[str, Epoch] = {}
    highest = NO_EPOCH
    for scheduler, invitation in played:
        before = house.leader
        if invitation is None:
            house.gone(scheduler)
            standing.pop(scheduler, None)
        else:
            taken = epoch(*invitation)
            answer = house.invited(scheduler, taken)
            assert (answer is Answer.REFUSE) == (not taken.supersedes(highest))
            assert (answer is Answer.KEEP) == (taken == highest and before not in (None, scheduler))
            standing[scheduler] = taken
            if answer is Answer.REFUSE:
                del standing[scheduler]
            else:
                highest = taken
        assert house.highest == highest
        able = [name for name, epoch_ in standing.items() if epoch_ == highest]
        assert (house.leader in able) if able else (house.leader is None)
