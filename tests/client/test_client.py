"""Both clients against a scripted service: the same calls, the same values, the same errors."""

import asyncio
import inspect
import subprocess
import sys
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf import json_format

from services.rpc import errors as service_errors
from services.rpc.server import RpcServer, ServerConfig
from tessera import client as tessera_client
from tessera.client import (
    Answer,
    AsyncClient,
    ChatMessage,
    Client,
    Finish,
    FinishReason,
    Model,
    Piece,
    Timings,
    ToolCall,
    Usage,
)
from tessera.client.convert import answers_from_proto
from tessera.client.request import generation_of, several_of
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc

FINISH_MESSAGE = pb.Finish(
    reason=pb.FINISH_REASON_STOP,
    stop_string="END",
    usage=pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
    timings=pb.Timings(queue_us=1, ttft_us=2, tpot_us=3, total_us=4, num_preemptions=5),
)
FINISH = Finish(FinishReason.STOP, None, "END", Usage(3, 2, 1), Timings(1, 2, 3, 4, 5), "")
MODEL_MESSAGE = pb.Model(name="m", architecture="A", vocab_size=9, max_model_len=8, eos_token_ids=[2], max_request_len=7)
MODEL = Model("m", "A", 9, 8, (2,), None, 7)


class Scripted(inference_pb2_grpc.InferenceServiceServicer):
    """Remembers every request; answers with what is above, or fails with `error`."""

    def __init__(self):
        self.requests = []
        self.error = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.left = asyncio.Event()

    async def _take(self, request):
        self.requests.append(request)
        if self.error is not None:
            raise self.error

    async def StreamGenerate(self, request, context):
        self.requests.append(request)
        request_id = request.generation.request_id
        try:
            await context.write(pb.StreamGenerateResponse(request_id=request_id, text="a", token_ids=[1]))
            await self.hold.wait()
            if self.error is not None:
                raise self.error
            await context.write(
                pb.StreamGenerateResponse(
                    request_id=request_id, text="b", text_offset=1, token_ids=[2], token_offset=1, finish=FINISH_MESSAGE
                )
            )
        finally:
            self.left.set()

    async def Abort(self, request, context):
        await self._take(request)
        return pb.AbortResponse()

    async def Tokenize(self, request, context):
        await self._take(request)
        return pb.TokenizeResponse(token_ids=[4, 5])

    async def Detokenize(self, request, context):
        await self._take(request)
        return pb.DetokenizeResponse(text="text")

    async def GetModel(self, request, context):
        await self._take(request)
        return pb.GetModelResponse(model=MODEL_MESSAGE)

    async def ListModels(self, request, context):
        await self._take(request)
        return pb.ListModelsResponse(models=[MODEL_MESSAGE])


@pytest.fixture
def connected(client_kind):
    @asynccontextmanager
    async def connect():
        servicer = Scripted()
        server = RpcServer(ServerConfig("127.0.0.1:0"))
        server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer, "tessera.v1.InferenceService")
        address = await server.start()
        try:
            async with client_kind(address, resume_timeout_s=0) as client:
                yield client, servicer
        finally:
            await server.stop(0)

    return connect


def test_every_call_gives_its_value(run_async, connected):
    async def scenario():
        async with connected() as (client, servicer):
            assert await client.generate("Hi", request_id="r") == Answer("r", "ab", (1, 2), FINISH)
            pieces = [piece async for piece in client.stream("Hi", request_id="r")]
            assert pieces == [Piece("r", "a", 0, (1,), 0, None), Piece("r", "b", 1, (2,), 1, FINISH)]
            await client.abort("r")
            assert servicer.requests[-1] == pb.AbortRequest(request_id="r")
            assert await client.tokenize("Hi", model="m", add_special_tokens=False) == (4, 5)
            assert servicer.requests[-1] == pb.TokenizeRequest(model="m", text="Hi", add_special_tokens=False)
            assert await client.tokenize([ChatMessage("user", "Hi")]) == (4, 5)
            assert servicer.requests[-1].chat.messages[0] == pb.ChatMessage(role="user", content="Hi")
            assert await client.detokenize([4, 5], skip_special_tokens=False) == "text"
            assert servicer.requests[-1] == pb.DetokenizeRequest(token_ids=[4, 5], skip_special_tokens=False)
            assert await client.model("m") == MODEL
            assert await client.models() == [MODEL]

    run_async(scenario())


PROMPTS = [
    ("Hi", {"text": "Hi"}),
    ([ChatMessage("user", "Hi")], {"chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")])}),
    ([1, 2], {"tokens": pb.TokenPrompt(token_ids=[1, 2])}),
    ([], {"tokens": pb.TokenPrompt()}),
]


@pytest.mark.parametrize(("prompt", "fields"), PROMPTS)
def test_every_option_has_its_field(prompt, fields):
    sampling = {
        **{"temperature": 0.0, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "seed": 7, "max_tokens": 9, "min_tokens": 1},
        **{"ignore_eos": False, "stop_token_ids": [3]},
    }
    rest = {"model": "m", "request_id": "r", "stop": ["x"], "include_stop_in_output": True, "skip_special_tokens": False}
    expected = pb.Generation(sampling=pb.Sampling(**sampling), **rest, **fields)
    assert generation_of(prompt, {**sampling, **rest, "timeout_s": 1.0}) == expected


def test_a_chat_has_tools_arguments_and_calls():
    call = ToolCall("f", {"x": [1, None, True]}, id="c")
    messages = [ChatMessage("assistant", "", tool_calls=[call]), ChatMessage("tool", "7", name="f", tool_call_id="c")]
    options = {"tools": [{"type": "function"}], "template_args": {"thinking": False}, "continue_final_message": True}
    made = generation_of(messages, {**options, "priority": -1, "cache_salt": "s"})
    expected = json_format.ParseDict(
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"id": "c", "name": "f", "arguments": {"x": [1, None, True]}}]},
                {"role": "tool", "content": "7", "name": "f", "tool_call_id": "c"},
            ],
            **options,
        },
        pb.ChatPrompt(),
    )
    assert (made.chat, made.priority, made.cache_salt) == (expected, -1, "s")
    with pytest.raises(TypeError, match="tools: not a JSON object"):
        generation_of(messages, {"tools": [{"x": object()}]})
    with pytest.raises(TypeError, match="tools: for a prompt of chat messages only"):
        generation_of("Hi", {"tools": []})


def test_limits_have_their_message():
    assert not generation_of("Hi", {}).HasField("limits")
    assert generation_of("Hi", {"max_queue_ms": 5, "max_total_ms": 9}).limits == pb.Limits(max_queue_ms=5, max_total_ms=9)


def test_what_is_left_out_is_left_to_the_server_but_the_request_has_an_id_and_a_seed():
    generation, other = generation_of("Hi", {}), generation_of("Hi", {"request_id": "", "seed": None})
    assert not generation.HasField("skip_special_tokens")
    assert len(generation.request_id) == len(other.request_id) == 32
    assert generation.request_id != other.request_id
    seeds = {generation.sampling.seed, other.sampling.seed}
    assert len(seeds) == 2 and all(0 <= seed < 1 << 63 for seed in seeds)
    generation.sampling.ClearField("seed")
    assert generation.sampling == pb.Sampling()


@pytest.mark.parametrize(
    ("prompt", "options"),
    [([1, ChatMessage("user", "x")], {}), (["a"], {}), (7, {}), ("Hi", {"temprature": 1}), ("Hi", {"n": 2})],
)
def test_what_the_api_cannot_say_is_a_type_error(prompt, options):
    with pytest.raises(TypeError):
        generation_of(prompt, options)


ERRORS = [
    (service_errors.NotFound("m", reason="R"), tessera_client.NotFound, False),
    (service_errors.AlreadyExists("m", reason="R"), tessera_client.AlreadyExists, False),
    (service_errors.FailedPrecondition("m", reason="R"), tessera_client.FailedPrecondition, False),
    (service_errors.Aborted("m", reason="R"), tessera_client.RequestAborted, False),
    (service_errors.Internal("m", reason="R"), tessera_client.InternalError, False),
    (service_errors.Overloaded("m", reason="R", retry_after_ms=250), tessera_client.Overloaded, True),
    (service_errors.Unavailable("m", reason="R", retry_after_ms=0), tessera_client.Unavailable, True),
    (
        service_errors.InvalidArgument((service_errors.FieldViolation("a.b", "is 3"),), reason="R"),
        tessera_client.InvalidArgument,
        False,
    ),
]


@pytest.mark.parametrize(("sent", "kind", "retryable"), ERRORS)
def test_a_status_becomes_its_error_with_details(run_async, connected, sent, kind, retryable):
    async def scenario():
        async with connected() as (client, servicer):
            servicer.error = sent
            with pytest.raises(kind) as caught:
                await client.abort("r")
            error = caught.value
            assert (error.details.reason, error.message, error.retryable) == ("R", str(sent), retryable)
            assert (error.request_id, error.received_tokens) == ("r", 0)
            assert error.details.retry_after_ms == (getattr(sent, "retry_after_ms", 0) or None)
            assert error.details.fields == ({"a.b": "is 3"} if kind is tessera_client.InvalidArgument else {})
            assert str(error).startswith(error.code.name)
            received = []
            with pytest.raises(kind) as caught:
                async for piece in client.stream("Hi", request_id="r"):
                    received.append(piece)
            assert len(received) == caught.value.received_tokens == 1
            assert (caught.value.request_id, caught.value.details) == ("r", error.details)
            with pytest.raises(kind) as caught:
                await client.generate("Hi", request_id="r")
            assert (caught.value.request_id, caught.value.received_tokens) == ("r", 1)
            servicer.error = None
            assert (await client.generate("Hi")).text == "ab", "the client goes on"

    run_async(scenario())


def test_a_timeout_is_a_deadline(run_async, connected):
    async def scenario():
        async with connected() as (client, servicer):
            servicer.hold.clear()
            with pytest.raises(tessera_client.DeadlineExceeded) as caught:
                async for _ in client.stream("Hi", timeout_s=0.3):
                    pass
            assert caught.value.received_tokens == 1
            assert len(caught.value.request_id) == 32
            await servicer.left.wait()

    run_async(scenario())


def test_leaving_a_stream_cancels_it(run_async, connected):
    async def scenario():
        async with connected() as (client, servicer):
            servicer.hold.clear()
            stream = client.stream("Hi")
            async for _ in stream:
                break
            await stream.aclose()
            await servicer.left.wait()

    run_async(scenario())


def test_a_server_that_comes_back_is_found_by_the_same_client(run_async, connected):
    async def scenario():
        async with connected() as (client, servicer):
            server = RpcServer(ServerConfig("127.0.0.1:0"))
            register, name = inference_pb2_grpc.add_InferenceServiceServicer_to_server, "tessera.v1.InferenceService"
            server.add(register, servicer, name)
            address = await server.start()
            async with type(client)(address, resume_timeout_s=0) as other:
                assert (await other.model()).name == "m"
                servicer.hold.clear()
                stream = other.stream("Hi")
                await anext(stream)
                await server.stop(0)
                with pytest.raises(tessera_client.Unavailable) as caught:
                    await anext(stream)
                assert (caught.value.received_tokens, caught.value.retryable) == (1, True)
                with pytest.raises(tessera_client.Unavailable):
                    await other.model()
                server = RpcServer(ServerConfig(address))
                server.add(register, servicer, name)
                await server.start()
                while True:
                    try:
                        assert (await other.model()).name == "m"
                        break
                    except tessera_client.Unavailable:
                        await asyncio.sleep(0.05)  # the connection comes back by itself
                await server.stop(0)

    run_async(scenario())


def test_both_clients_have_the_same_calls():
    def calls(kind):
        methods = inspect.getmembers(kind, inspect.isfunction)
        return {name: str(inspect.signature(method)).split(" ->")[0] for name, method in methods if not name.startswith("_")}

    assert calls(Client) == calls(AsyncClient)


def test_importing_the_client_loads_nothing_heavy():
    code = "import sys, tessera.client; print([m for m in ('torch', 'redis', 'services', 'gateway', 'structlog') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_a_string_is_not_taken_for_a_list_of_its_letters(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: a list of strings"):
        generation_of("x", {name: "Paris"})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("prompt", "options", "field", "kind"),
    [
        ("x", {"top_k": 2**40}, "top_k", ValueError),
        ("x", {"seed": -1}, "seed", ValueError),
        ("x", {"temperature": "hot"}, "temperature", TypeError),
        ("x", {"max_tokens": 1.5}, "max_tokens", TypeError),
        ("x", {"stop_token_ids": [3, -1]}, "stop_token_ids", ValueError),
        ("x", {"bad_words": ["\ud800"]}, "bad_words", ValueError),
        ("x", {"request_id": 5}, "request_id", TypeError),
        ("\ud800", {}, "text", ValueError),
        ([2**40], {}, "token_ids", ValueError),
    ],
)
def test_a_value_that_the_message_cannot_hold_is_refused_by_its_field_s_name(
    prompt: Any, options: dict[str, Any], field: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"^{field}: "):
        generation_of(prompt, options)  # type: ignore[arg-type]


def test_several_answers_come_in_their_order():
    message = pb.GenerateResponse(request_id="r", text="a", token_ids=[1], finish=FINISH_MESSAGE)
    message.others.add(index=1, text="b", token_ids=[2, 3], finish=FINISH_MESSAGE)
    message.prompt_logprobs.add()
    assert [(item.text, item.token_ids, len(item.prompt_logprobs)) for item in answers_from_proto(message)] == [
        ("a", (1,), 1),
        ("b", (2, 3), 0),
    ]
    assert several_of("Hi", 2, {}).n == 2
