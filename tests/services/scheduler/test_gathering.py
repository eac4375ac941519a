"""What a term waits for before it leads: whose word may still be missing, and for how long."""

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from core.fake_worker import MODEL, FakeWorker
from term_house import REQUEST, hello

from services.scheduler.core.errors import ModelMismatch
from services.scheduler.core.record import Arrival, StoredRequest, StoredState
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.gathering import Gathering
from services.scheduler.sessions import GatewaySession
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import Epoch
from tessera.values.report import SlotReport, WorkerReport
from tessera.values.session import LiveRequest

RunAsync = Callable[..., Any]

LONG_S = 3600.0


def report(*request_ids: bytes, model: Any = MODEL) -> WorkerReport:
    """A worker that holds these requests."""
    column = np.array([1, 2], np.int32)
    slots = tuple(SlotReport(index, request_id, 1, 2, column, column, 1) for index, request_id in enumerate(request_ids))
    return replace(FakeWorker(model=model).attach(Epoch(1, b"e" * 16), 1), slots=slots)


def stored(finish: Finish | None = None) -> StoredState:
    """REQUEST, as the store tells it."""
    state = StoredState()
    status = SequenceStatus.WAITING if finish is None else SequenceStatus.FINISHED
    state.requests[REQUEST.request_id] = StoredRequest(REQUEST, Arrival(1, 1), status, finish=finish)
    return state


@pytest.mark.parametrize(
    ("state", "is_held", "is_waited_for"),
    [
        (StoredState(), False, False),
        (StoredState(), True, True),  # the store has not heard of it: a gateway may have
        (stored(), False, True),
        (stored(), True, True),
        (stored(Finish(FinishReason.MAX_TOKENS, 0)), False, False),
        (stored(Finish(FinishReason.MAX_TOKENS, 0)), True, False),  # its end is known, only its slot was not dropped yet
    ],
)
def test_gateways_are_heard_of_what_lives(state: StoredState, is_held: bool, is_waited_for: bool, run_async: RunAsync) -> None:
    async def scenario() -> None:
        gathering = Gathering()
        gathering.worker_attached("worker:1", report(*[REQUEST.request_id] * is_held), lambda batch: None)
        hearing = asyncio.create_task(gathering.hear_gateways(state, LONG_S))
        await asyncio.sleep(0.01)
        assert hearing.done() != is_waited_for
        with gathering.hello(GatewaySession(), hello(live=(LiveRequest(REQUEST.request_id, 0, ()),))):
            await hearing

    run_async(scenario())


def test_a_gateway_that_leaves_again_is_not_counted(run_async: RunAsync) -> None:
    async def scenario() -> None:
        gathering = Gathering()
        with gathering.hello(GatewaySession(), hello(live=(LiveRequest(REQUEST.request_id, 0, ()),))):
            pass
        hearing = asyncio.create_task(gathering.hear_gateways(stored(), LONG_S))
        await asyncio.sleep(0.01)
        assert not hearing.done()
        hearing.cancel()

    run_async(scenario())


def test_one_report_is_waited_for_however_long_and_the_others_for_a_while(run_async: RunAsync) -> None:
    async def scenario() -> None:
        gathering = Gathering()
        hearing = asyncio.create_task(gathering.hear_workers(frozenset(("worker:1", "worker:2")), 0.02))
        await asyncio.sleep(0.05)
        assert not hearing.done()
        gathering.worker_attached("worker:1", report(), lambda batch: None)
        await hearing

    run_async(scenario())


def test_reports_of_all_that_were_there_end_the_wait(run_async: RunAsync) -> None:
    async def scenario() -> None:
        gathering = Gathering()
        hearing = asyncio.create_task(gathering.hear_workers(frozenset(("worker:1", "worker:2")), LONG_S))
        gathering.worker_attached("worker:1", report(), lambda batch: None)
        await asyncio.sleep(0.01)
        assert not hearing.done()
        gathering.worker_attached("worker:2", report(), lambda batch: None)
        await hearing

    run_async(scenario())


def test_the_first_worker_says_which_model_it_is() -> None:
    gathering, other = Gathering(), replace(MODEL, name="other")
    gathering.worker_attached("worker:1", report(), lambda batch: None)
    with pytest.raises(ModelMismatch, match="worker:2 serves other"):
        gathering.worker_attached("worker:2", report(model=other), lambda batch: None)
    assert list(gathering.reports) == list(gathering.senders) == ["worker:1"]
    gathering.worker_detached("worker:1")
    gathering.worker_attached("worker:2", report(model=other), lambda batch: None)
    assert list(gathering.reports) == ["worker:2"]


@pytest.mark.parametrize(("promised_len", "is_over"), [(0, True), (80, True), (81, True), (82, False)])
def test_a_request_is_not_ended_before_what_it_was_promised(promised_len: int, is_over: bool) -> None:
    """Only a worker of 80 tokens has reported, which ends what has 81; a larger one may be away."""
    state, model = StoredState(), replace(MODEL, max_model_len=1000)
    request = replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=500))
    output = array("i", [5] * (81 - len(request.prompt_token_ids)))
    state.requests[request.request_id] = StoredRequest(
        request, Arrival(1, 1), SequenceStatus.WAITING, output_token_ids=output, tokens_max=promised_len
    )
    gathering = Gathering()
    gathering.worker_attached(
        "worker:1", replace(FakeWorker(20, 4, model=model).attach(Epoch(1, b"e" * 16), 1)), lambda batch: None
    )
    (joined,) = gathering.join(state).requests
    assert (joined.finish is not None) == is_over and joined.output_token_ids == tuple(output)


def test_who_is_to_end_is_known_until_it_has() -> None:
    gathering = Gathering()
    gathering.worker_attached("worker:1", report(), lambda batch: None)
    gathering.worker_leaving("worker:1")
    assert gathering.leaving == {"worker:1"}
    gathering.worker_detached("worker:1")
    assert not gathering.leaving
