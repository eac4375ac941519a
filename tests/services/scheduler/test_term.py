"""One term from its taken epoch to its end, with a worker and a gateway behind real gRPC and a store that can fail."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from core.fake_worker import FakeWorker, reference_output
from scripted_worker import scripted_worker
from structlog.testing import CapturingLogger
from term_house import LATER, REQUEST, CountingStore, GatewayEnd, hello, house

from services.scheduler import leader, term, worker_link
from services.scheduler.core.journal_call import (
    Applied,
    BeginRewrite,
    EndRewrite,
    FoldedRequest,
    Generation,
    RewriteChunk,
)
from services.scheduler.core.record import Arrival, StoredRequest
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.store.memory import MemoryStore
from services.scheduler.store.port import LeaseView
from services.scheduler.term_end import GatewayAhead
from tessera.values.identity import Epoch
from tessera.values.request import Submission
from tessera.values.session import Heartbeat, LiveRequest, Submit

RunAsync = Callable[..., Any]


def test_a_request_is_served_and_journalled(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as gateway:
            await it.leads()
            await gateway.say(hello())
            assert (await gateway.ack()).unknown_request_ids == ()
            await gateway.say(Submit(REQUEST))
            assert await gateway.answer() == reference_output(REQUEST, 1000)[0]
            assert list(it.store.stored().state.requests) == [REQUEST.request_id]

    run_async(scenario())


def test_a_store_that_goes_away_before_it_is_read_is_waited_for(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, worker):
            worker.answers.clear()
            async with it.session() as gateway:
                await _greet(gateway)
                it.store.failing = True
                worker.answers.set()
                assert await gateway.hear() == (it.term.epoch, Heartbeat())
                assert it.term.leader is None
                it.store.failing = False
                await gateway.ack()

    run_async(scenario())


def test_a_gateway_that_comes_during_a_takeover_is_told_to_wait(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, worker):
            worker.answers.clear()
            async with it.session() as gateway:
                await _greet(gateway)
                assert it.term.leader is None
                worker.answers.set()
                await gateway.ack()

    run_async(scenario())


async def _greet(gateway: GatewayEnd) -> None:
    """Say Hello to a scheduler that cannot lead yet, and hear that it is there."""
    await gateway.say(hello())
    _, message = await gateway.hear()
    assert message == Heartbeat()


def test_a_live_request_waits_for_the_gateway_that_knows_more(run_async: RunAsync) -> None:
    async def scenario() -> None:
        expected = reference_output(REQUEST, 1000)[0]
        async with house(_stored_waiting(REQUEST)) as (it, _), it.session() as gateway:
            await gateway.say(hello(live=(LiveRequest(REQUEST.request_id, 0, tuple(expected[:3])),)))
            assert (await gateway.ack()).unknown_request_ids == ()
            assert await gateway.answer(expected[:3]) == expected

    run_async(scenario())


@pytest.mark.parametrize("said", [{"token_ids": (5, 2**32 - 1)}, {"token_ids": (5,), "tokenizer_digest": "another"}])
def test_what_is_no_output_of_the_model_is_not_joined(run_async: RunAsync, said: dict[str, Any]) -> None:
    async def scenario() -> None:
        expected = reference_output(REQUEST, 1000)[0]
        wrong = LiveRequest(REQUEST.request_id, 0, said.pop("token_ids"))
        async with house(_stored_waiting(REQUEST)) as (it, _), it.session() as stranger, it.session() as gateway:
            await stranger.say(replace(hello(live=(wrong,)), **said))
            await it.leads()
            await gateway.say(hello(live=(LiveRequest(REQUEST.request_id, 0, ()),)))
            assert (await gateway.ack()).unknown_request_ids == ()
            assert await gateway.answer() == expected

    run_async(scenario())


def test_a_live_request_without_a_gateway_holds_a_takeover_up_for_a_moment_only(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house(_stored_waiting(REQUEST), hello_wait_ms=50) as (it, _):
            await it.leads()

    run_async(scenario())


@pytest.mark.parametrize("is_leading", [True, False])
def test_a_gateway_that_knows_a_later_epoch_ends_the_term(run_async: RunAsync, is_leading: bool) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as gateway:
            if is_leading:
                await it.leads()
            await gateway.say(hello(LATER))
            with pytest.raises(GatewayAhead) as ahead:
                await it.ended
            assert ahead.value.told == LATER.number
            with pytest.raises(grpc.aio.AioRpcError, match="a new term begins"):
                await gateway.ack()

    run_async(scenario())


def test_an_epoch_that_nobody_can_have_seen_is_refused(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as liar, it.session() as gateway:
            await it.leads()
            await liar.say(hello(Epoch(2**64 - 1, b"x" * 16)))
            with pytest.raises(grpc.aio.AioRpcError, match="highest_epoch"):
                await liar.ack()
            await gateway.say(hello())
            await gateway.ack()

    run_async(scenario())


def test_a_store_that_knows_a_later_leader_ends_the_term(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            it.store.epoch = LATER
            await gateway.say(Submit(REQUEST))
            assert (await it.deposed()).endswith("epoch 9 was taken")

    run_async(scenario())


def test_a_worker_that_knows_a_later_leader_ends_the_term(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, worker):
            worker.refuses = True
            assert await it.deposed() == "older epoch"
            assert not it.is_serving

    run_async(scenario())


# -- the store empties, the lead is handed over, workers come and go


def test_an_emptied_store_is_written_again_although_nothing_happens(run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = CountingStore()
        async with house(store, lease_ms=200) as (it, _), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            await gateway.say(Submit(REQUEST))
            await gateway.answer()
            store.rewritten.clear()
            store.empty()
            await store.rewritten.wait()
            assert store.epoch == it.term.epoch
            assert list(store.stored().state.requests) == [REQUEST.request_id]

    run_async(scenario())


def test_health_says_whether_the_store_keeps_up(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, _), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            await it.until(lambda: it.is_durable)
            it.store.failing = True
            await gateway.say(Submit(REQUEST))
            await it.until(lambda: not it.is_durable)
            assert it.is_serving
            it.store.failing = False
            await it.until(lambda: it.is_durable)

    run_async(scenario())


def test_a_leader_hands_over_what_runs(run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = MemoryStore()
        async with house(store) as (it, _), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            endless = replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=900))
            await gateway.say(Submit(endless))
            await gateway.output()
            await it.term.hand_over()
            view = await store.look()
            assert isinstance(view, LeaseView) and not view.is_held and view.epoch == it.term.epoch
            (request,) = store.stored().state.requests.values()
            assert request.finish is None and request.output_token_ids

    run_async(scenario())


def test_a_term_begins_without_a_worker_that_does_not_report(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with scripted_worker() as silent:
            silent.answers.clear()
            async with house(others=(silent.address,)) as (it, _), it.session() as gateway:
                await gateway.say(hello())
                await gateway.ack()
                assert set(it.term.attached_workers) == set(it.workers) - {silent.address}
                silent.answers.set()
                await silent.stream()
                assert set(it.term.attached_workers) == set(it.workers)

    monkeypatch.setattr(term, "WORKERS_WAIT_S", 0.1)
    run_async(scenario())


def test_a_worker_whose_kv_lies_otherwise_is_told_once_and_never_called_attached(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with scripted_worker(FakeWorker(20, 8)) as other:
            other.answers.clear()
            async with house(others=(other.address,)) as (it, first):
                await it.leads()
                log.calls.clear()
                other.answers.set()
                while other.num_attaches < 4:
                    other.asked.clear()
                    await other.asked.wait()
                (said,) = (call for call in log.calls if call.kwargs.get("worker") == other.address)
                assert (said.method_name, said.args) == ("warning", ("worker is not used",))
                assert "blocks of 8 tokens" in said.kwargs["reason"] and "blocks of 4 tokens" in said.kwargs["reason"]
                first.answers.clear()
                first.break_off()
                await it.until(
                    lambda: it.term.attached_workers == (other.address,)
                )  # where no other is left it is taken as it is
                told = [call.args[0] for call in log.calls if call.kwargs.get("worker") == other.address]
                assert told == ["worker is not used", "kv layout changed", "worker attached"]

    log = CapturingLogger()
    for module in (term, worker_link, leader):
        monkeypatch.setattr(module, "_log", log)
    monkeypatch.setattr(term, "WORKERS_WAIT_S", 0.1)
    monkeypatch.setattr(worker_link, "UNFIT_RETRY_S_MAX", 0.3)
    run_async(scenario())


def test_a_scheduler_without_workers_does_not_serve(run_async: RunAsync) -> None:
    async def scenario() -> None:
        async with house() as (it, worker), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            await gateway.say(Submit(REQUEST))
            await gateway.answer()
            assert it.is_serving
            worker.answers.clear()
            worker.break_off()
            await it.until(lambda: not it.is_serving)
            worker.answers.set()
            await it.leads()

    run_async(scenario())


def _stored_waiting(submission: Submission) -> MemoryStore:
    """A store in which an earlier leader has written that `submission` waits."""
    store, epoch, generation = MemoryStore(), Epoch(1, b"e" * 16), Generation(1, 1)
    waiting = FoldedRequest(1, StoredRequest(submission, Arrival(1, 1), SequenceStatus.WAITING))
    for call in (BeginRewrite(generation), RewriteChunk(generation, (waiting,), ()), EndRewrite(generation, 1)):
        assert isinstance(store.execute(epoch, call), Applied)
    return store
