"""Random input to every public method of a gateway, at both of its ports: which statuses it answers with."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from process_stack import MODEL, Stack, StackOptions
from random_messages import mangled, random_message
from smg_grpc_proto import vllm_engine_pb2

from tessera.client import Client
from tessera.v1 import admin_pb2, admin_pb2_grpc
from tessera.v1 import inference_pb2 as pb

ENGINE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]
SERVICES = (pb.DESCRIPTOR.services_by_name["InferenceService"], ENGINE, ADMIN)
BUGS = ("INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED", "UNAVAILABLE")
"""Statuses that no input may lead to, save that the engine's protocol has methods that are not served."""

ENGINE_TOO = StackOptions(MODEL, f"deterministic:{MODEL}", gateway=["--engine-listen", "127.0.0.1:0"])

CALL_S = 1.0
"""Some input asks for very long answers; nobody waits for them."""

RESUME_S = 60.0
"""Long enough for several takeovers."""

AT_ONCE = 16

PAUSED = "ADMISSION_PAUSED"
"""What new requests are refused with while some input pauses admission."""


async def fuzz(addresses: Sequence[str], count: int, seed: int) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Send `count` inputs to the services at `addresses`, one for each of SERVICES. Returns how many ended how, by (method, status), and what led to one of BUGS: a seed and the input in hex."""
    seen: Counter[tuple[str, str]] = Counter()
    bugs: list[str] = []
    numbers = iter(range(seed, seed + count))

    async def caller(channels: Mapping[str, grpc.aio.Channel]) -> None:
        for number in numbers:
            method, data = one_input(number)
            status = await _call(channels[method.containing_service.full_name], method, data)
            seen[method.name, status] += 1
            if method.name == "PauseAdmission":  # not for long: the others are to get somewhere
                await _resume_admission(channels[ADMIN.full_name])
            if status in BUGS and (status != "UNIMPLEMENTED" or method.containing_service is not ENGINE):
                bugs.append(f"input {number}, {method.name}: {status}: {data.hex()[:2000]}")

    async with AsyncExitStack() as open_channels:
        channels = {
            service.full_name: await open_channels.enter_async_context(grpc.aio.insecure_channel(address))
            for service, address in zip(SERVICES, addresses, strict=True)
        }
        await asyncio.gather(*(caller(channels) for _ in range(AT_ONCE)))
    return seen, bugs


async def _resume_admission(channel: grpc.aio.Channel) -> None:
    """However often a takeover comes between: a machine that is busy enough brings some."""
    stub = admin_pb2_grpc.AdminServiceStub(channel)
    async with asyncio.timeout(RESUME_S):
        while True:
            try:
                await stub.ResumeAdmission(admin_pb2.ResumeAdmissionRequest())
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.2)
            else:
                return


def one_input(number: int) -> tuple[object, bytes]:
    """The method and the bytes that this number stands for."""
    dice = random.Random(number)
    method = dice.choice(dice.choice(SERVICES).methods)
    message = GetMessageClass(method.input_type)()
    is_plausible = dice.random() < 0.5
    if is_plausible:
        _make_plausible(message, dice)
    if not is_plausible or dice.random() < 0.5:
        random_message(message, dice)
    data = message.SerializeToString()
    return method, mangled(data, dice) if dice.random() < 0.2 else data


def _make_plausible(message: Message, dice: random.Random) -> None:
    """What gets far, before some of its fields change."""
    if isinstance(message, pb.GenerateRequest | pb.StreamGenerateRequest):
        message.generation.sampling.max_tokens = dice.choice((1, 3, 20))
        if dice.random() < 0.4:
            message.generation.chat.messages.add(role="user", content="Hello")
        elif dice.random() < 0.5:
            message.generation.text = "Once upon a time"
        else:
            message.generation.tokens.token_ids.extend(dice.randrange(49_152) for _ in range(dice.choice((1, 5, 60))))
    elif isinstance(message, vllm_engine_pb2.GenerateRequest):
        message.request_id = f"fuzz-{dice.randrange(100)}"
        message.stream = dice.random() < 0.5
        message.tokenized.input_ids.extend(dice.randrange(49_152) for _ in range(5))
        message.sampling_params.max_tokens = dice.choice((1, 3, 20))
    elif isinstance(message, admin_pb2.AbortRequestsRequest):
        message.principal = dice.choice(("", "nobody"))
    elif isinstance(message, admin_pb2.ListRequestsRequest):
        message.page_token = dice.choice(("", "1.3", "7.0"))
    elif isinstance(message, pb.TokenizeRequest):
        message.text = "Once upon a time"
    elif isinstance(message, pb.DetokenizeRequest):
        message.token_ids.extend(dice.randrange(49_152) for _ in range(10))


async def _call(channel: grpc.aio.Channel, method: object, data: bytes) -> str:
    """The status of one call."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    parse = GetMessageClass(method.output_type).FromString
    kind = channel.unary_stream if method.server_streaming else channel.unary_unary
    call = kind(path, request_serializer=None, response_deserializer=parse)(data, timeout=CALL_S)
    try:
        async for _ in _answers(call):
            pass
    except grpc.aio.AioRpcError as error:
        return PAUSED if PAUSED in str(error.trailing_metadata()) else error.code().name
    return "OK"


def served_at(stack: Stack) -> tuple[str, ...]:
    """Wait until the system of ENGINE_TOO answers; its addresses, as `fuzz` takes them."""
    with Client(stack.address) as client:
        client.generate("Once upon a time", max_tokens=1)
    return stack.address, json.loads(stack.gateway.ready_file.read_text())["engine_address"], stack.address


async def _answers(call: object) -> AsyncIterator[Message]:
    if isinstance(call, grpc.aio.UnaryStreamCall):
        async for answer in call:
            yield answer
    else:
        yield await call
