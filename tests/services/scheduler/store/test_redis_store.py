"""What only a real server can do to the store: be away, restart, be full, be paused, forget its scripts."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from journal_leader import EPOCH, LEASE_MS, Leader, request

from kv_manager.published_block import PublishedBlock
from services.scheduler.core.changes import Changes
from services.scheduler.core.journal import Journal
from services.scheduler.core.journal_call import Applied, Failed, Gap
from services.scheduler.core.record import BlockDelta
from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.scheduler.store.port import EpochTaken, LeaseView, StoredJournal
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch

RunAsync = Callable[..., Any]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path) as running:
        yield running


def test_all_keys_of_a_group_share_one_hash_tag(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        keys = await leader.store._journal.command("KEYS", "*")
        assert keys and all(key.startswith(b"tessera:{group}:") for key in keys)
        await leader.store.close()

    run_async(scenario())


def test_nothing_of_an_old_generation_is_left_behind(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        first = set(await leader.store._journal.command("KEYS", "*"))
        later = Leader(server.url)
        epoch = Epoch(2, EPOCH.instance)
        assert await later.store.take_epoch(EPOCH, epoch, LEASE_MS) == EpochTaken()
        later.journal = Journal(Config(), 2, 1)
        later.journal.add(Changes((request(2),)), 0)
        while (call := later.journal.next_call(0)) is not None:
            later.journal.on_reply(await later.store.call(epoch, call), 0)
        second = set(await leader.store._journal.command("KEYS", "*"))
        assert len(first) == len(second) == 3 and len(first & second) == 2, "meta, lease and the requests of one side"
        await later.store.close()
        await leader.store.close()

    run_async(scenario())


def test_a_server_that_is_away_fails_every_call_and_nothing_else(tmp_path: Path, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(f"unix://{tmp_path}/nobody.sock")
        assert isinstance(await leader.store.look(), Failed)
        assert isinstance(await leader.store.take_epoch(NO_EPOCH, EPOCH, LEASE_MS), Failed)
        assert isinstance(await leader.store.renew(EPOCH, LEASE_MS), Failed)
        assert isinstance(await leader.store.release(EPOCH), Failed)
        assert isinstance(await leader.store.read(EPOCH), Failed)
        assert isinstance(await leader.write(Changes((request(1),))), Failed)
        await leader.store.close()

    run_async(scenario())


def test_it_goes_on_after_the_server_comes_back_with_its_file(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        server.kill()
        assert isinstance(await leader.write(Changes((request(2),))), Failed)
        server.start()
        assert await leader.drive() == Applied(2)
        assert await leader.requests() == {1, 2}
        await leader.store.close()

    run_async(scenario())


def test_a_server_that_comes_back_empty_is_written_anew(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        await leader.store._journal.command("FLUSHALL")
        leader.journal.add(Changes((request(2),)), 0)
        call = leader.journal.next_call(0)
        assert call is not None
        reply = await leader.store.call(EPOCH, call)
        assert reply == Gap(0)
        leader.journal.on_reply(reply, 0)
        assert not leader.journal.is_durable(0), "what was acknowledged is gone"
        assert await leader.drive() == Applied(2)
        assert leader.journal.is_durable(0)
        assert await leader.requests() == {1, 2} and await leader.store.look() == LeaseView(
            EPOCH, is_held=False, is_empty=False
        )
        await leader.store.close()

    run_async(scenario())


def test_a_server_without_our_scripts_is_sent_them(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        await leader.store._journal.command("SCRIPT", "FLUSH")
        assert await leader.write(Changes((request(2),))) == Applied(2)
        await leader.store.close()

    run_async(scenario())


def test_a_full_server_does_nothing_and_says_so(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        await leader.store._journal.command("CONFIG", "SET", "maxmemory", 1)
        reply = await leader.write(Changes((request(2),)))
        assert isinstance(reply, Failed) and "OOM" in reply.why
        assert await leader.requests() == {1}
        await leader.store._journal.command("CONFIG", "SET", "maxmemory", 0)
        assert await leader.drive() == Applied(2)
        assert await leader.requests() == {1, 2}
        await leader.store.close()

    run_async(scenario())


def test_a_read_only_server_is_not_durable(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        await leader.store._journal.command("REPLICAOF", "127.0.0.1", 1)
        reply = await leader.write(Changes((request(2),)))
        assert isinstance(reply, Failed) and "READONLY" in reply.why
        await leader.store._journal.command("REPLICAOF", "NO", "ONE")
        assert await leader.drive() == Applied(2)
        await leader.store.close()

    run_async(scenario())


def test_a_call_carried_out_late_changes_nothing(server: EmbeddedRedis, run_async: RunAsync) -> None:
    """The server was stopped with our call in its socket; it carries it out when it goes on, after the same call was made again."""

    async def scenario() -> None:
        leader = Leader(server.url, timeout_s=0.3)
        await leader.begin()
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            assert isinstance(await leader.write(Changes((request(2),))), Failed)
            leader.journal.add(Changes((request(3),), forgotten=(request(1).request_id,)), 0)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        while isinstance(await leader.drive(), Failed):
            pass  # the server is still waking up
        assert leader.journal.acked == 3
        assert await leader.requests() == {2, 3}
        await leader.store.close()

    run_async(scenario())


def test_a_large_state_is_written_and_read_in_pieces(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        rng = random.Random(1)
        digests = [rng.randrange(2**64) for _ in range(20_001)]
        blocks = tuple(PublishedBlock(i, digests[i], digests[i + 1], (i,) * 16, i) for i in range(20_000))
        boot = b"b" * 16
        assert await leader.write(Changes(tuple(request(i, 2000) for i in range(2, 300)))) == Applied(2)
        assert await leader.write(Changes(blocks=(BlockDelta("10.0.0.1:7000", boot, blocks, ()),))) == Applied(3)
        stored = await leader.store.read(EPOCH)
        assert isinstance(stored, StoredJournal)
        assert list(stored.state.blocks) == [("10.0.0.1:7000", boot)]
        assert sorted(stored.state.blocks["10.0.0.1:7000", boot].values(), key=lambda block: block.block_id) == list(blocks)
        assert await leader.requests() == set(range(1, 300))
        gone = tuple(range(10_000, 20_000))
        assert await leader.write(Changes(blocks=(BlockDelta("10.0.0.1:7000", boot, (), gone),))) == Applied(4)
        stored = await leader.store.read(EPOCH)
        assert isinstance(stored, StoredJournal) and len(stored.state.blocks["10.0.0.1:7000", boot]) == 10_000
        await leader.store.close()

    run_async(scenario())


def test_a_new_boot_of_a_worker_leaves_nothing_of_the_old_one(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        block = PublishedBlock(1, 2, None, (1, 2), 3)
        await leader.write(Changes(blocks=(BlockDelta("w", b"1" * 16, (block,), ()), BlockDelta("v", b"3" * 16, (block,), ()))))
        await leader.write(Changes(blocks=(BlockDelta("w", b"2" * 16, (block,), ()),)))
        stored = await leader.store.read(EPOCH)
        assert isinstance(stored, StoredJournal)
        assert set(stored.state.blocks) == {("w", b"2" * 16), ("v", b"3" * 16)}
        await leader.store.close()

    run_async(scenario())


def test_bytes_that_no_scheduler_wrote_fail_the_read(server: EmbeddedRedis, run_async: RunAsync) -> None:
    async def scenario() -> None:
        leader = Leader(server.url)
        await leader.begin()
        key = leader.store._sides["a"][1]
        known = (1).to_bytes(16, "big")
        for field, value in ((b"r" + b"x" * 16, b""), (b"r" + known, b"\xff\xff"), (b"s" + known, b"\x01\x00\x00\x00\x07")):
            before = await leader.store._journal.command("HGET", key, field)
            await leader.store._journal.command("HSET", key, field, value)
            assert isinstance(await leader.store.read(EPOCH), Failed), (field, value)
            if before is None:
                await leader.store._journal.command("HDEL", key, field)
            else:
                await leader.store._journal.command("HSET", key, field, before)
        pages, page = leader.store._sides["a"][2], bytes(12)
        for field, value in ((bytes(20), b""), (bytes(20), page + bytes(27)), (bytes(19), page)):
            await leader.store._journal.command("HSET", pages, field, value)
            assert isinstance(await leader.store.read(EPOCH), Failed), (field, value)
            await leader.store._journal.command("HDEL", pages, field)
        no_key, cut_off = b"\x01" + bytes((1, 0, 0, 0, 0, 0, 0, 0)) + bytes(4), b"\x03" + bytes((1, 0, 0, 0, 0, 0, 0, 0))
        for entry in (b"\x01", no_key, cut_off, b"\x00" + bytes(5)):
            await leader.store._journal.command("RPUSH", leader.store._sides["a"][0], entry)
            assert isinstance(await leader.store.read(EPOCH), Failed), entry
            await leader.store._journal.command("RPOP", leader.store._sides["a"][0])
        assert await leader.requests() == {1}
        await leader.store.close()

    run_async(scenario())
