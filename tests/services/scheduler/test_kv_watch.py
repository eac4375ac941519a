"""What gateways are told of the workers' prefix caches: at any moment what a prompt without a salt would find."""

import random
from dataclasses import replace

import numpy as np
import pytest
from core.fake_worker import FakeWorker
from leader_table import WORKER, Table, submission

from gateway.cached_blocks import CachedBlocks
from kv_manager.hash_chain import namespace_link
from services.scheduler import kv_watch
from services.scheduler.convert import request_from_proto, request_to_proto, response_from_proto, response_to_proto
from services.scheduler.core.held_blocks import kv_namespace
from services.scheduler.leader import Leader
from tessera.values.kv_events import KvEvents, WatchKv
from tests.kv_follower import Follower


class Watcher:
    """A gateway that watches, as far as the session; every message goes over the wire."""

    def __init__(self, table: Table) -> None:
        self.table, self.session = table, table.gateway().session
        self.cached = CachedBlocks()
        self.follower = Follower()
        self.num_begun = 0
        self._is_whole = False
        self.say(True)

    def say(self, is_on: bool) -> None:
        message = request_from_proto(request_to_proto(WatchKv(is_on)))
        assert isinstance(message, WatchKv)
        self.table.leader.heard(self.session, message)

    def read(self) -> None:
        """Everything there is to read."""
        while self.read_one():
            pass

    def read_one(self) -> bool:
        """One message, if there is one."""
        source = self.session.kv_events
        events = source.take() if source is not None else None
        if events is None:
            return False
        _, told = response_from_proto(response_to_proto(self.table.leader.epoch, events))
        assert isinstance(told, KvEvents)
        if told.begins:
            self.num_begun += 1
            self.cached, self.follower, self._is_whole = CachedBlocks(), Follower(), False
        for change in told.changes:
            if self._is_whole:
                self.follower.follow(self.cached.apply(change))
            else:
                self.cached.fill(change)
        if not self._is_whole and not told.more:
            self._is_whole = True
            self.cached.filled()
            self.follower.follow(self.cached.whole())
        return True


def findable(leader: Leader) -> set[tuple[bytes, ...]]:
    """Every prefix that a prompt without a salt would find on some worker, by the entries themselves."""
    found: set[tuple[bytes, ...]] = set()
    for replica in leader.scheduler.attached:
        entries = {entry.digest: entry for entry in replica.manager.published()}
        root = namespace_link(kv_namespace(replica.description))
        for entry in entries.values():
            prefix = [entry]
            while prefix[0].parent is not None:
                prefix.insert(0, entries[prefix[0].parent])
            if prefix[0].namespace == root:
                found.add(tuple(np.array(item.token_ids, np.int32).tobytes() for item in prefix))
    return found


def assert_told(watcher: Watcher) -> None:
    watcher.read()
    assert watcher.follower.prefixes == findable(watcher.table.leader)
    assert len(watcher.cached) == len(watcher.follower.prefixes)


def run(table: Table, number: int, prompt: list[int], salt: str = "", max_tokens: int = 6) -> None:
    gateway = table.gateway()
    gateway.submit(replace(submission(number, prompt, max_tokens), cache_salt=salt))
    table.run()


def test_a_watcher_is_told_of_the_whole_then_of_what_changes() -> None:
    table = Table(FakeWorker(num_blocks=16, block_size=4))
    run(table, 1, list(range(10, 22)))
    watcher = Watcher(table)
    assert_told(watcher)
    assert watcher.num_begun == 1 and len(watcher.follower.prefixes) >= 3
    run(table, 2, [*range(10, 18), *range(30, 40)])
    assert_told(watcher)
    table.leader.scheduler.admin.reset_prefix_cache()
    table.leader.tick()
    assert_told(watcher)
    assert watcher.num_begun == 1 and not watcher.follower.prefixes


def test_nothing_is_told_of_a_tenants_prompts() -> None:
    table = Table(FakeWorker(num_blocks=16, block_size=4))
    run(table, 1, list(range(10, 22)), salt="anna")
    watcher = Watcher(table)
    run(table, 2, list(range(10, 22)), salt="bert")
    assert_told(watcher)
    assert not watcher.follower.prefixes
    run(table, 3, list(range(10, 22)))
    assert_told(watcher)
    assert len(watcher.follower.prefixes) >= 3


def test_nobody_is_told_who_does_not_watch() -> None:
    table = Table(FakeWorker(num_blocks=16, block_size=4))
    watcher = Watcher(table)
    other = table.gateway()
    watcher.say(False)
    run(table, 1, list(range(10, 22)))
    assert watcher.session.kv_events is None and other.session.kv_events is None
    watcher.say(True)
    assert_told(watcher)
    table.leader.session_closed(watcher.session)
    run(table, 2, list(range(30, 42)))
    assert watcher.session.kv_events is None


def test_one_who_does_not_read_is_told_of_the_whole_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_watch, "PENDING_BLOCKS_MAX", 15)
    table = Table(FakeWorker(num_blocks=16, block_size=4))
    watcher, reader = Watcher(table), Watcher(table)
    for number in range(1, 6):
        run(table, number, list(range(10 + number, 22 + number)))
        assert_told(reader)
    assert_told(watcher)
    assert (watcher.num_begun, reader.num_begun) == (1, 1), "it had not begun to read"
    for number in range(6, 11):
        run(table, number, list(range(10 + number, 22 + number)))
        assert_told(reader)
    assert_told(watcher)
    assert (watcher.num_begun, reader.num_begun) == (2, 1)


def test_what_a_lost_worker_had_is_found_again_when_it_is_back() -> None:
    table = Table(FakeWorker(num_blocks=16, block_size=4))
    watcher = Watcher(table)
    run(table, 1, list(range(10, 22)))
    assert_told(watcher)
    before = watcher.follower.prefixes
    table.leader.worker_detached(WORKER)
    assert_told(watcher)
    assert before and not watcher.follower.prefixes
    table.leader.worker_attached(WORKER, table.worker.attach(table.leader.epoch, 2), table.outbox.append)
    assert_told(watcher)
    assert watcher.follower.prefixes == before
    table.leader.worker_detached(WORKER)
    table.worker.restart()
    table.leader.worker_attached(WORKER, table.worker.attach(table.leader.epoch, 3), table.outbox.append)
    run(table, 2, list(range(30, 42)))
    assert_told(watcher)
    assert before.isdisjoint(watcher.follower.prefixes) and watcher.num_begun == 1


def test_the_next_leader_tells_of_the_whole_that_workers_hold() -> None:
    table = Table(FakeWorker(num_blocks=16, block_size=4))
    watcher = Watcher(table)
    run(table, 1, list(range(10, 22)))
    assert_told(watcher)
    later = Watcher(Table(table.worker, table.store, term=2))
    assert_told(later)
    assert later.follower.prefixes == watcher.follower.prefixes and later.num_begun == 1


@pytest.mark.parametrize("seed", range(12))
def test_random_lives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that is too small for all, tenants, resets, lost workers, watchers that read now and then, parts of a few blocks."""
    rng = random.Random(seed)
    monkeypatch.setattr(kv_watch, "PART_BLOCKS", rng.randint(1, 5))
    monkeypatch.setattr(kv_watch, "PENDING_BLOCKS_MAX", rng.randint(4, 60))
    table = Table(FakeWorker(num_blocks=14, block_size=4))
    watchers: list[Watcher] = []
    nonce = 1
    for number in range(1, 120):
        match rng.choices(("ask", "step", "watch", "read", "part", "reset", "lose"), (8, 8, 1, 3, 3, 0.3, 0.5))[0]:
            case "ask":
                prompt = [10 + (index * rng.randint(1, 2)) % 20 for index in range(rng.randint(1, 22))]
                request = replace(submission(number, prompt, rng.randint(1, 8)), cache_salt=rng.choice(("", "", "anna")))
                table.gateway().submit(request)
            case "step":
                table.run(rng.randint(1, 4))
            case "watch":
                watchers.append(Watcher(table))
            case "read":
                for watcher in watchers:
                    assert_told(watcher)
            case "part" if watchers:
                rng.choice(watchers).read_one()
            case "reset":
                table.leader.scheduler.admin.reset_prefix_cache()
                table.leader.tick()
            case "lose":
                nonce += 1
                table.outbox.clear()
                table.leader.worker_detached(WORKER)
                if rng.random() < 0.5:
                    table.worker.restart()
                table.leader.worker_attached(WORKER, table.worker.attach(table.leader.epoch, nonce), table.outbox.append)
    table.run()
    for watcher in watchers:
        assert_told(watcher)
