"""A private Redis for the contract suite."""

from collections.abc import Iterator

import pytest

from services.scheduler.store.embedded_redis import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One server for the whole suite; every test uses a group of its own."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server
