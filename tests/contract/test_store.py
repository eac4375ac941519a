"""What every store must do, run by every adapter."""

import copy
import random
from collections.abc import Callable
from typing import Any

from journal_story import Story, facts
from store_rig import StoreRig

from services.scheduler.core.changes import Changes
from services.scheduler.core.folded_log import FOLD_CYCLE, RUN_LEN_MAX, LogFolder
from services.scheduler.core.journal import Journal
from services.scheduler.core.journal_call import (
    Append,
    Applied,
    BeginRewrite,
    EndRewrite,
    Failed,
    Gap,
    Generation,
    JournalCall,
    OlderEpoch,
    RewriteChunk,
)
from services.scheduler.core.record import Record, StoredState
from services.scheduler.store.memory import MemoryStore
from services.scheduler.store.port import EpochTaken, LeaseView, Store, StoredJournal
from services.scheduler.store.redis_store import RedisStore
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch

RunAsync = Callable[..., Any]
EPOCH = Epoch(3, b"a" * 16)
LEASE_MS = 60_000


def record(number: int, changes: Changes) -> Record:
    return Record(number, changes.requests, changes.blocks, changes.forgotten, changes.decoded, changes.removed_workers)


class Writer:
    """Writes a story into a store by hand: one generation, one record per call."""

    def __init__(self, store: Store, epoch: Epoch = EPOCH) -> None:
        self.store = store
        self.epoch = epoch
        self.generation = Generation(epoch.number, 1)
        self.folder = LogFolder(0)
        self.story = Story(random.Random(5), retiring=False)

    async def open(self) -> None:
        """Take the epoch and complete an empty generation."""
        assert await self.store.take_epoch(NO_EPOCH, self.epoch, LEASE_MS) == EpochTaken()
        assert await self.call(BeginRewrite(self.generation)) == Applied(0)
        assert await self.call(EndRewrite(self.generation, 0)) == Applied(0)

    def next(self, count: int = 1) -> Append:
        """The call that appends the next `count` records."""
        last = self.folder.state().last
        records = [record(number, self.story.step()) for number in range(last + 1, last + 1 + count)]
        return self.folder.append(self.generation, records)

    async def call(self, call: JournalCall) -> Any:
        return await self.store.call(self.epoch, call)

    async def state(self) -> StoredState:
        stored = await self.store.read(self.epoch)
        assert isinstance(stored, StoredJournal)
        return stored.state


async def rewrite(store: Store, epoch: Epoch, generation: Generation, state: StoredState) -> list[Any]:
    """The answers to all calls of one rewrite, written by a journal that has absorbed nothing but `state`."""
    folder = LogFolder(state.last)
    folder._state = state
    journal = Journal(Config(), generation.epoch_number, state.last)
    journal._folder = folder
    journal.add(Changes(), 0)
    replies = []
    while (call := journal.next_call(0)) is not None:
        replies.append(await store.call(epoch, call))
        journal.on_reply(replies[-1], 0)
    return replies


def test_a_store_without_a_complete_generation_is_empty(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        await store.take_epoch(NO_EPOCH, EPOCH, LEASE_MS)
        writer = Writer(store)
        append = writer.next()
        assert await store.call(EPOCH, append) == Gap(0)
        assert await store.read(EPOCH) == StoredJournal(None, StoredState())
        assert await store.call(EPOCH, BeginRewrite(writer.generation)) == Applied(0)
        assert await store.call(EPOCH, append) == Gap(0)
        chunk = RewriteChunk(writer.generation, append.requests, ())
        assert await store.call(EPOCH, chunk) == Applied(0)
        assert await store.read(EPOCH) == StoredJournal(None, StoredState())
        assert await store.call(EPOCH, EndRewrite(writer.generation, 1)) == Applied(1)
        stored = await store.read(EPOCH)
        assert isinstance(stored, StoredJournal) and stored.generation == writer.generation and stored.state.last == 1
        assert set(stored.state.requests) == {folded.request_id for folded in append.requests}

    run_async(scenario())


def test_what_is_read_is_what_was_applied(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        for count in (1, 2, 1, 7) * 30:
            call = writer.next(count)
            assert await writer.call(call) == Applied(call.last)
            if writer.story.rng.random() < 0.3:
                assert facts(await writer.state()) == facts(writer.folder.state())
        assert facts(await writer.state()) == facts(writer.folder.state())

    run_async(scenario())


def test_a_call_made_again_changes_nothing_and_is_acknowledged(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        calls = [writer.next(count) for count in (3, 1, 2)]
        for call in calls:
            await writer.call(call)
        expected = facts(await writer.state())
        for call in (calls[0], calls[2], calls[1]):
            assert await writer.call(call) == Applied(6)
        assert facts(await writer.state()) == expected

    run_async(scenario())


def test_a_call_that_overlaps_applies_only_what_is_new(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        for _ in range(100):
            await writer.call(writer.next())
        again = copy.deepcopy(writer.folder)
        records = [record(number, writer.story.step()) for number in range(101, 107)]
        await writer.call(again.append(writer.generation, records[:4]))
        both = writer.folder.append(writer.generation, records)
        assert await writer.call(both) == Applied(106)
        assert facts(await writer.state()) == facts(writer.folder.state())

    run_async(scenario())


def test_records_that_leave_a_gap_are_refused_whole(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        await writer.call(writer.next(2))
        expected = facts(await writer.state())
        writer.next()
        assert await writer.call(writer.next()) == Gap(2)
        assert facts(await writer.state()) == expected

    run_async(scenario())


def test_an_append_of_another_generation_is_refused(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        await writer.call(writer.next(2))
        for other in (Generation(3, 0), Generation(3, 2), Generation(2, 1)):
            writer.generation = other
            assert await writer.call(LogFolder(2).append(other, [Record(3)])) == Gap(2)

    run_async(scenario())


def test_anyone_but_the_leader_is_told_of_the_epoch(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        await writer.call(writer.next(2))
        expected = facts(await writer.state())
        generation = Generation(9, 9)
        calls = (
            LogFolder(2).append(writer.generation, [Record(3)]),
            BeginRewrite(generation),
            RewriteChunk(generation, (), ()),
            EndRewrite(generation, 5),
        )
        for stranger in (Epoch(2, b"a" * 16), Epoch(3, b"b" * 16), NO_EPOCH):
            for call in calls:
                assert await store.call(stranger, call) == OlderEpoch(EPOCH)
            assert await store.read(stranger) == OlderEpoch(EPOCH)
        assert facts(await writer.state()) == expected

    run_async(scenario())


def test_a_leader_above_the_stored_epoch_must_rewrite_and_raises_it(store: Store, run_async: RunAsync) -> None:
    """As when Redis comes back with an older file."""

    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        await writer.call(writer.next(2))
        later = Epoch(4, b"z" * 16)
        assert await store.call(later, LogFolder(2).append(writer.generation, [Record(3)])) == Gap(2)
        assert isinstance(await store.call(later, RewriteChunk(writer.generation, (), ())), Failed)
        assert await store.call(later, BeginRewrite(Generation(4, 1))) == Applied(2)
        view = await store.look()
        assert isinstance(view, LeaseView) and view.epoch == later
        assert await writer.call(writer.next()) == OlderEpoch(later)

    run_async(scenario())


def test_the_old_generation_is_read_until_the_new_one_is_complete(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        await writer.call(writer.next(20))
        expected, old = facts(await writer.state()), writer.generation
        new = Generation(3, 2)
        whole = writer.next(5)
        for call in (BeginRewrite(new), RewriteChunk(new, whole.requests, whole.pages)):
            assert await writer.call(call) == Applied(20)
            stored = await store.read(EPOCH)
            assert isinstance(stored, StoredJournal)
            assert stored.generation == old and facts(stored.state) == expected
        assert await writer.call(EndRewrite(new, 25)) == Applied(25)
        stored = await store.read(EPOCH)
        assert isinstance(stored, StoredJournal) and stored.generation == new
        assert set(stored.state.requests) == {folded.request_id for folded in whole.requests}

    run_async(scenario())


def test_only_the_latest_attempt_can_complete(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        await writer.call(writer.next(20))
        expected = facts(await writer.state())
        stale, fresh = Generation(3, 2), Generation(3, 4)
        whole = writer.folder.append(writer.generation, [Record(21)])
        assert await writer.call(BeginRewrite(stale)) == Applied(20)
        assert await writer.call(RewriteChunk(stale, writer.next().requests, ())) == Applied(20)
        assert await writer.call(BeginRewrite(fresh)) == Applied(20)
        for call in (
            RewriteChunk(stale, whole.requests, ()),
            EndRewrite(stale, 99),
            BeginRewrite(stale),
            BeginRewrite(Generation(3, 3)),
            BeginRewrite(fresh),
            BeginRewrite(Generation(3, 1)),
        ):
            assert isinstance(await writer.call(call), Failed)
        assert facts(await writer.state()) == expected
        assert await writer.call(EndRewrite(fresh, 21)) == Applied(21)
        assert facts(await writer.state()) == facts(StoredState(21)), "leftovers of the abandoned attempt came through"
        for call in (BeginRewrite(fresh), RewriteChunk(fresh, whole.requests, ()), EndRewrite(fresh, 21)):
            assert isinstance(await writer.call(call), Failed), "it is complete already"
        assert facts(await writer.state()) == facts(StoredState(21))

    run_async(scenario())


def test_a_rewrite_by_the_journal_restores_everything(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        for _ in range(300):
            await writer.call(writer.next())
        replies = await rewrite(store, EPOCH, writer.generation, writer.folder.state())
        assert isinstance(replies[0], Failed), "the journal began with a generation that is taken"
        replies = await rewrite(store, Epoch(4, b"b" * 16), Generation(4, 0), writer.folder.state())
        assert all(isinstance(reply, Applied) for reply in replies)
        stored = await store.read(Epoch(4, b"b" * 16))
        assert isinstance(stored, StoredJournal)
        assert facts(stored.state) == facts(writer.folder.state())

    run_async(scenario())


def test_the_log_stays_short_and_everything_goes_when_all_is_forgotten(store: Store, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(store)
        await writer.open()
        longest = 0
        for _ in range(2 * FOLD_CYCLE):
            await writer.call(writer.next())
            longest = max(longest, await log_len(store))
        assert longest <= FOLD_CYCLE + RUN_LEN_MAX
        for changes in writer.story.end():
            number = writer.folder.state().last + 1
            await writer.call(writer.folder.append(writer.generation, [record(number, changes)]))
        await assert_bare(store)

    run_async(scenario())


def test_a_full_store_refuses_what_makes_the_journal_longer(rig: StoreRig, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(rig.store)
        await writer.open()
        earlier = writer.next(30)
        await writer.call(earlier)
        expected = facts(await writer.state())
        await rig.set_full(True)
        late = writer.next()
        assert await writer.call(earlier) == Applied(30)
        refused = await writer.call(late)
        assert isinstance(refused, Failed) and "OOM" in refused.why
        new = Generation(3, 2)
        assert await writer.call(BeginRewrite(new)) == Applied(30)
        assert isinstance(await writer.call(RewriteChunk(new, earlier.requests, ())), Failed)
        assert facts(await writer.state()) == expected
        await rig.set_full(False)
        assert await writer.call(late) == Applied(31)
        assert facts(await writer.state()) == facts(writer.folder.state())

    run_async(scenario())


def test_a_full_store_finishes_a_rewrite_that_is_written(rig: StoreRig, run_async: RunAsync) -> None:
    async def scenario() -> None:
        writer = Writer(rig.store)
        await writer.open()
        await writer.call(writer.next(4))
        new = Generation(3, 2)
        assert await writer.call(BeginRewrite(new)) == Applied(4)
        await rig.set_full(True)
        assert await writer.call(EndRewrite(new, 4)) == Applied(4)
        assert facts(await writer.state()) == facts(StoredState(4))

    run_async(scenario())


async def log_len(store: Store) -> int:
    if isinstance(store, MemoryStore):
        return store.log_len
    assert isinstance(store, RedisStore)
    return sum([await store._journal.command("LLEN", sides[0]) for sides in store._sides.values()])


async def assert_bare(store: Store) -> None:
    if isinstance(store, MemoryStore):
        assert store.is_bare
        return
    assert isinstance(store, RedisStore)
    meta, lease = store._lease.keys
    keys = set(await store._journal.command("KEYS", meta[: -len(b"meta")] + b"*"))
    blocks = {sides[2] for sides in store._sides.values()}
    assert keys - blocks == {meta, lease}
