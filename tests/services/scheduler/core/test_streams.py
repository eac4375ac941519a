"""Streams: what each gateway is sent, and when."""

import random

import numpy as np
import pytest

from services.scheduler.core.committed_output import CommittedOutput
from services.scheduler.core.record import Arrival, DecodeColumns, Record, RequestDelta
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.streams import DEADLINES_SLACK, Claimed, Streams, Subscription
from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason
from tessera.values.request import RequestOutput, RequestTimings, Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import TakenOver

A, B = b"a" * 16, b"b" * 16
GRACE_US = 30_000_000
TIMINGS = RequestTimings(1, 2, 3)
NONE = np.zeros(0, np.int32)


class Desk:
    """A scheduler's committed tokens, its records, and the streams under test."""

    def __init__(self) -> None:
        self.outputs: dict[bytes, list[int]] = {}
        self.number = 0
        self.now_us = 0
        self.streams: Streams[str] = Streams(Config(gateway_grace_ms=30_000), self.read)

    def read(self, request_id: bytes, first: int, end: int) -> CommittedOutput:
        return CommittedOutput(tuple(self.outputs[request_id][first:end]))

    def record(self, **fields: object) -> int:
        self.number += 1
        self.streams.add(Record(self.number, **fields), self.now_us)  # type: ignore[arg-type]
        return self.number

    def delta(
        self, request_id: bytes, *tokens: int, offset: int | None = None, finish: Finish | None = None, subscriber: int = 0
    ) -> int:
        """Tell a request whole from `offset` on."""
        output = self.outputs.setdefault(request_id, [])
        start = len(output) if offset is None else offset
        output[start:] = tokens
        status = SequenceStatus.RUNNING if finish is None else SequenceStatus.FINISHED
        submission = Submission(request_id, np.zeros(1, np.int32), SamplingParams(seed=0))
        told = RequestDelta(
            request_id, status, subscriber, 1, "", start, tokens, 0, (), 7, finish, TIMINGS, submission, Arrival(1, 1)
        )
        return self.record(requests=(told,))

    def decode(self, *ids: bytes) -> int:
        """One more token for each."""
        offsets = []
        for request_id in ids:
            offsets.append(len(self.outputs[request_id]))
            self.outputs[request_id].append(100 + offsets[-1])
        columns = DecodeColumns(ids, np.array(offsets, np.int32), np.array(offsets, np.int32) + 100, NONE, NONE, NONE)
        return self.record(decoded=columns)

    def frame(self, session: str) -> list[tuple[bytes, int, tuple[int, ...]]]:
        return [(output.request_id, output.token_offset, output.token_ids) for output in self.streams.take_frame(session)]


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_tokens_leave_when_their_record_is_acknowledged(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    first = desk.delta(A)
    second = desk.decode(A)
    desk.streams.release(first, is_durable=True)
    assert desk.frame("g1") == [] and desk.streams.due_sessions == []
    desk.streams.release(second, is_durable=True)
    assert desk.streams.due_sessions == ["g1"]
    assert desk.frame("g1") == [(A, 0, (100,))]
    assert desk.frame("g1") == []


def test_committed_tokens_of_later_records_do_not_leave_with_earlier_ones(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    first = desk.delta(A, 5)
    desk.decode(A)
    desk.streams.release(first, is_durable=True)
    assert desk.frame("g1") == [(A, 0, (5,))]


def test_tokens_leave_at_once_while_the_store_does_not_keep_up(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    desk.delta(A, 5)
    desk.streams.release(0, is_durable=False)
    assert desk.frame("g1") == [(A, 0, (5,))]


def test_a_slow_gateway_gets_everything_in_one_frame(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    desk.streams.claim("g1", B, 0, 0)
    desk.delta(A)
    desk.delta(B)
    for _ in range(50):
        desk.streams.release(desk.decode(A, B), is_durable=True)
    expected = tuple(range(100, 150))
    assert desk.frame("g1") == [(A, 0, expected), (B, 0, expected)]


def test_the_end_is_sent_once_with_what_belongs_to_it(desk: Desk) -> None:
    finish = Finish(FinishReason.EOS, 3, stop_token_id=2)
    desk.streams.claim("g1", A, 4, 0)
    desk.delta(A, 8, 9, subscriber=4)
    desk.streams.release(desk.delta(A, 2, finish=finish, subscriber=4), is_durable=True)
    assert desk.streams.take_frame("g1") == [RequestOutput(A, 4, 0, (8, 9, 2), 7, finish, TIMINGS)]
    desk.streams.release(desk.record(), is_durable=True)
    assert desk.streams.take_frame("g1") == []


def test_an_end_without_new_tokens_is_sent(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    desk.streams.release(desk.delta(A, 1, 2), is_durable=True)
    assert desk.frame("g1") == [(A, 0, (1, 2))]
    finish = Finish(FinishReason.ABORTED, 2)
    desk.streams.release(desk.delta(A, finish=finish), is_durable=True)
    assert desk.streams.take_frame("g1") == [RequestOutput(A, 0, 2, (), 7, finish, TIMINGS)]


def test_a_gateway_that_comes_back_goes_on_behind_what_it_holds(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    desk.streams.release(desk.delta(A, 1, 2, 3), is_durable=True)
    desk.frame("g1")
    desk.streams.close("g1", desk.now_us)
    desk.streams.release(desk.decode(A), is_durable=True)
    assert desk.streams.claim("g1 again", A, 0, 2) == Claimed(None)
    assert desk.frame("g1 again") == [(A, 2, (3, 103))]


def test_the_higher_resume_number_takes_over(desk: Desk) -> None:
    desk.delta(A, 1, 2)
    desk.streams.release(1, is_durable=True)
    assert desk.streams.claim("g1", A, 0, 0) == Claimed(None)
    assert desk.streams.claim("g2", A, 1, 1) == Claimed(Subscription("g1", 0))
    assert desk.streams.claim("g1", A, 0, 0) == TakenOver(A, 0)
    assert desk.streams.due_sessions == ["g2"] and desk.frame("g1") == []
    assert desk.frame("g2") == [(A, 1, (2,))]
    assert desk.streams.claim("g2", A, 2, 2) == Claimed(None), "its own gateway needs not be told"


def test_a_number_the_journal_knows_holds_over_a_takeover(desk: Desk) -> None:
    desk.delta(A, 1, subscriber=3)
    assert desk.streams.claim("g1", A, 2, 0) == TakenOver(A, 2)
    assert desk.streams.claim("g1", A, 3, 0) == Claimed(None)


def test_an_end_is_sent_to_every_new_claim(desk: Desk) -> None:
    finish = Finish(FinishReason.EOS, 1)
    desk.streams.claim("g1", A, 0, 0)
    desk.streams.release(desk.delta(A, 4, finish=finish), is_durable=True)
    assert len(desk.frame("g1")) == 1
    desk.streams.claim("g2", A, 1, 1)
    assert desk.streams.take_frame("g2") == [RequestOutput(A, 1, 1, (), 7, finish, TIMINGS)]


def test_an_end_before_what_a_gateway_holds_is_told_from_the_end(desk: Desk) -> None:
    finish = Finish(FinishReason.STOP_STRING, 2, stop_string="x")
    desk.delta(A, 4, 5, finish=finish)
    desk.streams.claim("g1", A, 0, 3)
    desk.streams.release(1, is_durable=True)
    assert desk.streams.take_frame("g1") == [RequestOutput(A, 0, 2, (), 7, finish, TIMINGS)]


def test_requests_of_a_lost_session_expire_after_the_grace(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    desk.streams.claim("g2", B, 0, 0)
    desk.delta(A)
    desk.delta(B)
    desk.now_us = 5
    desk.streams.close("g1", desk.now_us)
    assert desk.streams.expired(4 + GRACE_US) == []
    assert desk.streams.expired(5 + GRACE_US) == [A]
    assert desk.streams.expired(6 + GRACE_US) == [], "named twice"


def test_a_detached_request_expires_after_its_own_grace(desk: Desk) -> None:
    """Whoever left first, and whatever became of the session."""
    for request_id in (A, B):
        desk.streams.claim("g1", request_id, 0, 0)
        desk.delta(request_id)
    desk.streams.detach(A, 0, GRACE_US + 9)
    desk.streams.detach(B, 5, 7)
    desk.streams.close("g1", 6)
    assert desk.streams.expired(11) == []
    assert desk.streams.expired(12) == [B]
    assert desk.streams.expired(GRACE_US + 8) == []
    assert desk.streams.expired(GRACE_US + 9) == [A]


def test_a_claim_ends_the_wait(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    desk.delta(A)
    desk.streams.detach(A, 0, 5)
    desk.streams.claim("g2", A, 1, 0)
    assert desk.streams.expired(100) == []
    desk.streams.detach(A, 100, 5)
    assert desk.streams.expired(104) == [] and desk.streams.expired(105) == [A]


def test_a_client_that_comes_and_goes_costs_no_memory(desk: Desk) -> None:
    """Deadlines that hold no longer are swept out, and the one that holds stays."""
    desk.delta(A)
    for turn in range(10_000):
        desk.streams.claim("g1", A, turn, 0, alias=bytes([turn % 256]) * 16)
        desk.streams.detach(A, turn, GRACE_US)
    assert len(desk.streams._deadlines) <= 2 + DEADLINES_SLACK and not desk.streams._aliases
    assert desk.streams.expired(9_998 + GRACE_US) == []
    assert desk.streams.expired(9_999 + GRACE_US) == [A]


def test_what_is_said_counts_only_from_who_has_the_request(desk: Desk) -> None:
    desk.delta(A)
    assert desk.streams.claimed_by("g1", A, 0) == A, "nobody has it: whoever had it before a takeover"
    desk.streams.claim("g1", A, 0, 0)
    assert desk.streams.claimed_by("g1", A, 0) == A
    desk.streams.claim("g2", A, 0, 0, alias=B)
    assert desk.streams.claimed_by("g1", A, 0) is None
    assert desk.streams.claimed_by("g2", B, 0) == desk.streams.claimed_by("g2", A, 0) == A
    desk.streams.claim("g2", A, 1, 0)
    assert desk.streams.claimed_by("g2", A, 0) is None and desk.streams.claimed_by("g2", B, 1) is None
    desk.streams.detach(A, 0)
    assert desk.streams.claimed_by("g2", A, 1) == A and desk.streams.claimed_by("g2", A, 0) is None


def test_a_recovered_request_that_nobody_claims_expires(desk: Desk) -> None:
    desk.now_us = 9
    desk.delta(A)
    desk.delta(B)
    desk.streams.claim("g1", B, 0, 0)
    assert desk.streams.expired(9 + GRACE_US) == [A]


def test_a_request_that_ends_unclaimed_does_not_expire(desk: Desk) -> None:
    desk.delta(A)
    desk.delta(A, finish=Finish(FinishReason.EOS, 0))
    assert desk.streams.expired(10 * GRACE_US) == []


def test_a_finished_request_does_not_expire(desk: Desk) -> None:
    desk.delta(A, finish=Finish(FinishReason.EOS, 0))
    desk.streams.claim("g1", A, 0, 0)
    desk.streams.close("g1", 1)
    assert desk.streams.expired(10 * GRACE_US) == []


def test_a_forgotten_request_leaves_nothing(desk: Desk) -> None:
    desk.streams.claim("g1", A, 0, 0)
    desk.delta(A, 1, finish=Finish(FinishReason.EOS, 1))
    desk.streams.release(desk.record(forgotten=(A,)), is_durable=True)
    assert desk.frame("g1") == [] and desk.streams.due_sessions == []
    desk.streams.close("g1", 1)
    assert desk.streams.expired(10 * GRACE_US) == []


def test_a_replaced_output_is_shown_only_from_its_own_record_on(desk: Desk) -> None:
    """A gateway came back with an output that contradicts the committed one, and won."""
    desk.streams.claim("g1", A, 0, 0)
    desk.streams.release(desk.delta(A, 1, 2, 3), is_durable=True)
    desk.frame("g1")
    hidden = desk.decode(A)
    desk.streams.claim("g2", A, 1, 2)
    replaced = desk.delta(A, 1, 9, offset=0, subscriber=1)
    again = desk.decode(A)
    desk.streams.release(hidden, is_durable=True)
    assert desk.frame("g2") == []
    desk.streams.release(replaced, is_durable=True)
    assert desk.frame("g2") == []
    desk.streams.release(again, is_durable=True)
    assert desk.frame("g2") == [(A, 2, (102,))]


def test_a_finish_that_comes_earlier_replaces_the_first(desk: Desk) -> None:
    """A gateway found a stop string before the end that the tokens gave."""
    desk.streams.claim("g1", A, 0, 0)
    desk.streams.release(desk.delta(A, 1, 2, 3, finish=Finish(FinishReason.MAX_TOKENS, 3)), is_durable=True)
    earlier = Finish(FinishReason.STOP_STRING, 2, stop_string="x")
    desk.streams.release(desk.delta(A, offset=2, finish=earlier), is_durable=True)
    assert desk.streams.take_frame("g1") == [RequestOutput(A, 0, 0, (1, 2), 7, earlier, TIMINGS)]


def test_an_end_that_was_replaced_is_not_sent_with_the_tokens_of_the_next(desk: Desk) -> None:
    """A stop string was found in tokens that had ended by themselves, and before that is written somebody else claims the request."""
    desk.streams.claim("g1", A, 0, 0)
    desk.delta(A, 5, 6, 7, finish=Finish(FinishReason.MAX_TOKENS, 3))
    desk.streams.release(desk.number, is_durable=True)
    desk.frame("g1")
    earlier = Finish(FinishReason.STOP_STRING, 2, stop_string="x")
    number = desk.delta(A, 5, 6, offset=0, finish=earlier)
    desk.streams.claim("g2", A, 1, 1)
    assert desk.streams.take_frame("g2") == []
    desk.streams.release(number, is_durable=True)
    (output,) = desk.streams.take_frame("g2")
    assert (output.token_offset, output.token_ids, output.finish) == (1, (6,), earlier)


@pytest.mark.parametrize("seed", range(20))
def test_every_gateway_sees_dense_offsets_and_one_end(seed: int) -> None:
    """Random decoding, acknowledging, taking and losing of sessions: what a client puts together is the output, once."""
    rng = random.Random(seed)
    desk = Desk()
    ids = [bytes([i]) * 16 for i in range(6)]
    seen: dict[bytes, list[int]] = {request_id: [] for request_id in ids}
    ended: dict[bytes, int] = dict.fromkeys(ids, 0)
    session = {request_id: "0" for request_id in ids}
    for request_id in ids:
        desk.streams.claim("0", request_id, 0, 0)
        desk.delta(request_id)
    live, acked, sessions = list(ids), 0, 1

    def take(name: str) -> None:
        for output in desk.streams.take_frame(name):
            have = seen[output.request_id]
            assert output.token_offset <= len(have), "a gap"
            assert session[output.request_id] == name
            have[output.token_offset :] = output.token_ids
            ended[output.request_id] += output.finish is not None

    for _ in range(200):
        if live and rng.random() < 0.8:
            desk.decode(*rng.sample(live, rng.randint(1, len(live))))
        if live and rng.random() < 0.05:
            request_id = live.pop()
            desk.delta(request_id, finish=Finish(FinishReason.EOS, len(desk.outputs[request_id])))
        acked = rng.randint(acked, desk.number)
        desk.streams.release(acked, is_durable=rng.random() < 0.9)
        if rng.random() < 0.5:
            take(rng.choice(list(session.values())))
        if rng.random() < 0.1:
            desk.streams.close(str(sessions - 1), 0)
            for request_id in ids:
                if session[request_id] == str(sessions - 1):
                    session[request_id] = str(sessions)
                    ended[request_id] = 0
                    desk.streams.claim(str(sessions), request_id, sessions, len(seen[request_id]))
            sessions += 1
    for request_id in live:
        desk.delta(request_id, finish=Finish(FinishReason.EOS, len(desk.outputs[request_id])))
    desk.streams.release(desk.number, is_durable=True)
    for name in set(session.values()):
        take(name)
    assert seen == desk.outputs
    assert set(ended.values()) == {1}
