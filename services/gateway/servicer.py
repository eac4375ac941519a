"""The public API: tessera.v1.InferenceService."""

import asyncio
import secrets
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import Message

from gateway.delta import Delta, join_deltas
from gateway.errors import GatewayError, InvalidField, InvalidRequest
from gateway.output_stream import OutputStream
from gateway.prompt import check_token_ids, encode_chat, encode_text
from gateway.resume import GENERATION, validate_resume
from gateway.served_model import ServedModel, find_model
from gateway.several_answers import ANSWERS_MAX, all_answers, answer_id
from gateway.token_count import output_tokens_max
from gateway.validation import validate
from services.gateway import convert
from services.gateway.call_bounds import CallBounds
from services.gateway.convert_chat import conversation_from_proto
from services.gateway.merged_streams import merged
from services.gateway.refusals import refusal_of
from services.gateway.request_attributes import tell_answers, tell_request
from services.gateway.request_stream import RequestStream
from services.gateway.session import SchedulerSession, Served
from services.gateway.tenancy import tenant_salt
from services.rpc.call_span import child_span, trace_context
from services.rpc.caller import current_principal
from services.rpc.errors import NotFound
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc
from tessera.values.request import Submission

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name

INLINE_BYTES_MAX = 2048
"""A larger request is read and tokenized in a thread; this much takes well below a millisecond on the event loop."""

_T = TypeVar("_T")


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Every call needs to know what is served: it waits `scheduler_wait_s` for a scheduler, then is UNAVAILABLE."""

    def __init__(
        self,
        session: SchedulerSession,
        bounds: CallBounds,
        scheduler_wait_s: float,
        shares_prefixes: bool = False,
    ) -> None:
        """`shares_prefixes`: principals may find each other's prompts in the prefix cache."""
        self._shares_prefixes = shares_prefixes
        self._session = session
        self._bounds = bounds
        self._scheduler_wait_s = scheduler_wait_s

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        """The whole answer."""
        with self._bounds.calls.one(is_resume=False, principal=current_principal()):
            streams = await self._start(request, context.time_remaining())
            deltas: list[list[Delta]] = [[] for _ in streams]
            try:
                async with aclosing(merged(streams)) as pieces:
                    async for index, delta in pieces:
                        deltas[index].append(delta)
            finally:
                self._leave(streams)
        first, answers = streams[0], list(map(join_deltas, deltas))
        tell_answers(answers)
        return convert.whole_answers_to_proto(first.submission, answers, first.tokenizer)

    async def StreamGenerate(self, request: pb.StreamGenerateRequest, context: Any) -> None:
        """The answer piece by piece, after a resume what is left of it; a client that reads slowly gets larger pieces, one that does not
        read RESOURCE_EXHAUSTED."""
        with self._bounds.calls.one(is_resume=request.HasField("resume"), principal=current_principal()):
            streams = await self._start(request, context.time_remaining())
            submission, tokenizer = streams[0].submission, streams[0].tokenizer
            ends: dict[int, Delta] = {}
            try:
                async with self._bounds.readers.watching(streams) as call, aclosing(merged(streams)) as pieces:
                    async for index, delta in pieces:
                        response = convert.stream_response_to_proto(submission, delta, tokenizer, index)
                        if delta.finish is not None:
                            ends[index] = delta
                            if len(ends) == len(streams) > 1:
                                usage = convert.total_usage(submission, [ends[number] for number in range(len(ends))])
                                response.total_usage.CopyFrom(usage)
                        await call.write(context, response)
            finally:
                self._leave(streams)
                tell_answers([ends[number] for number in sorted(ends)])

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """The request's own call ends with ABORTED; NOT_FOUND where none lives under this id."""
        streams = self._session.live.of_client(current_principal(), request.request_id)
        if not streams:
            raise NotFound(
                f"request_id: no request {request.request_id[:100]!r} is running here",
                reason="REQUEST_NOT_FOUND",
                metadata={"field": "request_id"},
            )
        others = (answer_id(request.request_id, index) for index in range(1, ANSWERS_MAX))
        of_others = (stream for name in others for stream in self._session.live.of_client(current_principal(), name))
        for stream in (*streams, *of_others):
            self._session.abort(stream)
        return pb.AbortResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Token ids of text, or of messages through the chat template."""
        model = (await self._served(request.model)).model

        def tokenize() -> pb.TokenizeResponse:
            if request.WhichOneof("input") is None:
                raise InvalidRequest([InvalidField("text", "is missing; give text or chat messages")])
            if request.WhichOneof("input") == "chat":
                ids = encode_chat(conversation_from_proto(request.chat), model)
            else:
                add = request.add_special_tokens if request.HasField("add_special_tokens") else True
                ids = encode_text(request.text, model, add)
            return pb.TokenizeResponse(token_ids=ids.tolist())

        return await _compute(tokenize, inline=_is_light(request, request.WhichOneof("input")))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        """The text of token ids, at most as many as the model takes."""
        model = (await self._served(request.model)).model

        def detokenize() -> pb.DetokenizeResponse:
            _check_detokenizable(request, model)
            skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
            return pb.DetokenizeResponse(text=model.tokenizer.decode(request.token_ids, skip))

        return await _compute(detokenize, inline=_is_light(request))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        """What is served under a name."""
        return pb.GetModelResponse(model=convert.model_to_proto(await self._served(request.model)))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        """What is served."""
        served = await self._session.served(self._scheduler_wait_s)
        return pb.ListModelsResponse(models=[convert.model_to_proto(served)])

    async def _served(self, name: str) -> Served:
        served = await self._session.served(self._scheduler_wait_s)
        _find(name, served, "")
        return served

    async def _start(
        self, request: pb.GenerateRequest | pb.StreamGenerateRequest, time_left_s: float | None
    ) -> list[RequestStream]:
        """Check a request and hand it to the scheduler, with what is left of its call's deadline: one stream for each of its answers. The
        caller leaves what this returns; nothing is awaited in between."""
        served = await self._session.served(self._scheduler_wait_s)
        generation = request.generation
        model = _find(generation.model, served, GENERATION)
        form = generation.WhichOneof("prompt")
        is_resume = isinstance(request, pb.StreamGenerateRequest) and request.HasField("resume")
        self._check_least(generation, model, is_resume)

        def check() -> RequestStream:
            submission, output = _checked(request, model, time_left_s)
            salt = tenant_salt(submission.principal, submission.cache_salt, self._shares_prefixes)
            placed = replace(submission, cache_salt=salt, trace_context=trace_context())
            return RequestStream(placed, output, convert.prompt_field(generation))

        with child_span("tokenize"):
            stream = await _compute(check, inline=_is_light(request, form))
        tell_request(stream.submission, model.info.name, max(1, generation.n))
        await self._session.connected(self._scheduler_wait_s)
        stream.submission, *others = all_answers(stream.submission, generation.n if generation.HasField("n") else 1)
        streams = [
            stream,
            *(RequestStream(item, OutputStream(model.tokenizer, item.detokenize), stream.prompt_field) for item in others),
        ]
        self._reserve(streams, model, is_resume)
        for one in streams:
            self._session.submit(one)
        return streams

    def _check_least(self, generation: pb.Generation, model: ServedModel, is_resume: bool) -> None:
        """Refuse what has no room before its prompt is read, which may be long. Raises what `TokenBudget.check` raises."""
        principal, of_one = current_principal(), convert.least_tokens_of(generation, model, 1)
        limit = self._bounds.tokens.request_len_max(principal)
        field = convert.MAX_TOKENS_FIELD if limit is not None and of_one > limit else f"{GENERATION}n"
        self._bounds.tokens.check(principal, convert.least_tokens_of(generation, model, max(1, generation.n)), is_resume, field)

    def _reserve(self, streams: list[RequestStream], model: ServedModel, is_resume: bool) -> None:
        """Count what the answers may come to. Raises what `TokenBudget.check` raises."""
        first, principal = streams[0], current_principal()
        for one in streams:
            one.num_reserved = output_tokens_max(one.submission, model.info.max_model_len)
        prompt_len, limit = len(first.submission.prompt_token_ids), self._bounds.tokens.request_len_max(principal)
        first.num_reserved += prompt_len
        field = convert.MAX_TOKENS_FIELD
        if limit is not None and prompt_len >= limit:
            field = first.prompt_field
        elif limit is not None and first.num_reserved <= limit:
            field = f"{GENERATION}n"
        self._bounds.tokens.check(principal, sum(one.num_reserved for one in streams), is_resume, field)

    def _leave(self, streams: list[RequestStream]) -> None:
        for stream in streams:
            self._session.leave(stream)


def _checked(
    request: pb.GenerateRequest | pb.StreamGenerateRequest, model: ServedModel, time_left_s: float | None
) -> tuple[Submission, OutputStream]:
    """What a request asks for, and its output as far as its client has it. Raises InvalidRequest with paths from the request on."""
    try:
        asked = convert.generate_input_from_proto(request.generation, time_left_s)
    except InvalidRequest as error:
        raise error.under(GENERATION) from error
    if isinstance(request, pb.StreamGenerateRequest) and request.HasField("resume"):
        resumed = validate_resume(asked, convert.resume_from_proto(request.resume), model, current_principal())
        options = resumed.submission.detokenize
        return resumed.submission, OutputStream(model.tokenizer, options, resumed.number, resumed.shown)
    named = asked if asked.request_id else replace(asked, request_id=secrets.token_hex(16))
    try:
        submission = validate(named, model, current_principal())
    except InvalidRequest as error:
        raise error.under(GENERATION) from error
    return submission, OutputStream(model.tokenizer, submission.detokenize)


def _find(name: str, served: Served, prefix: str) -> ServedModel:
    try:
        return find_model(name, [served.model])
    except GatewayError as error:
        raise refusal_of(error, prefix) from error


def _is_light(request: Message, form: str | None = None) -> bool:
    """Small, and without a chat template to run: that is the model's own program."""
    return form != "chat" and request.ByteSize() <= INLINE_BYTES_MAX


async def _compute(work: Callable[[], _T], inline: bool) -> _T:
    """Do what could hold up the event loop in a thread."""
    try:
        return work() if inline else await asyncio.to_thread(work)
    except GatewayError as error:
        raise refusal_of(error) from error


def _check_detokenizable(request: pb.DetokenizeRequest, model: ServedModel) -> None:
    count, limit = len(request.token_ids), model.info.max_model_len
    if count > limit:
        raise InvalidRequest([InvalidField("token_ids", f"has {count} ids; at most {limit} are taken")])
    problems = check_token_ids("token_ids", convert.token_ids_from_proto(request.token_ids), model.info.vocab_size)
    if problems:
        raise InvalidRequest(problems)
