"""`tessera health` against a real server: the exit statuses that probes read."""

import asyncio
from contextlib import asynccontextmanager

import pytest
import trustme
from click.testing import CliRunner

from services.cli.main import main
from services.rpc.access_config import AccessConfig
from services.rpc.server import RpcServer, ServerConfig
from tessera.v1 import inference_pb2_grpc

NAME = "tessera.v1.InferenceService"


@asynccontextmanager
async def serving(access=AccessConfig()):  # noqa: B008 - frozen
    server = RpcServer(ServerConfig("127.0.0.1:0", access=access))
    server.add(
        inference_pb2_grpc.add_InferenceServiceServicer_to_server,
        inference_pb2_grpc.InferenceServiceServicer(),
        NAME,
        ready=False,
    )
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.stop(0)


async def health(*arguments, env=None):
    """Outside the loop that the server is on."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, ["health", *arguments], env=env))


def test_the_exit_status_says_how_a_process_and_its_service_are(run_async):
    async def scenario():
        async with serving() as (server, address):
            alive = await health(address)
            idle = await health(address, "--service", NAME)
            server.health.set_ready(NAME, True)
            busy = await health(address, "--service", NAME)
            unknown = await health(address, "--service", "some.other.Service")
            server.health.drain()
            draining = await health(address)
        assert [one.exit_code for one in (alive, idle, busy, unknown, draining)] == [0, 1, 0, 2, 1]
        assert alive.output == "SERVING\n" and idle.output == "NOT_SERVING\n"
        assert "some.other.Service" in unknown.output

    run_async(scenario())


def test_of_several_addresses_the_first_that_answers_counts(run_async):
    async def scenario():
        async with serving() as (_, gone):
            pass
        async with serving() as (server, address):
            alive = await health(f"{gone},{address}")
            server.health.drain()
            return alive, await health(f"{gone},{address}"), await health(gone)

    assert [one.exit_code for one in run_async(scenario())] == [0, 1, 3]


def test_the_address_may_come_from_the_environment(run_async):
    async def scenario():
        async with serving() as (_, address):
            return await health(env={"TESSERA_HEALTH_ADDRESS": address})

    assert run_async(scenario()).exit_code == 0


def test_where_nobody_answers_it_says_so_in_time(run_async):
    async def scenario():
        async with serving() as (_, address):
            pass
        return await health(address, "--timeout-s", "0.5")

    result = run_async(scenario())
    assert result.exit_code == 3 and "Traceback" not in result.output and result.output.startswith("Error: 127.0.0.1:")


@pytest.mark.parametrize("where", ["tls", "health_listen"])
def test_a_process_with_certificates_is_asked_with_one_or_at_its_port_for_probes(where, tmp_path, run_async):
    authority = trustme.CA()
    leaf = authority.issue_cert("parts.tessera")
    cert, key, ca = tmp_path / "cert", tmp_path / "key", tmp_path / "ca"
    leaf.cert_chain_pems[0].write_to_path(cert)
    leaf.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    own = ["--tls-ca", str(ca), "--tls-cert", str(cert), "--tls-key", str(key), "--tls-name", "parts.tessera"]
    access = AccessConfig(tls_cert=cert, tls_key=key, tls_ca=ca, health_listen="127.0.0.1:0")

    async def scenario():
        async with serving(access) as (server, address):
            plain = await health(address, "--timeout-s", "0.5")
            known = await health(*((address, *own) if where == "tls" else (server._health_address,)))
            return plain, known

    plain, known = run_async(scenario())
    assert (plain.exit_code, known.exit_code) == (3, 0), known.output
