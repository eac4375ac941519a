"""The client for asyncio."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tessera.client import convert
from tessera.client.connection import (
    CHANNEL_OPTIONS,
    RESUME_TIMEOUT_S,
    SHORT_CALL_TIMEOUT_S,
    Gateways,
    Tls,
    metadata_of,
    split_addresses,
    with_trace,
)
from tessera.client.errors import NotFound, TesseraError, error_of
from tessera.client.request import (
    ChatMessage,
    ChatOptions,
    GenerateOptions,
    Prompt,
    generation_of,
    several_of,
    time_left_s,
    tokenize_request,
)
from tessera.client.results import Answer, Model, Piece, joined
from tessera.client.resume import GiveUp, ResumableAnswer, ResumePolicy, is_broken
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc


class AsyncClient:
    """`Client` for one event loop: the same calls, and what it says of resuming. Close it, or use it as a context manager. Calls raise
    TesseraError."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        resume_timeout_s: float = RESUME_TIMEOUT_S,
        retry_overloaded: bool = False,
        tls: Tls | None = None,
        token: str = "",
    ) -> None:
        """`addresses` is one `host:port` per gateway, in a sequence or separated by commas; or a target that gRPC resolves, for example
        `dns:///gateways:50051`. Nothing is sent before the first call. Without `tls` the connection is in plain text, a `token` (who the
        caller is, to gateways that ask) included. Raises ValueError for an empty address or one given twice, and what `Tls` raises."""
        self._gateways = Gateways(split_addresses(addresses))
        self._policy = ResumePolicy(len(self._gateways.addresses), resume_timeout_s, retry_overloaded)
        self._metadata = metadata_of(token)
        self._channels = [_open_channel(address, tls) for address in self._gateways.addresses]
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connections; calls still running are cancelled."""
        self._closed.set()
        for channel in self._channels:
            await channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        """The whole answer. It is resumed like a stream."""
        return joined([piece async for piece in self.stream(prompt, **options)])

    async def generate_several(self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]) -> list[Answer]:
        """`n` whole answers to one prompt, which is computed once; answer i is that of the seed plus i. In one call, which is not resumed."""
        request = pb.GenerateRequest(generation=several_of(prompt, n, options))
        try:
            message = await self._stubs[self._gateways.present].Generate(
                request, timeout=time_left_s(options, 0.0), metadata=with_trace(self._metadata)
            )
        except grpc.RpcError as error:
            raise error_of(error, request.generation.request_id) from error
        return convert.answers_from_proto(message)

    async def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece, the last one with `finish`. Leaving the loop and closing the generator aborts the request."""
        answer = ResumableAnswer(generation_of(prompt, options), self._policy, self._gateways.present)
        began_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            gateway = answer.gateway
            timeout_s = time_left_s(options, now_s - began_s)
            call = self._stubs[gateway].StreamGenerate(
                answer.request(now_s), timeout=timeout_s, metadata=with_trace(self._metadata)
            )
            try:
                async for message in call:
                    piece = answer.take(convert.piece_from_proto(message))
                    if piece is not None:
                        yield piece
                        if answer.is_finished:
                            return
                raise answer.ended()
            except grpc.RpcError as error:
                failure = error_of(error)
                step = answer.failed(failure, time.monotonic())
                if isinstance(step, GiveUp):
                    raise failure from error
                self._gateways.leave(gateway)
                if answer.failures == 1:
                    self._gateways.log_failure(gateway, failure)
                if await self._closes_within(step.delay_s):
                    raise failure from error
            finally:
                call.cancel()

    async def abort(self, request_id: str) -> None:
        """End a running request; its own call gets the finish ABORTED. Every gateway is asked, but of those behind one name only the one
        in use: raises NotFound where it runs at none of them."""
        failure: TesseraError | None = None
        for gateway in self._gateways.order():
            try:
                request = pb.AbortRequest(request_id=request_id)
                await self._stubs[gateway].Abort(request, timeout=SHORT_CALL_TIMEOUT_S, metadata=with_trace(self._metadata))
                return
            except grpc.RpcError as error:
                found = error_of(error, request_id)
                failure = found if failure is None or isinstance(failure, NotFound) else failure
        assert failure is not None, "there is at least one gateway"
        raise failure

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        **chat: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Token ids of text, or of chat messages through the model's template (where `add_special_tokens` has no effect)."""
        return tuple((await self._ask("Tokenize", tokenize_request(prompt, model, add_special_tokens, chat))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = (await self._ask("Detokenize", request)).text
        return text

    async def model(self, name: str = "") -> Model:
        """One served model; an empty name means the only one."""
        return convert.model_from_proto((await self._ask("GetModel", pb.GetModelRequest(model=name))).model)

    async def models(self) -> list[Model]:
        """All served models."""
        return [convert.model_from_proto(model) for model in (await self._ask("ListModels", pb.ListModelsRequest())).models]

    async def _ask(self, method: str, request: Any) -> Any:
        """One call, at the next gateway where one cannot answer."""
        order = self._gateways.order()
        for gateway in order:
            try:
                return await getattr(self._stubs[gateway], method)(
                    request, timeout=SHORT_CALL_TIMEOUT_S, metadata=with_trace(self._metadata)
                )
            except grpc.RpcError as error:
                failure = error_of(error)
                if not is_broken(failure) or gateway == order[-1]:
                    raise failure from error
                self._gateways.leave(gateway)
        raise AssertionError("the last gateway answers or raises")

    async def _closes_within(self, delay_s: float) -> bool:
        """Wait, but no longer than the client is open."""
        try:
            async with asyncio.timeout(delay_s):
                return await self._closed.wait()
        except TimeoutError:
            return False


def _open_channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, tls.credentials(), options=[*CHANNEL_OPTIONS, *tls.options()])
