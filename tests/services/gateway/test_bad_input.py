"""The status of every bad input to the public APIs: one table, which has a row for every field that can be wrong.

A path that a row names covers its field; a field that no row names is in `NEVER_WRONG`, with the reason.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
import pytest
from gateway_house import MAX_MODEL_LEN, max_tokens, output, read_all, reason_and_fields, refused
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from services.rpc.status import metadata_of
from tessera.v1 import admin_pb2, admin_pb2_grpc
from tessera.v1 import inference_pb2 as pb
from tessera.values.session import Submit

METHODS = [
    *pb.DESCRIPTOR.services_by_name["InferenceService"].methods,
    *admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods,
]
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND

NEVER_WRONG = {
    "Generation.include_stop_in_output": "either is fine",
    "Generation.skip_special_tokens": "either is fine",
    "Generation.priority": "all numbers are an order",
    "ChatMessage.content": "any text; too much of it is too much of `messages`",
    "ChatMessage.name": "any text, as `content`",
    "ToolCall.id": "any text, as `content`",
    "Sampling.ignore_eos": "either is fine",
    "TokenizeRequest.add_special_tokens": "either is fine",
    "DetokenizeRequest.skip_special_tokens": "either is fine",
    "AbortRequestsRequest.principal": "any name, also of nobody",
}


@dataclass(frozen=True)
class Row:
    """A wrong request, and what is said of it. `field`: where, from the message that has it on."""

    asked: Message
    field: str
    reason: str = "INVALID_FIELD"
    code: grpc.StatusCode = INVALID


def struct(**fields: object) -> Struct:
    message = Struct()
    message.update(fields)
    return message


def message(**fields: object) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(**fields)])


def user(**fields: object) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="Hi")], **fields)


NAN, INF = float("nan"), float("inf")
LARGE = "x" * (5 << 20)

CHATS = [
    Row(pb.ChatPrompt(), "messages"),
    Row(message(role="user", content=LARGE), "messages"),
    Row(message(role="boss", content="x"), "messages[0].role"),
    Row(message(content="x"), "messages[0].role"),
    Row(message(role="user", tool_call_id="1"), "messages[0].tool_call_id"),
    Row(message(role="user", tool_calls=[pb.ToolCall(name="f")]), "messages[0].tool_calls"),
    Row(message(role="assistant", tool_calls=[pb.ToolCall(name="f")] * 129), "messages[0].tool_calls"),
    Row(message(role="assistant", tool_calls=[pb.ToolCall()]), "messages[0].tool_calls[0].name"),
    Row(
        message(role="assistant", tool_calls=[pb.ToolCall(name="f"), pb.ToolCall(name="g", arguments=struct(x=[NAN]))]),
        "messages[0].tool_calls[1].arguments",
    ),
    Row(user(continue_final_message=True), "continue_final_message"),
    Row(user(tools=[Struct()] * 129), "tools"),
    Row(user(tools=[Struct(), struct(x={"y": NAN})]), "tools[1]"),
    Row(user(tools=[struct(x=LARGE)]), "tools"),
    Row(user(template_args=struct(x=INF)), "template_args"),
    Row(user(template_args=struct(x=LARGE)), "template_args"),
    Row(user(template_args=struct(**{f"a{number}": 1 for number in range(65)})), "template_args"),
    Row(user(template_args=struct(_x=1)), "template_args['_x']"),
    Row(user(template_args=struct(eos_token="x")), "template_args['eos_token']"),
    Row(user(template_args=struct(tools="x")), "template_args['tools']"),
]

SAMPLINGS = [
    *[Row(pb.Sampling(temperature=value), "temperature") for value in (-0.1, 101, NAN)],
    *[Row(pb.Sampling(top_p=value), "top_p") for value in (0, 1.1, NAN)],
    Row(pb.Sampling(top_k=-2), "top_k"),
    *[Row(pb.Sampling(min_p=value), "min_p") for value in (-0.1, 1.5, NAN)],
    Row(pb.Sampling(seed=2**63), "seed"),
    *[Row(pb.Sampling(max_tokens=value), "max_tokens") for value in (0, 2**20 + 1)],
    Row(pb.Sampling(max_tokens=2, min_tokens=3), "min_tokens"),
    Row(pb.Sampling(stop_token_ids=[49152]), "stop_token_ids[0]"),
    Row(pb.Sampling(stop_token_ids=range(65)), "stop_token_ids"),
    *[Row(pb.Sampling(presence_penalty=value), "presence_penalty") for value in (-2.5, 2.5, NAN)],
    *[Row(pb.Sampling(frequency_penalty=value), "frequency_penalty") for value in (-2.5, INF)],
    *[Row(pb.Sampling(repetition_penalty=value), "repetition_penalty") for value in (0, 101, NAN)],
    Row(pb.Sampling(logit_bias={49152: 1.0}), "logit_bias"),
    Row(pb.Sampling(logit_bias={1: NAN}), "logit_bias"),
    Row(pb.Sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias"),
    Row(pb.Sampling(allowed_token_ids=[49152]), "allowed_token_ids[0]"),
    Row(pb.Sampling(allowed_token_ids=range(1025)), "allowed_token_ids"),
    Row(pb.Sampling(bad_words=["ok", " "]), "bad_words[1]"),
    Row(pb.Sampling(bad_words=["x"] * 129), "bad_words"),
    Row(pb.Sampling(logprobs=21), "logprobs"),
    Row(pb.Sampling(logprobs=20, max_tokens=2**20, logprob_token_ids=[0] * 128), "logprobs"),
    Row(pb.Sampling(prompt_logprobs=2**32 - 1), "prompt_logprobs"),
    Row(pb.Sampling(logprob_token_ids=[1, 2**31]), "logprob_token_ids[1]"),
    Row(pb.Sampling(logprob_token_ids=range(129)), "logprob_token_ids"),
]

LIMITS = [
    Row(pb.Limits(**{name: value}), name)
    for name in ("max_queue_ms", "max_first_token_ms", "max_total_ms")
    for value in (0, 2**31)
]

GENERATIONS = [
    Row(pb.Generation(), "text"),
    Row(pb.Generation(text=""), "text"),
    Row(pb.Generation(text=LARGE), "text"),
    Row(pb.Generation(tokens=pb.TokenPrompt()), "tokens.token_ids"),
    Row(pb.Generation(tokens=pb.TokenPrompt(token_ids=[1, 49152])), "tokens.token_ids[1]"),
    Row(pb.Generation(tokens=pb.TokenPrompt(token_ids=[1] * MAX_MODEL_LEN)), "tokens.token_ids"),
    Row(pb.Generation(text="x", model="gpt-5"), "model", "MODEL_NOT_FOUND", NOT_FOUND),
    Row(pb.Generation(text="x", request_id="x" * 129), "request_id"),
    Row(pb.Generation(text="x", cache_salt="x" * 129), "cache_salt"),
    Row(pb.Generation(text="x", stop=["x"] * 17), "stop"),
    Row(pb.Generation(text="x", stop=["ok", ""]), "stop[1]"),
    Row(pb.Generation(text="x", stop=["x" * 1025]), "stop[0]"),
    *[Row(pb.Generation(text="x", n=count), "n") for count in (0, 17)],
    *[Row(pb.Generation(chat=row.asked), f"chat.{row.field}") for row in CHATS],
    *[Row(pb.Generation(text="x", sampling=row.asked), f"sampling.{row.field}") for row in SAMPLINGS],
    *[Row(pb.Generation(text="x", limits=row.asked), f"limits.{row.field}") for row in LIMITS],
]

NAMED = pb.Generation(text="x", request_id="mine")
RESUMES = [
    *[Row(pb.Resume(number=value), "number") for value in (0, 2**31)],
    Row(pb.Resume(number=1, token_offset=65), "token_offset"),
    Row(pb.Resume(number=1, text_offset=1), "text_offset"),
    Row(pb.Resume(number=1, token_offset=3, token_ids=[504]), "token_ids"),
    Row(pb.Resume(number=1, token_offset=2, token_ids=[504, 49152]), "token_ids[1]"),
]

UNKNOWN_MODEL = {"reason": "MODEL_NOT_FOUND", "code": NOT_FOUND}

ROWS = {
    "Generate": [
        Row(pb.GenerateRequest(), "generation.text"),
        *[
            Row(pb.GenerateRequest(generation=row.asked), f"generation.{row.field}", row.reason, row.code)
            for row in GENERATIONS
        ],
    ],
    "StreamGenerate": [
        Row(pb.StreamGenerateRequest(), "generation.text"),
        *[
            Row(pb.StreamGenerateRequest(generation=row.asked), f"generation.{row.field}", row.reason, row.code)
            for row in GENERATIONS
        ],
        *[Row(pb.StreamGenerateRequest(generation=NAMED, resume=row.asked), f"resume.{row.field}") for row in RESUMES],
        Row(pb.StreamGenerateRequest(generation=pb.Generation(text="x"), resume=pb.Resume(number=1)), "generation.request_id"),
        Row(
            pb.StreamGenerateRequest(generation=pb.Generation(text="x", request_id="a", n=2), resume=pb.Resume(number=1)),
            "generation.n",
        ),
    ],
    "Abort": [
        Row(pb.AbortRequest(), "request_id", "REQUEST_NOT_FOUND", NOT_FOUND),
        Row(pb.AbortRequest(request_id="nobody's"), "request_id", "REQUEST_NOT_FOUND", NOT_FOUND),
    ],
    "Tokenize": [
        Row(pb.TokenizeRequest(), "text"),
        Row(pb.TokenizeRequest(text=LARGE), "text"),
        Row(pb.TokenizeRequest(text="x", model="gpt-5"), "model", **UNKNOWN_MODEL),
        *[Row(pb.TokenizeRequest(chat=row.asked), f"chat.{row.field}") for row in CHATS],
    ],
    "Detokenize": [
        Row(pb.DetokenizeRequest(token_ids=[0, 49152]), "token_ids[1]"),
        Row(pb.DetokenizeRequest(token_ids=[0] * (MAX_MODEL_LEN + 1)), "token_ids"),
        Row(pb.DetokenizeRequest(model="gpt-5"), "model", **UNKNOWN_MODEL),
    ],
    "GetModel": [Row(pb.GetModelRequest(model="gpt-5"), "model", **UNKNOWN_MODEL)],
    "ListModels": [],
    "GetStats": [],
    "ListRequests": [
        Row(admin_pb2.ListRequestsRequest(page_size=1001), "page_size"),
        *[Row(admin_pb2.ListRequestsRequest(page_token=token), "page_token") for token in ("x", "7", "7.-3", "7.3.1", LARGE)],
    ],
    "AbortRequests": [
        Row(admin_pb2.AbortRequestsRequest(), "id"),
        *[Row(admin_pb2.AbortRequestsRequest(id=name), "id") for name in ("", "no", "x" * 32, "0" * 33, LARGE)],
    ],
    "ResetPrefixCache": [],
    "PauseAdmission": [],
    "ResumeAdmission": [],
    "DrainWorker": [Row(admin_pb2.DrainWorkerRequest(), "address")],
    "UndrainWorker": [Row(admin_pb2.UndrainWorkerRequest(), "address")],
}


@pytest.mark.parametrize("method", [method for method, rows in ROWS.items() if rows])
def test_bad_input_names_its_field_and_harms_nobody(run_async, house, method):
    async def scenario():
        async with house() as h:
            end = await h.session()
            neighbour = h.stream()
            submit = await end.hear(Submit)
            admin = admin_pb2_grpc.AdminServiceStub(h.channel)
            for row in ROWS[method]:
                stub = h.stub if hasattr(h.stub, method) else admin
                error = await refused(getattr(stub, method)(row.asked))
                reason, fields = reason_and_fields(error)
                named = fields or [metadata_of(error)["field"]]
                assert (error.code(), reason, named) == (row.code, row.reason, [row.field]), error.details()
                assert error.details().startswith(row.field)
            end.send(output(submit, 0, [504], max_tokens(1)))
            assert [i for piece in await read_all(neighbour) for i in piece.token_ids] == [504]
            assert end.nothing_heard()

    run_async(scenario())


def fields_of(descriptor: Descriptor, path: str = "") -> Iterator[tuple[str, FieldDescriptor]]:
    """Every field of a message and of those in it, by its path; of other people's messages, and of maps, none."""
    for field in descriptor.fields:
        within = field.message_type
        if within is None or within.file.package != descriptor.file.package or within.GetOptions().map_entry:
            yield path + field.name, field
        else:
            yield from fields_of(within, f"{path}{field.name}.")


def test_every_field_has_a_row_or_is_never_wrong():
    never_wrong = set()
    assert list(ROWS) == [method.name for method in METHODS]
    for method in METHODS:
        rows = {re.sub(r"\[[^]]*\]", "", row.field) for row in ROWS[method.name]}
        for path, field in fields_of(method.input_type):
            name = f"{field.containing_type.name}.{field.name}"
            never_wrong |= {name} & set(NEVER_WRONG)
            assert (path in rows) != (name in NEVER_WRONG), f"{method.name}: {path} has no row, or one though it is never wrong"
    assert never_wrong == set(NEVER_WRONG), "these fields are no more"
