"""Ports of this machine for somebody who is about to listen."""

import socket
from random import SystemRandom

PORTS = range(20_000, 32_768)
"""Below those that the system gives to whoever asks for any, which each new connection of anybody on this machine may take."""


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody uses now. A stranger could still take one; who is told to listen there then says so at once."""
    found: list[int] = []
    for port in SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    assert len(found) == count, "all ports are in use"
    return found
