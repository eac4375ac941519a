"""A client goes on with what it began: by the id it gave, at this gateway or another, while the request lives or can still be read."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from leader_table import CONFIG, Gateway, Table, expected, submission

from services.scheduler.core.streams import Streams
from tessera.values.finish import FinishReason
from tessera.values.request import DetokenizeOptions, Submission
from tessera.values.sampling import SamplingParams
from tessera.values.session import Abort, Detach, KnownAs, LiveRequest, Rejected, RejectReason, StopFound, Submit, TakenOver

GRACE_MS = CONFIG.gateway_grace_ms


@pytest.fixture
def table() -> Iterator[Table]:
    made = Table()
    yield made
    made.leader.scheduler.check_integrity()


def begun(table: Table, steps: int = 3, max_tokens: int = 20, number: int = 1) -> tuple[Gateway, Submission]:
    """A request named `mine` that has run for some steps; its gateway has read them."""
    gateway, request = table.gateway(), submission(number, [5, 6, 7], max_tokens, "mine")
    gateway.submit(request)
    table.run(steps)
    gateway.read()
    return gateway, request


def again(request: Submission, number: int = 9) -> Submission:
    """The same, as another call of the client brings it: another internal id, another seed, drawn by its gateway, and another span."""
    sampling = replace(request.sampling, seed=number)
    return replace(request, request_id=bytes([number]) * 16, sampling=sampling, trace_context=f"trace {number}")


def finish_of(table: Table, request: Submission) -> FinishReason | None:
    sequence = table.leader.scheduler.request(request.request_id)
    assert sequence is not None
    return sequence.finish and sequence.finish.reason


def test_a_resume_at_another_gateway_goes_on_behind_what_the_client_has(table: Table) -> None:
    first, request = begun(table)
    received = tuple(first.tokens[request.request_id])[:2]
    second, resumed = table.gateway(), again(request)
    second.submit(resumed, 1, received)
    assert first.read() == [TakenOver(request.request_id, 0)]
    table.run()
    assert second.read() == [KnownAs(resumed.request_id, 1, request.request_id)]
    assert second.tokens == {request.request_id: expected(request)}, "with the seed of the request that lives"
    assert second.finishes == {request.request_id: FinishReason.MAX_TOKENS}
    assert table.leader.scheduler.request(resumed.request_id) is None


@pytest.mark.parametrize("same_gateway", [False, True])
def test_several_answers_asked_for_twice_are_those_of_who_asked_first(table: Table, same_gateway: bool) -> None:
    def answers(first_number: int) -> list[Submission]:
        numbers = range(first_number, first_number + 3)
        requests = [submission(number, [5, 6, 7], 20, f"mine {index}") for index, number in enumerate(numbers)]
        return [replace(request, fork_of=requests[0].request_id) for request in requests]

    first, asked = table.gateway(), answers(1)
    for request in asked:
        first.submit(request)
    table.run(3)
    second = first if same_gateway else table.gateway()
    for request in (retried := answers(11)):
        second.submit(request)
    refused = [message for message in second.read() if isinstance(message, Rejected)]
    assert [(item.request_id, item.reason) for item in refused] == [
        (request.request_id, RejectReason.ALREADY_EXISTS) for request in retried
    ]
    for request in retried:  # their call ends, and takes leave of what is refused
        table.leader.heard(second.session, Abort(request.request_id, 0))
    table.run()
    assert not [message for message in first.read() if isinstance(message, TakenOver)]
    assert all(first.tokens[request.request_id] == expected(request) for request in asked)


@pytest.mark.parametrize("another", [False, True])
def test_a_hello_takes_nothing_from_a_retry_at_another_gateway(table: Table, another: bool) -> None:
    """The number is the same: the retry came later than what the first gateway held as its session broke. Its own new session wins."""
    first, request = begun(table)
    own = first.session.gateway_id
    second = table.gateway(gateway_id=b"h" * 16 if another else own)
    second.submit(again(request), 0, tuple(first.tokens[request.request_id]))
    second.read()
    back = table.gateway((LiveRequest(request.request_id, 0, tuple(first.tokens[request.request_id])),), own)
    assert back.ack.unknown_request_ids == ()
    assert (TakenOver(request.request_id, 0) in back.read()) == another
    table.run()
    winner = second if another else back
    winner.read()
    assert winner.tokens[request.request_id] == expected(request)


def test_what_comes_late_on_an_earlier_session_takes_nothing_over(table: Table) -> None:
    """A Submit was stuck in the network, the gateway's stream broke, and its next session claims the request: then the Submit arrives."""
    request = submission(1, [5, 6, 7])
    earlier = table.gateway()
    back = table.gateway((LiveRequest(request.request_id, 0, ()),), earlier.session.gateway_id)
    assert back.ack.unknown_request_ids == (request.request_id,)
    back.submit(request)
    earlier.submit(request)
    table.run()
    assert back.read() == []
    assert back.tokens[request.request_id] == expected(request)
    assert earlier.session.closing


def test_a_retry_with_the_id_of_a_live_request_is_a_resume_from_the_start(table: Table) -> None:
    first, request = begun(table)
    second, retried = table.gateway(), again(request)
    second.submit(retried)
    assert first.read() == [TakenOver(request.request_id, 0)]
    table.run()
    assert second.read() == [KnownAs(retried.request_id, 0, request.request_id)]
    assert second.tokens == {request.request_id: expected(request)}


def test_a_resume_at_the_same_gateway_is_answered_once(table: Table) -> None:
    """Its own earlier stream the gateway ends itself, as soon as it learns under which id it goes on."""
    gateway, request = begun(table)
    resumed = again(request)
    gateway.submit(resumed, 1, tuple(gateway.tokens[request.request_id]))
    assert gateway.read() == [KnownAs(resumed.request_id, 1, request.request_id)]
    table.run()
    gateway.read()
    assert gateway.tokens == {request.request_id: expected(request)}


def test_a_finished_request_can_be_resumed_within_its_retention(table: Table) -> None:
    first, request = begun(table)
    received = tuple(first.tokens[request.request_id])
    table.leader.session_closed(first.session)
    table.run()
    assert finish_of(table, request) is FinishReason.MAX_TOKENS
    second, resumed = table.gateway(), again(request)
    second.submit(resumed, 1, received)
    assert second.read() == [KnownAs(resumed.request_id, 1, request.request_id)]
    assert second.tokens == {request.request_id: expected(request)}
    assert second.finishes == {request.request_id: FinishReason.MAX_TOKENS}


@pytest.mark.parametrize("resumed", [False, True])
def test_a_result_is_not_forgotten_before_its_gateway_was_sent_the_end(table: Table, resumed: bool) -> None:
    """A slow gateway, and one that came for it in the last moment: with nothing to send any more both would wait for ever."""
    gateway, request = begun(table, steps=1000)
    if resumed:
        table.later(CONFIG.result_retention_ms - 1)
        received = tuple(gateway.tokens[request.request_id])[:18]
        gateway = table.gateway()
        gateway.submit(again(request), 1, received)
    else:
        gateway = table.gateway(live=(LiveRequest(request.request_id, 1, tuple(gateway.tokens[request.request_id])[:18]),))
    table.later(CONFIG.result_retention_ms)
    gateway.read()
    assert gateway.tokens == {request.request_id: expected(request)}
    assert gateway.finishes == {request.request_id: FinishReason.MAX_TOKENS}
    table.later(1)
    assert table.leader.scheduler.request(request.request_id) is None


def test_what_has_ended_is_no_obstacle_to_a_new_request_of_the_same_id(table: Table) -> None:
    gateway, request = begun(table, steps=1000)
    assert gateway.finishes
    new = replace(again(request), sampling=replace(request.sampling, seed=9))
    gateway.submit(new)
    table.run()
    gateway.read()
    assert gateway.tokens[new.request_id] == expected(new) != expected(request)


def test_a_resume_after_the_retention_begins_anew_behind_the_tokens_received(table: Table) -> None:
    first, request = begun(table)
    received = tuple(first.tokens[request.request_id])
    table.leader.session_closed(first.session)
    table.run()
    table.later(CONFIG.result_retention_ms)
    assert table.leader.scheduler.request(request.request_id) is None
    gateway, resumed = table.gateway(), replace(again(request), sampling=request.sampling)
    gateway.submit(resumed, 1, received)
    table.run()
    assert gateway.read() == []
    assert gateway.tokens == {resumed.request_id: expected(request)}


def test_the_last_of_several_requests_of_one_id_is_resumed_and_forgotten_on_its_own(table: Table) -> None:
    gateway, old = begun(table, steps=1000)
    table.now_us += 1000 * (CONFIG.result_retention_ms - 1)
    new = submission(2, [8, 9], 4, "mine")
    gateway.submit(new)
    table.run()
    table.later(1)
    assert table.leader.scheduler.request(old.request_id) is None
    other, resumed = table.gateway(), again(new)
    other.submit(resumed, 1)
    other.read()
    assert other.tokens == {new.request_id: expected(new)}


OTHER_BODIES = {
    "prompt": {"prompt_token_ids": submission(1, [5, 6]).prompt_token_ids},
    "parameters": {"sampling": SamplingParams(seed=1, max_tokens=20, ignore_eos=True, top_k=3)},
    "stop strings": {"detokenize": DetokenizeOptions(stop_strings=("x",))},
    "text options": {"detokenize": DetokenizeOptions(skip_special_tokens=False)},
}


@pytest.mark.parametrize("body", OTHER_BODIES.values(), ids=OTHER_BODIES)
@pytest.mark.parametrize("has_ended", [False, True])
def test_another_body_under_the_same_id_is_refused(table: Table, body: dict[str, object], has_ended: bool) -> None:
    first, request = begun(table)
    if has_ended:
        table.run()
    second, other = table.gateway(), replace(again(request), **body)
    second.submit(other, 1)
    (refused,) = second.read()
    assert isinstance(refused, Rejected) and refused.reason is RejectReason.ALREADY_EXISTS and "mine" in refused.message
    table.run()
    assert first.read() == [] and first.tokens[request.request_id] == expected(request)


@pytest.mark.parametrize("has_ended", [False, True])
def test_another_seed_is_refused_where_the_client_gave_both(table: Table, has_ended: bool) -> None:
    """One that a gateway drew says nothing of what the client wants."""
    first, request = table.gateway(), replace(submission(1, [5, 6, 7], 20, "mine"), is_seed_given=True)
    first.submit(request)
    table.run(1000 if has_ended else 3)
    second = table.gateway()
    second.submit(again(request), 1)
    (refused,) = second.read()
    assert isinstance(refused, Rejected) and refused.reason is RejectReason.ALREADY_EXISTS and "mine" in refused.message
    drawn = replace(again(request, 8), is_seed_given=False)
    second.submit(drawn, 1)
    assert KnownAs(drawn.request_id, 1, request.request_id) in second.read()
    table.run()
    second.read()
    assert second.tokens[request.request_id] == expected(request)


def test_the_same_id_of_another_principal_is_another_request(table: Table) -> None:
    first, request = begun(table)
    second, other = table.gateway(), replace(again(request), principal="somebody else")
    second.submit(other, 1)
    table.run()
    assert (first.read(), second.read()) == ([], [])
    assert first.tokens[request.request_id] == expected(request)
    assert second.tokens == {other.request_id: expected(other)}


def test_a_lower_number_is_told_that_it_was_taken_over(table: Table) -> None:
    _, request = begun(table)
    second, third, late = table.gateway(), table.gateway(), table.gateway()
    second.submit(again(request, 8), 2)
    third.submit(again(request, 9), 1)
    assert third.read() == [TakenOver(bytes([9]) * 16, 1)], "under the id it knows"
    late.submit(again(request, 7))
    assert late.read() == [TakenOver(bytes([7]) * 16, 0)]
    table.run()
    second.read()
    assert second.tokens[request.request_id] == expected(request)


def test_what_a_client_has_beyond_the_committed_tokens_is_kept(table: Table) -> None:
    """Tokens it was sent by a leader whose store and worker are gone."""
    first, request = begun(table, steps=2)
    received = tuple(expected(request)[:7])
    second, resumed = table.gateway(), again(request)
    second.submit(resumed, 1, received)
    table.run()
    second.read()
    assert first.read() == [TakenOver(request.request_id, 0)]
    assert second.tokens == {request.request_id: expected(request)}
    assert table.leader.scheduler.load().num_contradictions == 0


def test_a_contradiction_of_a_live_request_wins_and_is_counted(table: Table) -> None:
    """The client was sent it, by whomever: it starts again behind that."""
    _, request = begun(table, steps=4)
    received = (*expected(request)[:2], expected(request)[2] ^ 1)
    second = table.gateway()
    second.submit(again(request), 1, received)
    table.run()
    second.read()
    assert second.tokens[request.request_id][:3] == list(received) and len(second.tokens[request.request_id]) == 20
    assert second.finishes and table.leader.scheduler.load().num_contradictions == 1


def test_a_request_that_has_ended_keeps_its_end_whatever_its_client_has(table: Table) -> None:
    """One token is another: counted. More than there were: the end is told where it was."""
    _, request = begun(table, steps=1000)
    tokens = expected(request)
    second, third = table.gateway(), table.gateway()
    second.submit(again(request), 1, (tokens[0], tokens[1] ^ 1))
    second.read()
    assert second.tokens[request.request_id] == [tokens[0], tokens[1] ^ 1, *tokens[2:]] and second.finishes
    assert table.leader.scheduler.load().num_contradictions == 1
    table.leader.heard(third.session, Submit(again(request, 8), 2, (*tokens, 5, 5)))
    (output,) = table.leader.take_frame(third.session)
    assert (output.token_offset, output.token_ids) == (20, ()) and output.finish is not None
    assert table.leader.scheduler.load().num_contradictions == 1


def test_foreign_ids_in_a_resume_are_refused(table: Table) -> None:
    first, request = begun(table)
    second, resumed = table.gateway(), again(request)
    second.submit(resumed, 1, (1_000_000,))
    (refused,) = second.read()
    assert isinstance(refused, Rejected) and refused.reason is RejectReason.INVALID
    table.run()
    first.read()
    assert first.tokens[request.request_id] == expected(request)


# -- leaving


@pytest.mark.parametrize("same_number", [False, True])
def test_an_abort_that_a_resume_overtakes_ends_nothing(table: Table, same_number: bool) -> None:
    """One gateway's client left as another gateway took the request over."""
    first, request = begun(table)
    second, resumed = table.gateway(), again(request)
    second.submit(resumed, 0 if same_number else 1)
    for message in (Abort(request.request_id, 0), StopFound(request.request_id, 0, 1, "x"), Detach(request.request_id, 0, 0)):
        table.leader.heard(first.session, message)
    table.later(1)
    second.read()
    assert second.tokens == {request.request_id: expected(request)}


def test_a_resume_that_an_abort_overtakes_is_told_the_end(table: Table) -> None:
    first, request = begun(table)
    table.leader.heard(first.session, Abort(request.request_id, 0))
    second, resumed = table.gateway(), again(request)
    second.submit(resumed, 1, tuple(first.tokens[request.request_id]))
    table.run()
    second.read()
    assert second.finishes == {request.request_id: FinishReason.ABORTED}


def test_an_abort_may_still_name_the_id_that_was_submitted(table: Table) -> None:
    """The client left before its gateway learned under which id the request is known."""
    _, request = begun(table)
    second, resumed = table.gateway(), again(request)
    second.submit(resumed, 1)
    table.leader.heard(second.session, Abort(resumed.request_id, 1))
    table.run()
    second.read()
    assert finish_of(table, request) is FinishReason.ABORTED
    assert second.finishes == {request.request_id: FinishReason.ABORTED}


def test_a_detached_request_waits_for_its_own_grace(table: Table) -> None:
    """It runs on meanwhile, and ends where nobody comes."""
    gateway, request = begun(table, steps=1, max_tokens=40)
    table.leader.heard(gateway.session, Detach(request.request_id, 0, 200))
    table.now_us += 199_000
    table.leader.tick()
    assert finish_of(table, request) is None and gateway.read() == []
    table.now_us += 1000
    table.leader.tick()
    assert finish_of(table, request) is FinishReason.ABORTED
    table.run()
    assert gateway.read() == []


def test_a_detached_request_goes_on_for_who_comes_in_time(table: Table) -> None:
    first, request = begun(table)
    table.leader.heard(first.session, Detach(request.request_id, 0, 200))
    received = tuple(first.tokens[request.request_id])
    second = table.gateway()
    second.submit(again(request), 1, received)
    table.later(10 * GRACE_MS)
    second.read()
    assert second.tokens == {request.request_id: expected(request)}


def test_without_a_grace_of_its_own_a_detached_request_waits_like_one_of_a_lost_gateway(table: Table) -> None:
    gateway, request = begun(table, steps=1, max_tokens=40)
    table.leader.heard(gateway.session, Detach(request.request_id, 0))
    table.now_us += 1000 * GRACE_MS - 1
    table.leader.tick()
    assert finish_of(table, request) is None
    table.now_us += 1
    table.leader.tick()
    assert finish_of(table, request) is FinishReason.ABORTED
    table.run()


# -- over a takeover


def test_the_number_of_the_last_resume_holds_under_the_next_leader(table: Table) -> None:
    """A gateway that missed the takeover of its request has nothing to say, and whoever comes next needs a higher number."""
    first, request = begun(table)
    second = table.gateway()
    second.submit(again(request), 3, tuple(first.tokens[request.request_id]))
    table.run(steps=2)
    second.read()
    after = Table(table.worker, table.store, term=2)
    old = after.gateway((LiveRequest(request.request_id, 0, tuple(first.tokens[request.request_id])),))
    assert old.ack.unknown_request_ids == () and old.read() == [TakenOver(request.request_id, 0)]
    back = after.gateway((LiveRequest(request.request_id, 3, tuple(second.tokens[request.request_id])),))
    after.run()
    back.read()
    assert back.tokens == {request.request_id: expected(request)}
    assert after.leader.scheduler.load().recomputed_positions == 0


@pytest.mark.parametrize("steps", [3, 1000])
def test_a_resume_finds_its_request_under_the_next_leader(table: Table, steps: int) -> None:
    """Live, or finished and still readable: the client's id came with the request from the store."""
    first, request = begun(table, steps)
    received = tuple(first.tokens[request.request_id])[:2]
    after = Table(table.worker, table.store, term=2)
    gateway, resumed = after.gateway(), again(request)
    gateway.submit(resumed, 1, received)
    after.run()
    assert gateway.read() == [KnownAs(resumed.request_id, 1, request.request_id)]
    assert gateway.tokens == {request.request_id: expected(request)}


# -- bugs of ours


def test_an_error_that_changed_nothing_ends_only_the_session_that_raised_it(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, request = begun(table)
    second = table.gateway()
    monkeypatch.setattr(Streams, "claim", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        second.submit(submission(2, [8, 9]))
    monkeypatch.undo()
    table.later(1)
    first.read()
    assert first.tokens[request.request_id] == expected(request)


def test_an_error_in_the_middle_of_a_change_ends_the_term(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decided or written from then on; the next leader has everything but the change."""
    first, request = begun(table)
    acked = table.store.stored().state.last
    monkeypatch.setattr(type(table.leader.scheduler.request(request.request_id)), "end", lambda *_: 1 / 0)
    with pytest.raises(AssertionError):
        table.leader.heard(first.session, Abort(request.request_id, 0))
    monkeypatch.undo()
    assert table.leader.next_journal_call() is None
    with pytest.raises(ZeroDivisionError):
        table.leader.tick()
    assert table.store.stored().state.last == acked
    after = Table(table.worker, table.store, term=2)
    gateway = after.gateway((LiveRequest(request.request_id, 0, tuple(first.tokens[request.request_id])),))
    after.run()
    gateway.read()
    assert gateway.tokens == {request.request_id: expected(request)}
    table.leader.scheduler = after.leader.scheduler  # the fixture looks at what goes on


def test_an_error_in_a_turn_ends_the_term(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway, _ = begun(table)
    monkeypatch.setattr(type(table.leader.scheduler), "take_changes", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gateway.submit(submission(2, [8, 9]))  # which can join the batch that waits
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        gateway.submit(submission(3, [8, 9]))
    with pytest.raises(ZeroDivisionError):
        table.leader.tick()
