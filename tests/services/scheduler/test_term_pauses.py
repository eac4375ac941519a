"""When a term may speak: a leader that was stopped, and one whose store is away, say nothing that nobody has confirmed."""

from collections.abc import Callable
from typing import Any

import pytest
from core.fake_worker import reference_output
from term_house import LATER, REQUEST, CountingStore, StoppedClock, hello, house

from services.scheduler.store.memory import MemoryStore
from tessera.values.identity import NO_EPOCH
from tessera.values.session import Heartbeat, Submit

RunAsync = Callable[..., Any]


def test_a_leader_that_was_stopped_says_nothing_until_the_store_confirms_it(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        clock, store = StoppedClock(monkeypatch), CountingStore()
        async with house(store) as (it, worker), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            store.cannot_renew, worker.is_silent = True, True
            clock.stop_s(61)
            num_calls, steps = store.num_calls, worker.fake.last_step
            store.renewed.clear()
            await gateway.say(Submit(REQUEST))
            await store.renewed.wait()
            assert await gateway.hear() == (it.term.epoch, Heartbeat())
            assert (store.num_calls, worker.fake.last_step) == (num_calls, steps), "it wrote or sent something"
            store.cannot_renew = False
            assert await gateway.answer() == reference_output(REQUEST, 1000)[0]

    run_async(scenario())


def test_a_leader_that_was_stopped_is_confirmed_by_its_worker_while_the_store_is_away(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        clock, store = StoppedClock(monkeypatch), MemoryStore()
        async with house(store) as (it, _), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            store.failing = True
            clock.stop_s(61)
            await gateway.say(Submit(REQUEST))
            assert await gateway.answer() == reference_output(REQUEST, 1000)[0]

    run_async(scenario())


@pytest.mark.parametrize("who_knows", ["store", "worker"])
def test_a_leader_that_was_replaced_while_it_was_stopped_says_nothing_more(
    who_knows: str, run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        clock, store = StoppedClock(monkeypatch), CountingStore()
        async with house(store) as (it, worker), it.session() as gateway:
            await gateway.say(hello())
            await gateway.ack()
            num_calls, steps = store.num_calls, worker.fake.last_step
            clock.stop_s(61)
            if who_knows == "store":
                store.epoch = LATER
            else:
                store.failing, worker.fake.epoch = True, LATER
            await gateway.say(Submit(REQUEST))
            assert (await it.deposed()).endswith("epoch 9 was taken")
            assert (store.num_calls, worker.fake.last_step) == (num_calls, steps), "it wrote or sent something"

    run_async(scenario())


def test_a_hello_is_answered_only_soon_after_a_confirmation(run_async: RunAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        clock, store = StoppedClock(monkeypatch), CountingStore()
        async with house(store) as (it, worker):
            await it.leads()
            store.cannot_renew, worker.is_silent = True, True
            await clock.pass_s(61)
            assert it.term.may_speak
            async with it.session() as gateway:
                store.renewed.clear()
                await gateway.say(hello())
                await store.renewed.wait()
                assert await gateway.hear() == (it.term.epoch, Heartbeat())
                worker.is_silent = False
                async with it.session() as other:
                    await other.say(hello())
                    await other.ack()
                await gateway.ack()

    run_async(scenario())


def test_an_epoch_that_the_store_had_lost_is_confirmed_by_the_worker(
    run_async: RunAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds its epoch lost may have lost a later leader's with it."""

    async def scenario() -> None:
        clock, store = StoppedClock(monkeypatch), MemoryStore()
        async with house(store) as (it, worker):
            await it.leads()
            store.epoch, worker.fake.epoch = NO_EPOCH, LATER
            clock.stop_s(61)
            assert (await it.deposed()).endswith("epoch 9 was taken")
            assert store.epoch == it.term.epoch

    run_async(scenario())
