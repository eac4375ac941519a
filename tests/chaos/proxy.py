"""The proxy process behind `Links`: forwards TCP connections; obeys one JSON command per line on stdin, ends with stdin.

    {"routes": {"NAME": [LISTEN_PORT, TARGET_PORT], ...}}   {"cut": [NAMES]}   {"heal": [NAMES]}   {"reset": [NAMES]}
    {"delay": [NAMES], "ms": MILLISECONDS}

Each is answered with `done`.
"""

import asyncio
import json
import sys
from collections import deque

HELD_BYTES_MAX = 1 << 20
"""A direction that holds back more stops reading, so that the sender feels it."""


class Link:
    """One listening port, the server behind it, and what is done to the bytes between them."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self.is_cut = False
        self.delay_s = 0.0
        self.ends: set[End] = set()

    def accept(self) -> "End":
        """The protocol of a new client's connection."""
        return End(self, is_client=True)

    def heal(self) -> None:
        """Let everything pass."""
        self.is_cut, self.delay_s = False, 0.0
        for end in list(self.ends):
            end.go_on()

    def cut(self) -> None:
        """Let nothing pass."""
        self.is_cut = True
        for end in list(self.ends):
            end.hold()

    def reset(self) -> None:
        """End every connection without a word."""
        for end in list(self.ends):
            end.abort()


class End(asyncio.Protocol):
    """One of the two connections of a forwarded one. What it reads goes to `peer`, in order, after the delay of its link."""

    def __init__(self, link: Link, is_client: bool) -> None:
        self._link = link
        self._is_client = is_client
        self._transport: asyncio.Transport | None = None
        self._held: deque[tuple[float, bytes]] = deque()  # (when it is due, data) that was read and not passed on
        self._held_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._is_ended = False  # nothing more will be read; what is held still goes out
        self._peer_is_full = False
        self.peer: End | None = None

    # -- what asyncio says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read, where a peer is there to pass it to."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._link.ends.add(self)
        if self._is_client:
            transport.pause_reading()
            if not self._link.is_cut:
                self._connect()

    def data_received(self, data: bytes) -> None:
        """Pass it on, now or later."""
        if not self._held and not self._link.is_cut and not self._link.delay_s and self.peer is not None:
            self.peer.write(data)
            return
        self._held.append((self._now() + self._link.delay_s, data))
        self._held_bytes += len(data)
        self._update_reading()
        self._pass_due()

    def eof_received(self) -> bool:
        """The other side sends no more; what is held still goes out, then both connections end."""
        self._is_ended = True
        self._pass_due()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        """The same, without the wish to hear anything."""
        self._is_ended = True
        self._link.ends.discard(self)
        if not self._link.is_cut:
            self._pass_due()

    def pause_writing(self) -> None:
        """This end is slow: its peer stops reading."""
        if self.peer is not None:
            self.peer.peer_is_full(True)

    def resume_writing(self) -> None:
        """This end is ready again."""
        if self.peer is not None:
            self.peer.peer_is_full(False)

    # -- what the peer and the link say

    def write(self, data: bytes) -> None:
        """Send `data` out of this end."""
        if self._transport is not None:
            self._transport.write(data)

    def finish(self) -> None:
        """Close after what is written."""
        if self._transport is not None:
            self._transport.close()

    def peer_is_full(self, is_full: bool) -> None:
        """Whether the peer can take more."""
        self._peer_is_full = is_full
        self._update_reading()

    def hold(self) -> None:
        """The link was cut."""
        self._update_reading()

    def go_on(self) -> None:
        """The link was healed: connect where that was not done yet, and pass everything on."""
        self._held = deque((0.0, data) for _, data in self._held)
        if self._is_client and self.peer is None:
            self._connect()
        self._update_reading()
        self._pass_due()

    def abort(self) -> None:
        """Reset the connection."""
        self._held.clear()
        if self._transport is not None:
            self._transport.abort()

    # -- inside

    def _connect(self) -> None:
        self._connecting = asyncio.get_running_loop().create_task(self._connect_out())

    async def _connect_out(self) -> None:
        other = End(self._link, is_client=False)
        try:
            await asyncio.get_running_loop().create_connection(lambda: other, "127.0.0.1", self._link.target_port)
        except OSError:
            self.abort()
            return
        self.peer, other.peer = other, self
        if self._is_ended or self._transport is None or self._transport.is_closing():
            other.abort()
            return
        self._update_reading()
        other._update_reading()
        self._pass_due()

    def _update_reading(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        is_reading = not (
            self._link.is_cut or self.peer is None or self._peer_is_full or self._held_bytes > HELD_BYTES_MAX or self._is_ended
        )
        if is_reading:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _pass_due(self) -> None:
        if self._link.is_cut or self.peer is None:
            return
        now = self._now()
        while self._held and self._held[0][0] <= now:
            _, data = self._held.popleft()
            self._held_bytes -= len(data)
            self.peer.write(data)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            self._timer = asyncio.get_running_loop().call_at(self._held[0][0], self._pass_due)
        elif self._is_ended:
            self.peer.finish()
            self.finish()
        self._update_reading()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class Proxy:
    """All links of one process."""

    def __init__(self) -> None:
        self._links: dict[str, Link] = {}

    async def obey(self, command: dict) -> None:
        """Do what one line asks for."""
        match command:
            case {"routes": routes}:
                for name, (listen_port, target_port) in routes.items():
                    self._links[name] = link = Link(target_port)
                    await asyncio.get_running_loop().create_server(link.accept, "127.0.0.1", listen_port)
            case {"cut": names}:
                for name in names:
                    self._links[name].cut()
            case {"heal": names}:
                for name in names:
                    self._links[name].heal()
            case {"reset": names}:
                for name in names:
                    self._links[name].reset()
            case {"delay": names, "ms": delay_ms}:
                for name in names:
                    self._links[name].delay_s = delay_ms / 1000
            case _:
                raise ValueError(f"unknown command {command}")


async def serve() -> None:
    """Obey until stdin ends."""
    proxy = Proxy()
    commands = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        await proxy.obey(json.loads(line))
        print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(serve())
