"""The embedded Redis as a part of the system beside the children."""

import asyncio

from services.cli.child import PartDied
from services.scheduler.store.embedded_redis import EmbeddedRedis, EmbeddedRedisError

_POLL_S = 0.2


class RedisPart:
    """Starts, watches and ends an EmbeddedRedis. Use it from the event loop of the main thread: Redis ends with that thread."""

    name = "redis"

    def __init__(self, server: EmbeddedRedis) -> None:
        self._server = server

    async def spawn(self) -> None:
        """Start the server and wait until it answers, which takes about a tenth of a second. Raises PartDied."""
        self._server.stop()  # forgets one that ended by itself
        try:
            self._server.start()
        except EmbeddedRedisError as error:
            raise PartDied(f"redis: {error}") from error

    async def ready(self) -> str:
        """Its URL; a spawned server answers already."""
        return self._server.url

    async def ended(self) -> PartDied:
        """Wait for the end of the server; what to say about it."""
        while self._running():  # noqa: ASYNC110 - it is no child of the event loop, so nothing wakes us
            await asyncio.sleep(_POLL_S)
        return PartDied(f"redis ended with status {self._server.poll()}")

    async def stop(self, grace_s: float) -> None:
        """Let it sync its file and end; kill it after `grace_s` seconds."""
        self._server.stop(grace_s)

    def kill(self) -> None:
        """SIGKILL, now; a no-op without a running server."""
        if self._running():
            self._server.kill()

    def _running(self) -> bool:
        return self._server.pid is not None and self._server.poll() is None
