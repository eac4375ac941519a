"""Ports for somebody who is about to listen."""

import socket

import pytest

from services import free_ports as module
from services.free_ports import PORTS, free_ports


def test_ports_are_free_unlike_and_none_that_a_connection_takes_by_itself() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50 and all(port in PORTS for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])), socket.create_connection(("127.0.0.1", ports[0])) as connection:
        assert connection.getsockname()[1] not in PORTS


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = free_ports(2)
    monkeypatch.setattr(module, "PORTS", [first, second])
    with socket.create_server(("127.0.0.1", first)):
        assert free_ports(1) == [second]
