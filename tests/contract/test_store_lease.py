"""The lease, as every store must keep it: who may take the epoch, renew it and give it up."""

import asyncio
from collections.abc import Callable
from typing import Any

from store_rig import StoreRig, view_of

from services.scheduler.core.journal_call import Applied, BeginRewrite, EndRewrite, Failed, Generation, OlderEpoch
from services.scheduler.core.record import StoredState
from services.scheduler.store.port import (
    JOURNAL_FORMAT,
    EpochMoved,
    EpochTaken,
    LeaseView,
    Released,
    Renewed,
    Store,
    StoredJournal,
    WrongFormat,
)
from tessera.values.identity import NO_EPOCH, Epoch

RunAsync = Callable[..., Any]
ANNA, BERT, CARA = Epoch(3, b"a" * 16), Epoch(3, b"b" * 16), Epoch(4, b"c" * 16)
LONG_MS, SHORT_MS = 60_000, 30


async def free(store: Store) -> LeaseView:
    """The store's view once its lease has run out."""
    while (view := await view_of(store)).is_held:  # noqa: ASYNC110 - no store tells when
        await asyncio.sleep(SHORT_MS / 3000)
    return view


def test_nobody_leads_in_an_empty_store(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        assert await store.look() == LeaseView(NO_EPOCH, is_held=False, is_empty=True)

    run_async(scenario())


def test_taking_the_epoch_starts_its_lease(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        assert await store.take_epoch(NO_EPOCH, ANNA, LONG_MS) == EpochTaken()
        assert await store.look() == LeaseView(ANNA, is_held=True, is_empty=True)

    run_async(scenario())


def test_an_epoch_is_taken_by_compare_and_set(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        assert await store.take_epoch(NO_EPOCH, ANNA, LONG_MS) == EpochTaken()
        assert await store.take_epoch(NO_EPOCH, BERT, LONG_MS) == EpochMoved(ANNA)
        assert await store.take_epoch(BERT, CARA, LONG_MS) == EpochMoved(ANNA)
        assert (await view_of(store)).epoch == ANNA
        assert await store.take_epoch(ANNA, CARA, LONG_MS) == EpochTaken()
        assert await store.take_epoch(ANNA, Epoch(5, b"a" * 16), LONG_MS) == EpochMoved(CARA)

    run_async(scenario())


def test_of_many_takers_one_succeeds(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        rivals = [Epoch(4, bytes([number]) * 16) for number in range(8)]
        replies = [await store.take_epoch(ANNA, rival, LONG_MS) for rival in rivals]
        assert replies == [EpochTaken(), *[EpochMoved(rivals[0])] * 7]

    run_async(scenario())


def test_an_epoch_is_taken_again_by_whom_the_answer_did_not_reach(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        assert await store.take_epoch(ANNA, CARA, SHORT_MS) == EpochTaken()
        await free(store)
        assert await store.take_epoch(ANNA, CARA, LONG_MS) == EpochTaken()
        assert await store.look() == LeaseView(CARA, is_held=True, is_empty=True)
        assert await store.take_epoch(ANNA, Epoch(4, b"d" * 16), LONG_MS) == EpochMoved(CARA)

    run_async(scenario())


def test_instances_are_bytes_of_any_value(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        odd = Epoch(2**53 - 1, bytes(range(0, 256, 16)))
        assert await store.take_epoch(NO_EPOCH, odd, LONG_MS) == EpochTaken()
        assert (await view_of(store)).epoch == odd
        assert await store.renew(odd, LONG_MS) == Renewed()

    run_async(scenario())


def test_a_lease_that_is_not_renewed_runs_out(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, SHORT_MS)
        assert await free(store) == LeaseView(ANNA, is_held=False, is_empty=True)

    run_async(scenario())


def test_a_renewed_lease_runs_on(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, SHORT_MS)
        assert await store.renew(ANNA, LONG_MS) == Renewed()
        await asyncio.sleep(2 * SHORT_MS / 1000)
        assert (await view_of(store)).is_held
        assert await store.renew(ANNA, SHORT_MS) == Renewed()
        assert not (await free(store)).is_held, "the time asked last counts"

    run_async(scenario())


def test_a_lease_that_ran_out_begins_again(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, SHORT_MS)
        await free(store)
        assert await store.renew(ANNA, LONG_MS) == Renewed()
        assert await store.look() == LeaseView(ANNA, is_held=True, is_empty=True)

    run_async(scenario())


def test_the_stored_epoch_is_the_fence_not_its_lease(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, SHORT_MS)
        await free(store)
        assert await store.call(ANNA, BeginRewrite(Generation(3, 1))) == Applied(0)
        await store.take_epoch(ANNA, CARA, SHORT_MS)
        await free(store)
        assert await store.call(ANNA, EndRewrite(Generation(3, 1), 0)) == OlderEpoch(CARA)

    run_async(scenario())


def test_an_older_epoch_renews_and_releases_nothing(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, CARA, LONG_MS)
        for older in (ANNA, Epoch(4, b"x" * 16), NO_EPOCH):
            assert await store.renew(older, SHORT_MS) == OlderEpoch(CARA)
            assert await store.release(older) == OlderEpoch(CARA)
        assert await store.look() == LeaseView(CARA, is_held=True, is_empty=True)
        await store.renew(CARA, SHORT_MS)
        await free(store)
        assert await store.renew(ANNA, LONG_MS) == OlderEpoch(CARA)
        assert not (await view_of(store)).is_held

    run_async(scenario())


def test_a_released_lease_is_free_at_once(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        for _ in range(2):
            assert await store.release(ANNA) == Released()
            assert await store.look() == LeaseView(ANNA, is_held=False, is_empty=True)
        assert await store.take_epoch(ANNA, CARA, LONG_MS) == EpochTaken()

    run_async(scenario())


def test_releasing_an_epoch_that_was_never_stored_leaves_the_stored_one(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        assert await store.release(CARA) == Released()
        assert await store.look() == LeaseView(ANNA, is_held=True, is_empty=True)

    run_async(scenario())


def test_a_store_is_empty_until_a_generation_is_complete(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        generation = Generation(3, 1)
        assert await store.call(ANNA, BeginRewrite(generation)) == Applied(0)
        assert (await view_of(store)).is_empty
        assert await store.call(ANNA, EndRewrite(generation, 0)) == Applied(0)
        assert not (await view_of(store)).is_empty

    run_async(scenario())


def test_a_leader_whose_store_was_emptied_gets_its_epoch_back(rig: StoreRig, run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = rig.store
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        await rig.empty()
        assert await store.look() == LeaseView(NO_EPOCH, is_held=False, is_empty=True)
        assert await store.renew(ANNA, LONG_MS) == Renewed()
        assert await store.look() == LeaseView(ANNA, is_held=True, is_empty=True)
        assert await store.take_epoch(NO_EPOCH, BERT, LONG_MS) == EpochMoved(ANNA)
        assert await store.read(ANNA) == StoredJournal(None, StoredState())

    run_async(scenario())


def test_a_leader_whose_emptied_store_was_taken_by_another_is_told(rig: StoreRig, run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = rig.store
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        await rig.empty()
        assert await store.take_epoch(NO_EPOCH, BERT, LONG_MS) == EpochTaken()
        assert await store.renew(ANNA, LONG_MS) == OlderEpoch(BERT)
        assert await store.renew(BERT, LONG_MS) == Renewed()

    run_async(scenario())


def test_a_leader_above_the_stored_epoch_raises_it(store: Store, run_async: RunAsync) -> None:
    """As when Redis comes back with an older file."""

    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, ANNA, SHORT_MS)
        await free(store)
        assert await store.renew(CARA, LONG_MS) == Renewed()
        assert await store.look() == LeaseView(CARA, is_held=True, is_empty=True)
        assert await store.renew(ANNA, LONG_MS) == OlderEpoch(CARA)

    run_async(scenario())


def test_a_full_store_keeps_its_lease_going(rig: StoreRig, run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = rig.store
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        await rig.set_full(True)
        assert await store.renew(ANNA, SHORT_MS) == Renewed()
        await free(store)
        assert await store.renew(ANNA, LONG_MS) == Renewed()
        assert await store.look() == LeaseView(ANNA, is_held=True, is_empty=True)
        assert await store.renew(BERT, LONG_MS) == OlderEpoch(ANNA)
        assert await store.release(ANNA) == Released()
        assert await store.take_epoch(ANNA, CARA, LONG_MS) == EpochTaken()
        assert await store.look() == LeaseView(CARA, is_held=True, is_empty=True)
        assert await store.renew(ANNA, LONG_MS) == OlderEpoch(CARA)

    run_async(scenario())


def test_a_store_of_another_format_is_left_alone(rig: StoreRig, run_async: RunAsync) -> None:
    async def scenario() -> None:
        store = rig.store
        await store.take_epoch(NO_EPOCH, ANNA, LONG_MS)
        generation = Generation(3, 1)
        for call in (BeginRewrite(generation), EndRewrite(generation, 0)):
            await store.call(ANNA, call)
        await rig.set_format("999")
        before = await rig.contents()
        wrong = WrongFormat("999", JOURNAL_FORMAT)
        assert "format 999" in wrong.why and f"format {JOURNAL_FORMAT}" in wrong.why
        assert await store.look() == wrong
        for epoch in (ANNA, CARA):
            assert await store.take_epoch(ANNA, epoch, LONG_MS) == wrong
            assert await store.read(epoch) == wrong
            assert await store.renew(epoch, LONG_MS) == Failed(wrong.why)
            assert await store.release(epoch) == Failed(wrong.why)
            for call in (BeginRewrite(Generation(5, 1)), EndRewrite(generation, 0)):
                assert await store.call(epoch, call) == Failed(wrong.why)
        assert await rig.contents() == before
        await rig.set_format(JOURNAL_FORMAT)
        assert await store.renew(ANNA, LONG_MS) == Renewed()

    run_async(scenario())
