"""The engine as other gateways see it. Requests are checked, numbered, limited and ended as those of the public API are."""

import asyncio
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NoReturn

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from gateway.delta import Delta, join_deltas
from gateway.errors import GatewayError
from gateway.output_stream import OutputStream
from gateway.token_count import least_tokens, output_tokens_max
from services.gateway.call_bounds import CallBounds
from services.gateway.config import GatewayConfig
from services.gateway.refusals import refusal_of
from services.gateway.request_attributes import tell_answers, tell_request
from services.gateway.request_stream import RequestStream
from services.gateway.servicer import INLINE_BYTES_MAX
from services.gateway.session import SchedulerSession, Served
from services.gateway.slow_readers import WatchedCall
from services.gateway.vllm_engine import convert_answer
from services.gateway.vllm_engine.convert_request import PROMPT_FIELDS, submission_from_proto
from services.gateway.vllm_engine.kv_event_stream import START_MAX, KvEventStream
from services.gateway.vllm_engine.tokenizer_files import TokenizerFiles
from services.rpc.call_span import trace_context
from services.rpc.errors import FieldViolation, InvalidArgument, ServiceError, Unimplemented
from tessera.values.admin import PrefixCacheReset, ResetPrefixCache
from tessera.values.known_models import locate
from tessera.values.load import GroupLoad

MAX_TOKENS_FIELD = "sampling_params.max_tokens"

PRINCIPAL = ""
"""Whose requests these are: whoever reaches this port speaks for all of its users."""


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """`Generate`, `Abort`, and what a gateway asks to know the engine. A client that is gone takes its request along: nobody resumes here."""

    def __init__(self, config: GatewayConfig, session: SchedulerSession, bounds: CallBounds) -> None:
        self._config = config
        self._session = session
        self._bounds = bounds
        self._wait_s = config.scheduler_wait_ms / 1000
        self._path = str(locate(config.model))
        self._tokenizer_files = TokenizerFiles()
        self._began_s = time.monotonic()
        self._last_request_s = 0.0  # Unix time

    async def Generate(self, request: Any, context: Any) -> None:
        """Chunks and one `complete`, or, where `stream` is not set, the `complete` alone with everything."""
        self._last_request_s = time.time()
        with self._bounds.calls.one(is_resume=False):
            stream = await self._start(request)
            try:
                async with self._bounds.readers.watching((stream,), can_resume=False) as call:
                    await (_send_pieces if request.stream else _send_whole)(stream, call, context)
            finally:
                self._session.abort(stream)  # a no-op once it has ended

    async def Abort(self, request: Any, context: Any) -> Any:
        """Their streams end with `abort`; ids that are not known are none to end."""
        for request_id in request.request_ids:
            for stream in self._session.live.of_client(PRINCIPAL, request_id):
                self._session.abort(stream)
        return pb.AbortResponse()

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        """Healthy while a scheduler leads that serves this gateway's model."""
        try:
            await self._session.connected(0)
        except ServiceError as error:
            return pb.HealthCheckResponse(healthy=False, message=error.message)
        return pb.HealthCheckResponse(healthy=True, message="serving")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """What is served."""
        return convert_answer.model_info_to_proto(await self._served(), self._path)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        """The group as an engine: one rank, whatever stands behind this gateway."""
        load = self._load()
        return pb.GetServerInfoResponse(
            active_requests=load.num_running + load.num_waiting + load.num_swapped,
            max_num_seqs=load.max_running,
            last_receive_timestamp=self._last_request_s,
            uptime_seconds=time.monotonic() - self._began_s,
            server_type="tessera",
            data_parallel_size=1,
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        """The load of the whole group, as its leader told it last."""
        if request.HasField("dp_rank") and request.dp_rank:
            return pb.GetLoadsResponse(timestamp=_now(), dp_rank_count=1)
        loads = [convert_answer.load_to_proto(self._load())]
        return pb.GetLoadsResponse(timestamp=_now(), dp_rank_count=1, loads=loads)

    async def GetTokenizer(self, request: Any, context: Any) -> None:
        """The tokenizer's files as a zip in pieces, its sha256 with the last."""
        bundle = await self._tokenizer_files.of((await self._served()).model)
        for data, sha256 in bundle.chunks():
            await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=sha256))

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        """What the workers' prefix caches hold, as far as prompts from this port find it: a snapshot, then what changes; and the
        group's load. Ends when this gateway is to end."""
        start = request.start_sequence_number
        if start > START_MAX:
            violation = FieldViolation(
                "start_sequence_number", f"is {start}; at most {START_MAX} is taken: numbers go on from there"
            )
            raise InvalidArgument((violation,))
        with self._session.cache_feed.listener() as listener:
            await context.send_initial_metadata(())  # its caller waits for that, however long the first batch takes
            stream = KvEventStream(start, request.load_records_before_first_batch)
            while (told := await listener.next()) is not None:
                for batch in stream.batches(told):
                    await context.write(batch)

    async def Embed(self, request: Any, context: Any) -> Any:
        """Not offered."""
        _not_offered("Embed")

    async def FlushCache(self, request: Any, context: Any) -> Any:
        """The prefix caches of all workers forget what no request holds."""
        reset = await self._session.administer(ResetPrefixCache(), self._wait_s)
        assert isinstance(reset, PrefixCacheReset), reset
        text = f"{reset.num_forgotten_blocks} blocks forgotten; {reset.num_held_blocks} stay, since requests hold them"
        return common_pb2.FlushCacheResponse(success=True, message=text)

    async def StartProfile(self, request: Any, context: Any) -> Any:
        """Not offered."""
        _not_offered("StartProfile")

    async def StopProfile(self, request: Any, context: Any) -> Any:
        """Not offered."""
        _not_offered("StopProfile")

    def _load(self) -> GroupLoad:
        """Before a leader has told anything, and while there is none: of the requests of this gateway, each of which waits until its first
        token."""
        if self._session.cache_feed.load is not None:
            return self._session.cache_feed.load
        num_running = sum(stream.num_tokens > 0 for stream in self._session.live)
        num_waiting = len(self._session.live) - num_running
        return GroupLoad(num_running, num_waiting, max_running=self._config.max_concurrent_requests)

    async def _served(self) -> Served:
        return await self._session.served(self._wait_s)

    async def _start(self, request: Any) -> RequestStream:
        """Check a request and hand it to the scheduler. The caller ends what this returns; nothing is awaited in between."""
        served = await self._served()
        is_light, len_max = request.ByteSize() <= INLINE_BYTES_MAX, self._request_len_max(served)
        params = request.sampling_params
        least = least_tokens(params.max_tokens if params.HasField("max_tokens") else 1, 1, served.model.info.max_model_len)
        self._bounds.tokens.check(PRINCIPAL, least, is_resume=False, field=MAX_TOKENS_FIELD)
        try:
            stream = (
                _checked(request, served, len_max) if is_light else await asyncio.to_thread(_checked, request, served, len_max)
            )
        except GatewayError as error:
            raise refusal_of(error) from error
        tell_request(stream.submission, served.model.info.name, 1)
        await self._session.connected(self._wait_s)
        prompt_len = len(stream.submission.prompt_token_ids)
        stream.num_reserved = prompt_len + output_tokens_max(stream.submission, served.model.info.max_model_len)
        field = stream.prompt_field if prompt_len >= len_max else MAX_TOKENS_FIELD
        self._bounds.tokens.check(PRINCIPAL, stream.num_reserved, is_resume=False, field=field)
        self._session.submit(stream)
        return stream

    def _request_len_max(self, served: Served) -> int:
        """What a request without `max_tokens` may grow to: the limits of this gateway are limits as well."""
        lens = (served.max_request_len, served.model.info.max_model_len, self._bounds.tokens.request_len_max(PRINCIPAL))
        return min(length for length in lens if length is not None)


def _checked(request: Any, served: Served, max_request_len: int) -> RequestStream:
    asked = submission_from_proto(request, served.model, max_request_len, PRINCIPAL)
    submission = replace(asked, trace_context=trace_context())
    output = OutputStream(served.model.tokenizer, submission.detokenize)
    return RequestStream(submission, output, PROMPT_FIELDS[request.WhichOneof("input")])


async def _send_pieces(stream: RequestStream, call: WatchedCall, context: Any) -> None:
    finished = False
    while not finished:
        delta = await stream.next_delta()
        finished = delta.finish is not None
        if delta.token_ids:
            await call.write(context, convert_answer.chunk_to_proto(stream.submission, delta))
        if finished:
            end = replace(delta, token_ids=(), logprobs=None, prompt_logprobs=None)
            tell_answers([end])
            await call.write(context, convert_answer.end_to_proto(stream.submission, end))


async def _send_whole(stream: RequestStream, call: WatchedCall, context: Any) -> None:
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish is None:
        deltas.append(await stream.next_delta())
    answer = join_deltas(deltas)
    tell_answers([answer])
    await call.write(context, convert_answer.end_to_proto(stream.submission, answer))


def _not_offered(method: str) -> NoReturn:
    raise Unimplemented(f"{method} is not offered here", reason="NOT_OFFERED", metadata={"method": method})


def _now() -> str:
    return datetime.now(UTC).isoformat()
