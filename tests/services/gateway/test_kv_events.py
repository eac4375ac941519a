"""SubscribeKvEvents at the engine's port: numbers without gaps, a snapshot first and whenever it is needed, an end when the gateway ends."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import numpy as np
from gateway_house import read_all, reason_and_fields, refused
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from gateway.cached_blocks import CachedBlock, Cleared, Removed, Stored
from services.gateway import cache_feed
from services.gateway.cache_feed import CacheFeed
from services.gateway.vllm_engine import kv_event_stream
from services.rpc.channel import open_channel
from tessera.values.kv_events import KvEvents, PoolChange, WatchKv
from tessera.values.load import GroupLoad
from tests.kv_follower import Follower

ROOT = 7
TOP = 1 << 63
"""Digests beyond it are negative in this protocol."""


def change(*blocks, removed=(), is_gone=False, worker="w"):
    """`blocks`: (block id, digest, parent or None, token ids)."""
    return PoolChange(
        worker,
        ROOT,
        is_gone,
        np.array(removed, np.int64),
        np.array([block[0] for block in blocks], np.int64),
        np.array([block[1] for block in blocks], np.uint64),
        np.array([ROOT if block[2] is None else block[2] for block in blocks], np.uint64),
        np.array([block[2] is not None for block in blocks], np.bool_),
        np.array([block[3] for block in blocks], np.int32).reshape(len(blocks), 2),
    )


FIRST, SECOND, THIRD = (0, 10, None, (1, 2)), (1, TOP + 11, 10, (3, 4)), (2, 12, TOP + 11, (5, 6))
WHOLE = KvEvents((change(SECOND, FIRST),), begins=True)


class Subscriber:
    """As smg: follows the numbers, and forgets what it knew where a snapshot begins."""

    def __init__(self, stub, start=0):
        self.call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=start))
        self.number = start
        self.follower = Follower()

    async def read(self):
        batch = await self.call.read()
        assert batch is not grpc.aio.EOF
        assert batch.sequence_number == self.number + 1, "a gap"
        self.number = batch.sequence_number
        self.follower.follow(map(event_from_proto, batch.events))
        return batch

    @property
    def tokens(self):
        """Of each prefix that is cached, all."""
        prefixes = self.follower.prefixes
        return sorted(np.frombuffer(b"".join(prefix), np.int32).tolist() for prefix in prefixes)


def event_from_proto(event):
    match event.WhichOneof("data"):
        case "stored":
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            blocks = []
            for block in event.stored.blocks:
                assert block.block_size == len(block.token_ids)
                blocks.append(CachedBlock(block.block_hash, parent, np.array(block.token_ids, np.int32).tobytes()))
                parent = block.block_hash
            return Stored(tuple(blocks))
        case "removed":
            return Removed(tuple(event.removed.block_hashes))
        case "cleared":
            return Cleared()


@asynccontextmanager
async def engine(house, **options):
    async with house(engine_listen="127.0.0.1:0", **options) as h, open_channel(h.gateway.engine_address) as channel:
        yield h, await h.session(), vllm_engine_pb2_grpc.VllmEngineStub(channel)


def test_a_snapshot_comes_first_then_what_changes(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            subscriber = Subscriber(stub)
            await subscriber.call.initial_metadata()  # comes before there is anything to tell
            assert await end.hear(WatchKv) == WatchKv(True)
            end.say(WHOLE)
            batch = await subscriber.read()
            assert (batch.snapshot.index, batch.snapshot.count, batch.snapshot.blocks) == (0, 1, 2)
            assert [event.WhichOneof("data") for event in batch.events] == ["cleared", "stored"]
            assert subscriber.tokens == [[1, 2], [1, 2, 3, 4]]
            end.say(KvEvents((change(THIRD),)))
            batch = await subscriber.read()
            assert not batch.HasField("snapshot") and batch.events[0].stored.parent_block_hash == 11 - TOP
            end.say(KvEvents((change(removed=[2]), change(removed=[1]))))
            while subscriber.tokens != [[1, 2]]:
                await subscriber.read()
            end.say(KvEvents((change(is_gone=True),)))
            assert (await subscriber.read()).events[0].WhichOneof("data") == "cleared"
            subscriber.call.cancel()
            assert await end.hear(WatchKv) == WatchKv(False)

    run_async(scenario())


def test_a_block_is_cached_while_any_worker_has_a_copy(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            subscriber = Subscriber(stub)
            await end.hear(WatchKv)
            end.say(KvEvents((change(FIRST),), begins=True, more=True), KvEvents((change((5, *FIRST[1:]), worker="v"),)))
            await subscriber.read()
            end.say(KvEvents((change(removed=[0]),)), KvEvents((change(SECOND),)))
            await subscriber.read()
            assert subscriber.tokens == [[1, 2], [1, 2, 3, 4]], "the copy that is gone was not told of"
            end.say(KvEvents((change(is_gone=True),)), KvEvents((change(removed=[5], worker="v"),)))
            while subscriber.tokens:
                await subscriber.read()
            subscriber.call.cancel()

    run_async(scenario())


def test_a_snapshot_of_several_chunks_goes_on_with_the_subscribers_numbers(run_async, house, monkeypatch):
    async def scenario():
        monkeypatch.setattr(kv_event_stream, "BATCH_BLOCKS", 2)
        async with engine(house) as (_, end, stub):
            subscriber = Subscriber(stub, start=41)
            await end.hear(WatchKv)
            end.say(KvEvents((change(FIRST, SECOND, THIRD, (3, 13, None, (7, 8))),), begins=True))
            batches = [await subscriber.read() for _ in range(3)]
            assert [(batch.snapshot.index, batch.snapshot.count) for batch in batches] == [(0, 3), (1, 3), (2, 3)]
            assert len(subscriber.tokens) == 4 and subscriber.number == 44
            other = Subscriber(stub)  # is told of it without a word to the scheduler
            for _ in range(3):
                await other.read()
            assert other.tokens == subscriber.tokens and end.nothing_heard()
            subscriber.call.cancel()
            other.call.cancel()

    run_async(scenario())


def test_the_next_leader_is_asked_and_its_snapshot_counts(run_async, house):
    async def scenario():
        async with engine(house) as (h, end, stub):
            subscriber = Subscriber(stub)
            assert await end.hear(WatchKv) == WatchKv(True)
            end.say(WHOLE)
            await subscriber.read()
            end.break_off()
            later = await h.session(number=2)
            assert await later.hear(WatchKv) == WatchKv(True)
            later.say(KvEvents((change(THIRD),)))  # of nothing that is known
            later.say(KvEvents((change(FIRST),), begins=True, more=True), KvEvents((change((8, 18, None, (9, 9))),)))
            batch = await subscriber.read()
            while not batch.HasField("snapshot"):
                batch = await subscriber.read()
            assert subscriber.tokens == [[1, 2], [9, 9]]
            subscriber.call.cancel()

    run_async(scenario())


def test_a_stream_ends_when_its_gateway_does(run_async, house):
    async def scenario():
        async with engine(house, drain_grace_s=60.0) as (h, end, stub):
            calls = [Subscriber(stub).call, Subscriber(stub).call]
            await end.hear(WatchKv)
            end.say(WHOLE)
            for call in calls:
                await call.read()
            h.gateway.session.drain()
            assert [await read_all(call) for call in calls] == [[], []]
            assert [await call.code() for call in calls] == [grpc.StatusCode.OK] * 2
            error = await refused(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
            assert error.code() is grpc.StatusCode.UNAVAILABLE

    run_async(scenario())


def test_the_load_comes_with_events_and_between_them(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            early = stub.SubscribeKvEvents(
                common_pb2.SubscribeKvEventsRequest(start_sequence_number=7, load_records_before_first_batch=True)
            )
            await early.initial_metadata()
            late = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=7))
            await late.initial_metadata()
            end.say(GroupLoad(1, 2, 3, used_kv_tokens=32, total_kv_tokens=128, prefix_hit_rate=0.5, max_running=8))
            first = await early.read()
            assert first.sequence_number == 0 and not first.events and not first.HasField("snapshot")
            load = first.load
            assert (load.load_only, load.running_requests, load.waiting_requests, load.max_running_requests) == (True, 1, 5, 8)
            assert (load.token_usage, load.active_token_usage, load.cache_hit_rate, load.num_used_tokens) == (
                0.25,
                0.25,
                0.5,
                32,
            )
            end.say(WHOLE)
            told = [await early.read(), await late.read()]
            assert [batch.sequence_number for batch in told] == [8, 8], "nothing came before it where nothing was asked for"
            assert all(batch.events and batch.load.running_requests == 1 and not batch.load.load_only for batch in told)
            assert not told[0].load.HasField("cache_hit_rate") and told[0].load.sample == 2
            end.say(GroupLoad(4))
            again = [await early.read(), await late.read()]
            assert [(batch.sequence_number, batch.load.load_only, batch.load.running_requests) for batch in again] == [
                (8, True, 4)
            ] * 2
            assert again[0].load.sample == 3
            early.cancel()
            late.cancel()

    run_async(scenario())


def test_numbers_that_would_come_to_their_end_are_refused(run_async, house):
    async def scenario():
        async with engine(house) as (_, end, stub):
            error = await refused(Subscriber(stub, start=2**64 - 1).call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason_and_fields(error)[1] == ["start_sequence_number"]
            subscriber = Subscriber(stub, start=2**63)
            await end.hear(WatchKv)
            end.say(WHOLE)
            assert (await subscriber.read()).sequence_number == 2**63 + 1
            subscriber.call.cancel()

    run_async(scenario())


def test_there_is_a_limit_to_those_who_are_told(run_async, house, monkeypatch):
    async def scenario():
        monkeypatch.setattr(cache_feed, "LISTENERS_MAX", 1)
        async with engine(house) as (_, _end, stub):
            subscriber = Subscriber(stub)
            await subscriber.call.initial_metadata()
            error = await refused(stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            subscriber.call.cancel()

    run_async(scenario())


def test_a_listener_that_does_not_read_is_told_of_the_whole_again(run_async, monkeypatch):
    async def scenario():
        monkeypatch.setattr(cache_feed, "PENDING_EVENTS_MAX", 3)
        feed = CacheFeed(lambda is_on: None)
        with feed.listener() as slow, feed.listener() as quick:
            feed.take(WHOLE)
            assert (await slow.next()).is_whole and (await quick.next()).is_whole
            for number in range(4):
                feed.take(KvEvents((change((5 + number, 50 + number, None, (number, number))),)))
                assert not (await quick.next()).is_whole
            told = await slow.next()
            assert told.is_whole and sum(len(event.blocks) for event in told.events) == 6
            feed.take(KvEvents((change(removed=[5]),)))
            assert (await slow.next()).events == [Removed((50,))]
            feed.end()
            assert await slow.next() is None
            late = asyncio.ensure_future(quick.next())
            assert await late is None

    run_async(scenario())
