"""A process that did not run for a while."""

from gateway.pause_watch import PauseWatch


def test_a_gap_is_noticed_at_the_first_look_and_until_all_has_settled() -> None:
    watch = PauseWatch(gap_max_s=0.5, settle_s=1.0, now_s=100.0)
    assert [watch.look(now) for now in (100.1, 100.5, 101.0)] == [False, False, False], "gaps up to the limit are none"
    assert [watch.look(now) for now in (111.0, 111.4, 111.9)] == [True, True, True]
    assert [watch.look(now) for now in (112.0, 112.1)] == [False, False]


def test_a_second_pause_begins_the_settling_again() -> None:
    watch = PauseWatch(gap_max_s=0.5, settle_s=1.0, now_s=0.0)
    assert [watch.look(now) for now in (10.0, 10.4, 20.0, 20.4, 20.8, 21.0)] == [True, True, True, True, True, False]
