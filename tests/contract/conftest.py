"""The adapters that the contract suites run, and what can be done to their stores."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from store_rig import MemoryRig, RedisRig, StoreRig

from services.scheduler.store.embedded_redis import EmbeddedRedis
from services.scheduler.store.memory import MemoryStore
from services.scheduler.store.port import Store
from services.scheduler.store.redis_store import RedisStore

_groups = itertools.count()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One server for the whole suite; every test uses a group of its own."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def rig(request: pytest.FixtureRequest, run_async: Callable[..., Any]) -> Iterator[StoreRig]:
    """A store nobody has used."""
    if request.param == "memory":
        yield MemoryRig(MemoryStore())
        return
    server: EmbeddedRedis = request.getfixturevalue("redis_server")
    redis_rig = RedisRig(RedisStore(server.url, f"contract-{next(_groups)}"))
    yield redis_rig
    run_async(redis_rig.set_full(False))
    run_async(redis_rig.store.close())


@pytest.fixture
def store(rig: StoreRig) -> Store:
    """The store of `rig`, for tests that only call it."""
    return rig.store
