"""A gateway process that is stopped, its connections open: who waits there notices. One that is only busy is left alone."""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from scripted_gateways import answer_to, gateways

from tessera.client.request import generation_of

ASKED = {"request_id": "r", "seed": 3, "max_tokens": 40}
IDS = tuple(token_id for token_id, _ in answer_to(generation_of("Hi", ASKED)))

PATIENCE_S = 10.0
"""Where the machine has time for us it takes 1.5 to 2.5 s."""


@asynccontextmanager
async def gateway_process(hold_s=0):
    """Its address and its process."""
    program = Path(__file__).with_name("gateway_process.py")
    process = await asyncio.create_subprocess_exec(sys.executable, str(program), str(hold_s), stdout=asyncio.subprocess.PIPE)
    try:
        while not (line := (await process.stdout.readline()).decode()).startswith("address"):
            assert line, "the gateway process ended"
        yield line.split()[1], process
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("moment", ["in the answer", "before the answer", "before the connection"])
def test_a_stopped_gateway_is_left(run_async, client_kind, moment):
    async def scenario():
        loop = asyncio.get_running_loop()
        async with (
            gateway_process() as (address, process),
            gateways(1) as (second,),
            client_kind([address, second.address]) as client,
        ):
            if moment == "before the answer":
                assert (await client.model()).name == "m"
            if moment != "in the answer":
                os.kill(process.pid, signal.SIGSTOP)
            token_ids, longest_s, last_s = [], 0.0, loop.time()
            async for piece in client.stream("Hi", **ASKED):
                longest_s = max(longest_s, loop.time() - last_s)
                last_s = loop.time()
                token_ids += piece.token_ids
                if moment == "in the answer" and len(token_ids) == 10:
                    os.kill(process.pid, signal.SIGSTOP)
            assert tuple(token_ids) == IDS
            assert second.asked[0].resume.number == 1
            assert longest_s < PATIENCE_S
            began_s = loop.time()
            assert (await client.tokenize("Hi")) == (4, 5), "the client stays where it was answered"
            assert loop.time() - began_s < 1.0

    run_async(scenario())


def test_a_short_call_leaves_a_stopped_gateway(run_async, client_kind):
    async def scenario():
        loop = asyncio.get_running_loop()
        async with (
            gateway_process() as (address, process),
            gateways(1) as (second,),
            client_kind([address, second.address]) as client,
        ):
            assert (await client.model()).name == "m"
            os.kill(process.pid, signal.SIGSTOP)
            began_s = loop.time()
            assert (await client.model()).name == "m"
            assert loop.time() - began_s < PATIENCE_S
            assert second.calls == ["GetModel"]

    run_async(scenario())


def test_a_busy_gateway_is_left_alone(run_async, client_kind):
    """It runs no Python for longer than a stopped one is waited for; gRPC's own threads answer the pings."""

    async def scenario():
        loop = asyncio.get_running_loop()
        async with (
            gateway_process(hold_s=6) as (address, _),
            gateways(1) as (second,),
            client_kind([address, second.address]) as client,
        ):
            began_s = loop.time()
            assert (await client.generate("Hi", **ASKED)).token_ids == IDS
            assert loop.time() - began_s > 6 and not second.asked

    run_async(scenario())
