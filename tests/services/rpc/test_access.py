"""Tokens and roles: who may call what, and a file of tokens that changes while a server runs."""

import asyncio
import contextlib
import hashlib
import os
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from services.rpc.access_config import AccessConfig
from services.rpc.caller import current_principal
from services.rpc.channel import open_channel
from services.rpc.server import RpcServer, ServerConfig
from services.rpc.tokens import Role, TokenFile
from tessera.scheduler.v1 import session_pb2_grpc
from tessera.v1 import inference_pb2, inference_pb2_grpc
from tessera.values.config import ConfigError

CLIENT, OPERATOR, PART = "client-client-client", "operator-operator", "part-part-part-part"
LINES = f"""
# who may what
{CLIENT} team-a public          # a client
sha256:{hashlib.sha256(OPERATOR.encode()).hexdigest()} ops public,admin
{PART} gateway internal
"""


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Says who calls, in a place for a name."""

    async def GetModel(self, request, context):
        return inference_pb2.GetModelResponse(model=inference_pb2.Model(name=await asyncio.to_thread(current_principal)))

    async def StreamGenerate(self, request, context):
        yield inference_pb2.StreamGenerateResponse(text=current_principal())


class Sessions(session_pb2_grpc.SchedulerServiceServicer):
    async def Session(self, requests, context):
        return
        yield


@pytest.fixture
def tokens(tmp_path):
    file = tmp_path / "tokens"
    file.write_text(LINES)
    return file


@asynccontextmanager
async def stubs(**access):
    server = RpcServer(ServerConfig("127.0.0.1:0", access=AccessConfig(**access)))
    server.add(
        inference_pb2_grpc.add_InferenceServiceServicer_to_server, Inference(), "tessera.v1.InferenceService", role=Role.PUBLIC
    )
    server.add(session_pb2_grpc.add_SchedulerServiceServicer_to_server, Sessions(), "tessera.scheduler.v1.SchedulerService")
    address = await server.start()
    async with open_channel(address) as channel:
        yield channel
    await server.stop(0)


def metadata(token):
    return (("authorization", f"Bearer {token}"),) if token else ()


async def status(call):
    """The code of `call`, whose messages are read: it has none before."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
    return await call.code()


def run(scenario, **access):
    async def main():
        async with stubs(**access) as channel:
            return await scenario(channel)

    return asyncio.run(main())


def test_each_service_is_open_to_its_role_alone(tokens):
    async def scenario(channel):
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        sessions = session_pb2_grpc.SchedulerServiceStub(channel)
        found = {}
        for token in ("", "unknown-unknown-unknown", CLIENT, OPERATOR, PART):
            calls = (
                inference.GetModel(inference_pb2.GetModelRequest(), metadata=metadata(token)),
                inference.StreamGenerate(inference_pb2.StreamGenerateRequest(), metadata=metadata(token)),
                sessions.Session(iter(()), metadata=metadata(token)),
            )
            found[token] = [(await status(call)).name for call in calls]
        return found

    nobody, denied = ["UNAUTHENTICATED"] * 3, "PERMISSION_DENIED"
    assert run(scenario, tokens=tokens) == {
        "": nobody,
        "unknown-unknown-unknown": nobody,
        CLIENT: ["OK", "OK", denied],
        OPERATOR: ["OK", "OK", denied],
        PART: [denied, denied, "OK"],
    }


def test_a_handler_knows_whose_call_it_is_and_calls_do_not_mix(tokens):
    async def scenario(channel):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        asked = [stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata(token)) for token in (CLIENT, OPERATOR) * 10]
        pieces = [
            item.text async for item in stub.StreamGenerate(inference_pb2.StreamGenerateRequest(), metadata=metadata(CLIENT))
        ]
        return [(await call).model.name for call in asked], pieces

    assert run(scenario, tokens=tokens) == (["team-a", "ops"] * 10, ["team-a"])


def test_health_is_always_open_and_reflection_by_setting(tokens):
    async def scenario(channel):
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        asked = iter((reflection_pb2.ServerReflectionRequest(list_services=""),))
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(asked)
        return health.status, (await status(call)).name

    serving = health_pb2.HealthCheckResponse.SERVING
    assert run(scenario, tokens=tokens) == (serving, "OK")
    assert run(scenario, tokens=tokens, reflection=False) == (serving, "UNIMPLEMENTED")


def test_without_tokens_and_certificates_everybody_is_answered_as_nobody_in_particular():
    async def scenario(channel):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return (await stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata(CLIENT))).model.name

    assert run(scenario) == ""


def replace_file(file, text):
    fresh = file.with_name("fresh")
    fresh.write_text(text)
    os.replace(fresh, file)


def test_a_changed_file_counts_at_once_and_one_that_cannot_be_used_leaves_the_old_tokens(tokens):
    held = TokenFile(tokens)
    assert held.caller_of(CLIENT).principal == "team-a"
    replace_file(tokens, f"{CLIENT} team-b public\n")
    assert held.caller_of(CLIENT).principal == "team-b" and held.caller_of(PART) is None
    replace_file(tokens, "nonsense\n")
    assert held.caller_of(CLIENT).principal == "team-b"
    tokens.unlink()
    assert held.caller_of(CLIENT).principal == "team-b"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("short a public", "16"),
        (f"{CLIENT} a", "3|2 words"),
        (f"{CLIENT} a root", "no role"),
        ("sha256:12 a public", "64"),
        (f"{CLIENT} a public\n{CLIENT} b public", "line 2.*twice"),
        (f"{CLIENT} {'a' * 129} public", "128"),
    ],
)
def test_a_line_that_is_none_is_refused_and_no_token_is_shown(tmp_path, line, why):
    file = tmp_path / "tokens"
    file.write_text(line)
    with pytest.raises(ConfigError, match=why) as refused:
        TokenFile(file)
    assert CLIENT not in str(refused.value)
