"""When a standby may lead and when a leader may speak, as transcripts. The lease is two seconds.

A line is a second, what is seen then, and what follows. Between two lines the scheduler goes on seeing, ten times a second, what it saw last;
a `!` after the second says that it was stopped since the line before.
"""

import pytest

from services.scheduler.core.lease import LeaseHold, LeaseWatch, next_epoch
from tessera.values.identity import NO_EPOCH, Epoch

LEASE_US = 2_000_000
MINE, OTHERS = Epoch(3, b"m" * 16), Epoch(4, b"o" * 16)

SEEN = {
    "held": (OTHERS, True, False),
    "free": (OTHERS, False, False),
    "empty": (NO_EPOCH, False, True),
    "begun": (OTHERS, True, True),  # somebody leads, and has not written anything yet
    "mine": (MINE, True, False),
    "mine-empty": (MINE, True, True),
}


TURN_US = 100_000


def us(seconds: str) -> int:
    return round(float(seconds) * 1_000_000)


@pytest.mark.parametrize(
    "transcript",
    [
        pytest.param("0.0 held wait, 1.9 held wait, 2.0 free lead", id="a lease that ends is free at once"),
        pytest.param("0.0 free lead", id="a scheduler that starts finds a free lease"),
        pytest.param("0.0 mine lead", id="its own lease keeps it waiting for nothing"),
        pytest.param("0.0 mine-empty lead", id="nor does it in a store that it had no time to write"),
        pytest.param("0.0 empty wait, 3.9 empty wait, 4.0 empty lead", id="an empty store is watched for two leases"),
        pytest.param(
            "0.0 empty wait, 1.6 begun wait, 9.9 begun wait, 10.0 empty lead",
            id="whoever leads on an empty store is waited for",
        ),
        pytest.param(
            "0.0 empty wait, 1.0 held wait, 2.0 empty wait, 5.9 empty wait, 6.0 empty lead",
            id="a store that was emptied again is watched again",
        ),
        pytest.param(
            "0.0 held wait, 1.0 away -, 9.1 free wait, 11.0 free wait, 11.1 free lead",
            id="a store that comes back gives its leader one lease to renew",
        ),
        pytest.param(
            "0.0 held wait, 0.1 away -, 0.2 free wait, 0.6 held wait, 9.9 held wait", id="and the leader that does goes on"
        ),
        pytest.param(
            "0.0 away -, 0.1 free wait, 2.0 free wait, 2.1 free lead", id="so it is for a store that was away at the start"
        ),
        pytest.param(
            "0.0 held wait, 0.1 away -, 0.2 empty wait, 4.1 empty wait, 4.2 empty lead", id="a store that comes back empty"
        ),
        pytest.param(
            "0.0 empty wait, 1.1 away -, 1.2 empty wait, 5.1 empty wait, 5.2 empty lead",
            id="an empty store that goes away is watched from its return",
        ),
        pytest.param(
            "0.0 held wait, 9.0! free wait, 10.9 free wait, 11.0 free lead",
            id="a standby that was stopped does not know what happened meanwhile",
        ),
        pytest.param("0.0 held wait, 0.1 away -, 0.2 mine lead", id="nobody else has led since its own term"),
    ],
)
def test_a_standby_waits_or_leads(transcript: str) -> None:
    watch = LeaseWatch(LEASE_US, MINE)
    now_us, before = 0, ""

    def sees(what: str) -> str:
        if what == "away":
            watch.missed()
            return "-"
        return "lead" if watch.saw(now_us, *SEEN[what]) else "wait"

    for line in transcript.split(", "):
        when, what, then = line.split()
        while not when.endswith("!") and before and now_us + TURN_US < us(when):
            now_us += TURN_US
            sees(before)
        now_us, before = us(when.rstrip("!")), what
        assert sees(what) == then, line


@pytest.mark.parametrize(
    "transcript",
    [
        pytest.param(
            "0.0 look greets, 1.9 look greets, 2.0 look speaks, 9.9 look speaks", id="a Hello is answered for one lease"
        ),
        pytest.param(
            "0.0 look greets, 1.5 confirmed@1.0 greets, 2.9 look greets, 3.0 look speaks", id="from when it was asked for"
        ),
        pytest.param(
            "0.5 confirmed@0.4 greets, 0.6 confirmed@0.1 greets, 2.3 look greets, 2.4 look speaks", id="answers out of order"
        ),
        pytest.param("0.0 look greets, 2.1! look silent, 9.9 look silent", id="a leader that was stopped says nothing"),
        pytest.param("0.0 look greets, 1.9! look greets, 2.0 look speaks", id="unless for less than a lease"),
        pytest.param("0.0 look greets, 9.0! look silent, 9.1 confirmed@9.0 greets", id="until its epoch is confirmed"),
        pytest.param("0.0 look greets, 9.0! look silent, 9.1 confirmed@8.9 silent", id="by the answer to a later question"),
        pytest.param(
            "0.0 look greets, 9.0! look silent, 9.1 confirmed@9.0 greets, 20.0! look silent, 20.1 confirmed@9.2 silent",
            id="once for each time that it was stopped",
        ),
        pytest.param("2.1! look silent, 2.2 confirmed@2.1 greets", id="also where it was stopped while it took the epoch"),
    ],
)
def test_a_leader_speaks_or_not(transcript: str) -> None:
    hold = LeaseHold(LEASE_US, asked_us=0)
    now_us = 0
    for line in transcript.split(", "):
        when, what, then = line.split()
        while not when.endswith("!") and now_us + TURN_US < us(when):
            now_us += TURN_US
            hold.may_speak(now_us)
        now_us = us(when.rstrip("!"))
        if what.startswith("confirmed@"):
            hold.confirmed(us(what.removeprefix("confirmed@")))
        speaks, greets = hold.may_speak(now_us), hold.may_greet(now_us)
        assert ("greets" if greets else "speaks" if speaks else "silent") == then, line


def test_a_new_epoch_is_above_all_that_anybody_has_seen() -> None:
    instance = b"i" * 16
    assert next_epoch(NO_EPOCH, 0, (), instance) == Epoch(1, instance)
    assert next_epoch(OTHERS, 0, (NO_EPOCH, MINE), instance) == Epoch(5, instance)
    assert next_epoch(NO_EPOCH, 0, (MINE, OTHERS), instance) == Epoch(5, instance)
    assert next_epoch(MINE, 9, (OTHERS,), instance) == Epoch(10, instance)
