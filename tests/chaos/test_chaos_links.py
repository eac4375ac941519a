"""The proxy does to connections what a scenario says: before it can be believed about ours."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.chaos.links import Links, Route
from tests.system.role_process import free_ports


@pytest.fixture
def echo_port() -> Iterator[int]:
    """A server that answers every byte with itself."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=answer, args=(connection,), daemon=True).start()

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(65536):
                    connection.sendall(data)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def links(echo_port: int) -> Iterator[tuple[Links, int]]:
    (port,) = free_ports(1)
    with Links({"echo": Route(port, echo_port)}) as opened:
        yield opened, port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        data += connection.recv(count - len(data))
    return data


def test_bytes_pass_in_order(links: tuple[Links, int]) -> None:
    with connect(links[1]) as connection:
        sent = bytes(range(256)) * 20_000
        threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
        assert receive(connection, len(sent)) == sent


def test_a_cut_holds_everything_until_it_is_healed(links: tuple[Links, int]) -> None:
    proxy, port = links
    with connect(port) as old:
        old.sendall(b"a")
        assert receive(old, 1) == b"a"
        proxy.cut("echo")
        old.sendall(b"b")
        with connect(port) as new:
            new.sendall(b"c")
            for connection in (old, new):
                connection.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    connection.recv(1)
                connection.settimeout(10)
            proxy.heal("echo")
            assert (receive(old, 1), receive(new, 1)) == (b"b", b"c")


def test_the_end_of_a_connection_is_not_seen_through_a_cut(links: tuple[Links, int], echo_port: int) -> None:
    proxy, port = links
    with connect(port) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
        proxy.cut("echo")
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10)
        proxy.heal("echo")
        assert connection.recv(1) == b""


def test_a_reset_ends_connections_and_takes_new_ones(links: tuple[Links, int]) -> None:
    proxy, port = links
    with connect(port) as connection:
        connection.sendall(b"a")
        assert receive(connection, 1) == b"a"
        proxy.reset("echo")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    with connect(port) as again:
        again.sendall(b"b")
        assert receive(again, 1) == b"b"


def test_a_delay_keeps_the_order(links: tuple[Links, int]) -> None:
    proxy, port = links
    with connect(port) as connection:
        proxy.delay(100, "echo")
        began = time.monotonic()
        for number in range(20):
            connection.sendall(bytes([number]))
        assert receive(connection, 20) == bytes(range(20))
        assert time.monotonic() - began >= 0.2
        proxy.heal("echo")


def test_nobody_behind_a_link_is_a_closed_connection() -> None:
    port, target = free_ports(2)
    with Links({"none": Route(port, target)}), connect(port) as connection, contextlib.suppress(ConnectionResetError):
        assert connection.recv(1) == b""
