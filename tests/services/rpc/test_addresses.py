"""Targets and the addresses that they stand for."""

import asyncio
import socket

import pytest

from services.rpc.addresses import addresses, check_targets
from tessera.values.config import ConfigError


@pytest.mark.parametrize("targets", [["a:1"], ["a:1", "b:1"], ["unix:/tmp/..x"], ["dns:///workers.ns:50053", "[::1]:7"]])
def test_targets_that_can_be_reached(targets):
    check_targets("worker", targets)


UNREACHABLE = [[], ["a"], ["a:0"], [":5"], ["dns:///name"], ["a:1", "a:1"], ["a:99999"]]
NOT_A_NAME = [["dns:///a..b:1"], ["dns:///" + "a" * 64 + ":1"]]


@pytest.mark.parametrize("targets", UNREACHABLE + NOT_A_NAME)
def test_other_targets_are_refused_by_the_fields_name(targets):
    with pytest.raises(ConfigError, match="worker"):
        check_targets("worker", targets)


def test_fixed_addresses_come_once(run_async):
    async def all_of_them():
        return [present async for present in addresses(["a:1", "b:2"])]

    assert run_async(all_of_them()) == [frozenset({"a:1", "b:2"})]


def test_a_name_is_looked_up_again_and_keeps_its_addresses_while_it_cannot_be(run_async, monkeypatch):
    answers = [["10.0.0.1"], ["10.0.0.1"], OSError("no name server"), ["10.0.0.2", "10.0.0.1"]]

    async def look_up(host, port, **_):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer]

    async def first_two():
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        seen = addresses(["dns:///workers:7", "fixed:1"], refresh_s=0.0)
        return [await anext(seen), await anext(seen)]

    assert run_async(first_two()) == [
        frozenset({"fixed:1", "10.0.0.1:7"}),
        frozenset({"fixed:1", "10.0.0.1:7", "10.0.0.2:7"}),
    ]
    assert not answers
