"""The rules of resuming, without any connection: `ResumableAnswer` alone."""

from dataclasses import replace

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tessera.client import Finish, FinishReason, InternalError, Overloaded, Piece, TesseraError, Timings, Unavailable, Usage
from tessera.client.connection import Gateways, split_addresses
from tessera.client.errors import ErrorDetails
from tessera.client.request import generation_of
from tessera.client.results import TokenLogprob, TokenLogprobs, joined
from tessera.client.resume import (
    BACKOFF_MAX_S,
    OTHERS_RETRY_S,
    STANDING_S,
    GiveUp,
    ResumableAnswer,
    ResumePolicy,
    Retry,
    is_broken,
)

FINISH = Finish(FinishReason.STOP, None, None, Usage(1, 3, 0), Timings(0, 0, 0, 0), "")
GENERATION = generation_of("Hi", {"request_id": "r", "seed": 1})
CODE = grpc.StatusCode


def failure(code=CODE.UNAVAILABLE, message="", reason="", retry_after_ms=None):
    kind = {CODE.UNAVAILABLE: Unavailable, CODE.RESOURCE_EXHAUSTED: Overloaded}.get(code, TesseraError)
    return kind(message, code, ErrorDetails(reason=reason, retry_after_ms=retry_after_ms))


def answer_at(gateways=1, **policy):
    return ResumableAnswer(GENERATION, ResumePolicy(gateways, **policy), first_gateway=0)


def piece(token_offset, token_ids, text_offset, text, finish=None):
    return Piece("r", text, text_offset, tuple(token_ids), token_offset, finish)


def test_a_first_try_is_the_plain_request_and_each_next_one_says_what_is_here():
    answer = answer_at(gateways=2)
    assert not answer.request(0.0).HasField("resume")
    assert answer.take(piece(0, [5, 6], 0, "é")) == piece(0, [5, 6], 0, "é")
    assert isinstance(answer.failed(failure(), 1.0), Retry)
    request = answer.request(1.0)
    assert request.generation == GENERATION
    resume = request.resume
    assert (resume.number, resume.token_offset, resume.text_offset, list(resume.token_ids)) == (1, 2, 2, [5, 6])
    assert answer.gateway == 1
    answer.failed(failure(), 2.0)
    assert (answer.request(2.0).resume.number, answer.gateway) == (2, 0)


def told(*token_ids):
    return tuple(TokenLogprobs(TokenLogprob(one, -0.5, b""), 1, (), ()) for one in token_ids)


def test_log_probabilities_that_are_here_already_are_cut_with_their_tokens():
    generation = generation_of("Hi", {"request_id": "r", "seed": 1, "logprobs": 0, "prompt_logprobs": 0})
    answer = ResumableAnswer(generation, ResumePolicy(1), first_gateway=0)
    first = replace(piece(0, [5, 6], 0, "é"), logprobs=told(5, 6), prompt_logprobs=told(1, 2))
    assert answer.take(first) == first
    answer.failed(failure(), 1.0)
    again = replace(piece(0, [5, 6, 7], 0, "éa"), logprobs=told(5, 6, 7), prompt_logprobs=told(1, 2))
    assert answer.take(again) == replace(piece(2, [7], 2, "a"), logprobs=told(7))
    assert answer.take(replace(piece(1, [6, 7], 2, "a"), logprobs=told(6, 7))) is None
    last = piece(3, [], 3, "", FINISH)
    assert answer.take(last) == last
    whole = joined([first, replace(piece(2, [7], 2, "a"), logprobs=told(7)), last])
    assert (whole.logprobs, whole.prompt_logprobs) == (told(5, 6, 7), told(1, 2))


@pytest.mark.parametrize("options", [{"logprobs": 1}, {"logprob_token_ids": [3]}, {}])
def test_more_or_fewer_log_probabilities_than_tokens_are_a_bug(options):
    answer = ResumableAnswer(generation_of("Hi", {"request_id": "r", **options}), ResumePolicy(1), first_gateway=0)
    with pytest.raises(InternalError) as caught:
        answer.take(replace(piece(0, [5, 6], 0, "a"), logprobs=told(5)))
    assert caught.value.details.reason == "LOGPROBS_MISSING" and answer.received_tokens == 0


def test_a_try_that_broke_before_anything_came_is_resumed_from_the_start():
    answer = answer_at()
    answer.failed(failure(), 0.0)
    resume = answer.request(0.1).resume
    assert (resume.number, resume.token_offset, resume.text_offset, list(resume.token_ids)) == (1, 0, 0, [])


@pytest.mark.parametrize(
    ("sent", "new"),
    [
        (piece(0, [5, 6, 7], 0, "abcd"), piece(2, [7], 2, "cd")),
        (piece(1, [6, 7], 1, "bcd"), piece(2, [7], 2, "cd")),
        (piece(0, [5], 0, "abcd"), piece(2, [], 2, "cd")),
        (piece(2, [7], 0, "ab"), piece(2, [7], 2, "")),
        (piece(1, [6], 1, "b"), None),
        (piece(0, [], 0, ""), None),
        (piece(0, [5], 0, "a", FINISH), piece(2, [], 2, "", FINISH)),
    ],
)
def test_what_is_here_already_is_cut(sent, new):
    answer = answer_at()
    answer.take(piece(0, [5, 6], 0, "ab"))
    assert answer.take(sent) == new
    assert answer.is_finished == (sent.finish is not None)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (piece(3, [8], 2, ""), "OUTPUT_GAP"),
        (piece(3, [], 2, "", FINISH), "OUTPUT_GAP"),
        (piece(2, [7], 3, "d"), "OUTPUT_GAP"),
        (piece(1, [9], 2, ""), "OUTPUT_CONTRADICTED"),
        (piece(2, [], 1, "x"), "OUTPUT_CONTRADICTED"),
    ],
)
def test_what_does_not_continue_is_a_bug_and_changes_nothing(sent, reason):
    answer = answer_at()
    answer.take(piece(0, [5, 6], 0, "ab"))
    with pytest.raises(InternalError) as caught:
        answer.take(sent)
    assert (caught.value.details.reason, caught.value.request_id, caught.value.received_tokens) == (reason, "r", 2)
    assert answer.take(piece(2, [7], 2, "c", FINISH)) == piece(2, [7], 2, "c", FINISH)


BROKEN = [
    (CODE.UNAVAILABLE, "anything", ""),
    (CODE.UNAVAILABLE, "no scheduler", "NO_SCHEDULER"),
    (CODE.CANCELLED, "", ""),
    (CODE.INTERNAL, "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))", ""),
    (CODE.INTERNAL, "Received RST_STREAM with error code 2", ""),
    (CODE.UNKNOWN, "Stream removed (Data frame with END_STREAM flag received)", ""),
    (CODE.UNKNOWN, "No status received", ""),
    (CODE.UNKNOWN, "Received http2 header with status: 500", ""),
]
REFUSED = [
    (CODE.INTERNAL, "internal error; the server's log has the details", ""),
    (CODE.INTERNAL, "Stream removed by an operator", "A_REASON"),
    (CODE.UNKNOWN, "Unexpected <class 'KeyError'>", ""),
    (CODE.RESOURCE_EXHAUSTED, "", "OVERLOADED"),
    (CODE.ABORTED, "", "TAKEN_OVER"),
    *[(code, "", "") for code in (CODE.INVALID_ARGUMENT, CODE.NOT_FOUND, CODE.ALREADY_EXISTS, CODE.FAILED_PRECONDITION)],
    *[(code, "", "") for code in (CODE.DEADLINE_EXCEEDED, CODE.UNAUTHENTICATED, CODE.UNIMPLEMENTED, CODE.DATA_LOSS)],
]


@pytest.mark.parametrize(("code", "message", "reason"), BROKEN)
def test_what_broke_is_resumed(code, message, reason):
    assert is_broken(failure(code, message, reason))
    assert isinstance(answer_at().failed(failure(code, message, reason), 0.0), Retry)


@pytest.mark.parametrize(("code", "message", "reason"), REFUSED)
def test_what_the_server_decided_is_not(code, message, reason):
    error = failure(code, message, reason)
    assert not is_broken(error)
    answer = answer_at()
    answer.take(piece(0, [], 0, "a"))
    assert answer.failed(error, 0.0) == GiveUp()
    assert (error.request_id, error.received_tokens) == ("r", 0)


def test_an_overload_is_the_callers_unless_the_request_may_be_running():
    overload = failure(CODE.RESOURCE_EXHAUSTED, retry_after_ms=700)
    assert answer_at().failed(overload, 0.0) == GiveUp()
    assert answer_at(retry_overloaded=True).failed(overload, 0.0) == Retry(0.7)
    begun = answer_at(gateways=2)
    begun.take(piece(0, [5], 0, "a"))
    assert begun.failed(overload, 0.0) == Retry(0.7), "a full gateway's word counts, however many others there are"
    broken = answer_at()
    broken.failed(failure(), 0.0)
    assert isinstance(broken.failed(overload, 0.1), Retry), "the first try may have been taken in"
    assert begun.failed(failure(CODE.RESOURCE_EXHAUSTED, reason="SLOW_READER"), 0.0) == GiveUp(), "nobody says that it helps"


def test_the_next_gateway_is_asked_at_once_and_then_ever_later():
    answer = answer_at(gateways=3)
    delays = [answer.failed(failure(), 0.0).delay_s for _ in range(12)]
    assert delays[:2] == [0.0, 0.0]
    longest = [min(BACKOFF_MAX_S, 0.05 * 2**count) for count in range(10)]
    assert all(limit / 2 <= delay <= limit for delay, limit in zip(delays[2:], longest, strict=True))
    assert answer.take(piece(0, [5], 0, "")) is not None
    assert answer.failed(failure(), 5.0).delay_s == 0.0, "something new came in between"


def test_what_a_gateway_asks_for_is_waited_but_not_where_there_is_another():
    asked = failure(reason="DRAINING", retry_after_ms=3000)
    assert answer_at().failed(asked, 0.0) == Retry(3.0)
    assert answer_at(gateways=2).failed(asked, 0.0) == Retry(OTHERS_RETRY_S)


def test_the_last_try_begins_when_the_time_is_over():
    answer = answer_at(resume_timeout_s=10.0)
    answer.request(100.0)
    assert isinstance(answer.failed(failure(), 100.0), Retry)
    assert answer.failed(failure(retry_after_ms=5000), 109.0) == Retry(1.0)
    error = failure()
    assert answer.failed(error, 110.0) == GiveUp()
    assert error.request_id == "r"


def test_without_time_nothing_is_resumed():
    assert answer_at(resume_timeout_s=0).failed(failure(), 0.0) == GiveUp()


def test_something_new_gives_the_whole_time_again():
    answer = answer_at(resume_timeout_s=10.0)
    answer.failed(failure(), 0.0)
    answer.take(piece(0, [5], 0, ""))
    assert isinstance(answer.failed(failure(), 11.0), Retry)
    assert answer.take(piece(0, [5], 0, "")) is None
    assert answer.failed(failure(), 21.0) == GiveUp(), "what came again is nothing new"


def test_a_stream_that_stood_long_was_served_though_nothing_came():
    answer = answer_at(resume_timeout_s=10.0)
    answer.failed(failure(), 0.0)
    answer.request(1.0)
    assert isinstance(answer.failed(failure(), 1.0 + STANDING_S), Retry), "it waited in a queue"
    answer.request(50.0)
    assert answer.failed(failure(reason="NO_SCHEDULER"), 50.0 + STANDING_S) == GiveUp(), (
        "a gateway without a scheduler serves nobody"
    )


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ("a:1", ("a:1",)),
        ("a:1, b:2", ("a:1", "b:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
        ("dns:///a:1,unix:/b", ("dns:///a:1", "unix:/b")),
        ("ipv4:1.2.3.4:1,1.2.3.5:1", ("ipv4:1.2.3.4:1,1.2.3.5:1",)),
    ],
)
def test_addresses_are_given_in_several_ways(given, targets):
    assert split_addresses(given) == targets


@pytest.mark.parametrize("given", ["", [], ["a:1", ""], "a:1,", "a:1,b:2,a:1"])
def test_an_empty_address_or_one_given_twice_is_refused(given):
    with pytest.raises(ValueError, match="address"):
        split_addresses(given)


@given(st.integers(1, 4), st.lists(st.integers(0, 3)))
def test_a_gateway_is_left_only_by_who_failed_there(count, failed):
    gateways = Gateways(tuple(f"g:{index}" for index in range(count)))
    for number in failed:
        before = gateways.present
        gateways.leave(number % count)
        assert gateways.present == ((before + 1) % count if number % count == before else before)
        assert sorted(gateways.order()) == list(range(count)) and gateways.order()[0] == gateways.present


TOKENS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["", "a", "é", "語", " "])), min_size=1, max_size=12)


class Resuming(RuleBasedStateMachine):
    """A gateway that sends any pieces of a fixed answer that it may, repeats any, and breaks off at any moment."""

    @initialize(tokens=TOKENS, gateways=st.integers(1, 3), resume_timeout_s=st.sampled_from([0.0, 5.0, 60.0]))
    def begin(self, tokens, gateways, resume_timeout_s):
        self.token_ids = [token_id for token_id, _ in tokens]
        self.text = "".join(text for _, text in tokens)
        self.policy = ResumePolicy(gateways, resume_timeout_s)
        self.answer = ResumableAnswer(GENERATION, self.policy, first_gateway=0)
        self.now_s, self.failing_since_s = 0.0, None
        self.shown_ids, self.shown_text = [], ""
        self.number, self.gave_up = 0, False
        self.gateway = 0
        self.request = self.answer.request(0.0)

    @precondition(lambda self: not self.going_on())
    @rule(tokens=TOKENS)
    def begin_another(self, tokens):
        self.begin(tokens, self.policy.gateways, self.policy.resume_timeout_s)

    def going_on(self):
        return not self.answer.is_finished and not self.gave_up

    @precondition(lambda self: self.going_on())
    @rule(
        back=st.integers(0, 3),
        count=st.integers(0, 4),
        text_back=st.integers(0, 3),
        chars=st.integers(0, 4),
        ends=st.booleans(),
    )
    def receive(self, back, count, text_back, chars, ends):
        first = max(0, len(self.shown_ids) - back)
        ids = self.token_ids[first : first + count]
        begin = max(0, len(self.shown_text) - text_back)
        text = self.text[begin : begin + chars]
        is_whole = len(self.shown_ids) == len(self.token_ids) and self.shown_text == self.text
        finish = FINISH if ends and is_whole else None
        got = self.answer.take(piece(first, ids, len(self.text[:begin].encode()), text, finish))
        if got is None:
            return
        assert got.token_offset == len(self.shown_ids) and got.text_offset == len(self.shown_text.encode())
        assert got.token_ids or got.text or got.finish is not None
        self.shown_ids.extend(got.token_ids)
        self.shown_text += got.text
        self.failing_since_s = None

    @precondition(lambda self: self.going_on())
    @rule(beyond=st.integers(1, 3), of_text=st.booleans())
    def receive_too_late(self, beyond, of_text):
        tokens, text = (0, beyond) if of_text else (beyond, 0)
        with pytest.raises(InternalError):
            self.answer.take(piece(len(self.shown_ids) + tokens, [1], len(self.shown_text.encode()) + text, "x"))

    @precondition(lambda self: self.going_on())
    @rule(after_s=st.sampled_from([0.0, 0.5, 4.0]), retry_after_ms=st.none() | st.integers(1, 5000))
    def break_off(self, after_s, retry_after_ms):
        self.now_s += after_s
        if self.failing_since_s is None:
            self.failing_since_s = self.now_s
        error = failure(reason="X", retry_after_ms=retry_after_ms)
        step = self.answer.failed(error, self.now_s)
        left_s = self.failing_since_s + self.policy.resume_timeout_s - self.now_s
        assert (error.request_id, error.received_tokens) == ("r", len(self.shown_ids))
        if left_s <= 0:
            assert step == GiveUp()
            self.gave_up = True
            return
        assert 0 <= step.delay_s <= min(left_s, max(BACKOFF_MAX_S, (retry_after_ms or 0) / 1000))
        self.now_s += step.delay_s
        self.number, self.gateway = self.number + 1, (self.gateway + 1) % self.policy.gateways
        self.request = self.answer.request(self.now_s)
        resume = self.request.resume
        assert (resume.number, resume.token_offset) == (self.number, len(self.shown_ids))
        assert list(resume.token_ids) == self.shown_ids
        assert resume.text_offset == len(self.shown_text.encode())

    @precondition(lambda self: self.going_on())
    @rule(refused=st.sampled_from(REFUSED), retry_after_ms=st.none() | st.integers(1, 5000))
    def be_refused(self, refused, retry_after_ms):
        code, message, reason = refused
        step = self.answer.failed(failure(code, message, reason, retry_after_ms), self.now_s)
        may_be_running = retry_after_ms and (self.number > 0 or self.shown_ids)
        assert isinstance(step, Retry if code is CODE.RESOURCE_EXHAUSTED and may_be_running and self._has_time() else GiveUp)
        self.gave_up = True  # the story of this answer is over either way

    def _has_time(self):
        since_s = self.now_s if self.failing_since_s is None else self.failing_since_s
        return since_s + self.policy.resume_timeout_s > self.now_s

    @invariant()
    def what_was_shown_is_the_beginning_of_the_answer(self):
        assert self.shown_ids == self.token_ids[: len(self.shown_ids)]
        assert self.text.startswith(self.shown_text)
        assert self.answer.received_tokens == len(self.shown_ids)
        if self.going_on():
            assert self.answer.gateway == self.gateway
            assert self.request.generation == GENERATION


Resuming.TestCase.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
TestResuming = Resuming.TestCase
