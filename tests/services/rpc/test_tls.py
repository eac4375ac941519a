"""TLS between real servers and channels: who is let in, and certificates that change while both run."""

import asyncio
import json
import os
from contextlib import asynccontextmanager

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.rpc import channel
from services.rpc.access_config import AccessConfig
from services.rpc.caller import current_principal
from services.rpc.server import RpcServer, ServerConfig
from services.rpc.tls import TlsFiles
from services.rpc.tokens import Role
from tessera.v1 import inference_pb2, inference_pb2_grpc
from tessera.values.config import ConfigError

NAME = "tessera.v1.InferenceService"
PEER = "parts.tessera"


class House:
    """Files of one process: certificate, key, CA."""

    def __init__(self, folder, authority, name=PEER):
        folder.mkdir()
        self.folder = folder
        self.cert, self.key, self.ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        self.issue(authority, name)

    def issue(self, authority, name=PEER):
        """New files in place of the old ones, each whole."""
        leaf = authority.issue_cert(name)
        pairs = ((self.key, leaf.private_key_pem.bytes()), (self.cert, leaf.cert_chain_pems[0].bytes()))
        for file, content in (*pairs, (self.ca, authority.cert_pem.bytes())):
            fresh = self.folder / "fresh"
            fresh.write_bytes(content)
            os.replace(fresh, file)

    def access(self, **more):
        return AccessConfig(tls_cert=self.cert, tls_key=self.key, tls_ca=self.ca, **{"tls_peer_name": PEER, **more})


class Answering(inference_pb2_grpc.InferenceServiceServicer):
    async def GetModel(self, request, context):
        return inference_pb2.GetModelResponse()


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture(autouse=True)
def _no_identity_stays():
    yield
    channel._identity = None


@asynccontextmanager
async def serving(access, **config):
    server = RpcServer(ServerConfig(listen="127.0.0.1:0", access=access, **config))
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Answering(), NAME)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def ask(address):
    """The status of one call on a new channel."""
    async with channel.open_channel(address) as opened:
        return await ask_on(opened)


async def ask_on(opened):
    try:
        await inference_pb2_grpc.InferenceServiceStub(opened).GetModel(inference_pb2.GetModelRequest(), timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_processes_of_one_authority_and_name_reach_each_other_and_nobody_else_does(tmp_path, authority):
    server = House(tmp_path / "server", authority)
    ours, stranger = House(tmp_path / "ours", authority), House(tmp_path / "stranger", trustme.CA())
    stranger.ca.write_bytes(authority.cert_pem.bytes())  # it trusts the server, and is not trusted
    client = House(tmp_path / "client", authority, "client.example")

    async def scenario():
        async with serving(server.access()) as address:
            found = []
            for house in (ours, client, stranger):
                channel.use_identity(house.access())
                found.append(await ask(address))
            channel.use_identity(AccessConfig())
            return [*found, await ask(address)]

    ok, denied, *unheard = asyncio.run(scenario())
    assert (ok, denied) == (grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED)
    assert unheard == [grpc.StatusCode.UNAVAILABLE] * 2


def test_a_server_without_the_peer_s_name_is_not_talked_to(tmp_path, authority):
    server, ours = House(tmp_path / "server", authority, "other.example"), House(tmp_path / "ours", authority)

    async def scenario():
        async with serving(server.access()) as address:
            channel.use_identity(ours.access())
            return await ask(address)

    assert asyncio.run(scenario()) is grpc.StatusCode.UNAVAILABLE


def test_both_ends_go_over_to_new_certificates_of_a_new_authority_while_they_run(tmp_path, authority):
    server, ours = House(tmp_path / "server", authority), House(tmp_path / "ours", authority)

    async def scenario():
        async with serving(server.access()) as address:
            channel.use_identity(ours.access())
            stamp = channel.channel_stamp()
            async with channel.open_channel(address) as old:
                assert await channel.is_connected(old, stamp)
                second = trustme.CA()
                server.issue(second)
                on_the_old_connection = await ask_on(old)
                with_old_files = await ask(address)
                async with channel.open_channel(address) as waiting:
                    connecting = asyncio.create_task(channel.is_connected(waiting, stamp))
                    await asyncio.sleep(0.1)
                    ours.issue(second)
                    told_to_reopen = not await connecting
                return on_the_old_connection, with_old_files, told_to_reopen, await ask(address)

    old, refused, told, new = asyncio.run(scenario())
    assert old is new is grpc.StatusCode.OK
    assert refused is grpc.StatusCode.UNAVAILABLE and told


def test_files_that_cannot_be_used_change_nothing_on_either_side(tmp_path, authority):
    server, ours = House(tmp_path / "server", authority), House(tmp_path / "ours", authority)

    async def scenario():
        async with serving(server.access()) as address:
            channel.use_identity(ours.access())
            for house in (server, ours):
                house.cert.write_text("half a")
            return await ask(address)

    assert asyncio.run(scenario()) is grpc.StatusCode.OK


def test_probes_reach_health_in_plain_text_and_nothing_else_there(tmp_path, authority):
    house = House(tmp_path / "server", authority)
    ready = tmp_path / "ready.json"

    async def scenario():
        async with serving(house.access(health_listen="127.0.0.1:0"), ready_file=ready):
            address = json.loads(ready.read_text())["health_address"]
            async with grpc.aio.insecure_channel(address) as probe:
                answer = await health_pb2_grpc.HealthStub(probe).Check(health_pb2.HealthCheckRequest(service=NAME))
                return answer.status, await ask_on(probe)

    status, code = asyncio.run(scenario())
    assert status == health_pb2.HealthCheckResponse.SERVING
    assert code is grpc.StatusCode.UNIMPLEMENTED


def test_a_gateway_s_clients_are_proven_by_their_own_authority(tmp_path, authority):
    clients = trustme.CA()
    house, client = House(tmp_path / "server", authority), House(tmp_path / "client", clients, "team-a.example")
    client.ca.write_bytes(authority.cert_pem.bytes())
    ca = tmp_path / "clients.pem"
    ca.write_bytes(clients.cert_pem.bytes())

    async def scenario():
        server = RpcServer(ServerConfig("127.0.0.1:0", access=house.access(), is_public=True, client_ca=ca))
        principals = []

        class Asking(inference_pb2_grpc.InferenceServiceServicer):
            async def GetModel(self, request, context):
                principals.append(current_principal())
                return inference_pb2.GetModelResponse()

        server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Asking(), NAME, role=Role.PUBLIC)
        address = await server.start()
        channel.use_identity(client.access())
        by_client = await ask(address)
        channel.use_identity(house.access())  # the system's own authority signs no clients
        by_system = await ask(address)
        await server.stop(0)
        return by_client, by_system, principals

    assert asyncio.run(scenario()) == (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, ["team-a.example"])


def test_a_token_takes_the_place_of_a_certificate_and_is_read_at_every_call(tmp_path, authority):
    house, tokens, own = House(tmp_path / "server", authority), tmp_path / "tokens", tmp_path / "own"
    tokens.write_text("part-part-part-part gateway internal\nnext-next-next-next gateway internal\n")

    async def scenario():
        async with serving(house.access(tokens=tokens)) as address:
            own.write_text("part-part-part-part\n")
            channel.use_identity(AccessConfig(tls_ca=house.ca, tls_peer_name=PEER), own)
            async with channel.open_channel(address) as opened:
                found = []
                for token in ("part-part-part-part", "gone-gone-gone-gone", "next-next-next-next"):
                    own.write_text(token)
                    found.append((await ask_on(opened)).name)
            return found

    assert asyncio.run(scenario()) == ["OK", "UNAUTHENTICATED", "OK"]


def test_what_is_wrong_with_files_is_said_at_the_start(tmp_path, authority):
    first, second = House(tmp_path / "first", authority), House(tmp_path / "second", authority)
    for files, word in (
        (TlsFiles(first.cert, second.key, first.ca), "tls_key"),
        (TlsFiles(first.cert, first.key, first.key), "tls_ca"),
        (TlsFiles(tmp_path / "none", first.key, None), "No such file"),
    ):
        with pytest.raises(ConfigError, match=word):
            files.read()
    for wrong in (
        lambda: AccessConfig(tls_cert=first.cert),
        lambda: AccessConfig(tls_peer_name=PEER),
        lambda: ServerConfig("127.0.0.1:0", access=AccessConfig(tls_ca=first.ca)),
        lambda: ServerConfig("127.0.0.1:0", is_public=True, client_ca=first.ca),
        lambda: channel.use_identity(AccessConfig(), tmp_path / "token"),
        lambda: channel.use_identity(first.access(), tmp_path / "token"),
    ):
        with pytest.raises(ConfigError):
            wrong()
