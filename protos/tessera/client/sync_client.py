"""The client for ordinary, blocking code."""

import threading
import time
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tessera.client import convert
from tessera.client.connection import (
    RESUME_TIMEOUT_S,
    SHORT_CALL_TIMEOUT_S,
    Gateways,
    Tls,
    metadata_of,
    open_channel,
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
from tessera.client.resume import GiveUp, ResumableAnswer, ResumePolicy
from tessera.client.short_calls import ask
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc


class Client:
    """A connection to each of the gateways that is used; threads may share it. Close it, or use it as a context manager. Calls raise
    TesseraError.

    `generate` and `stream` go on by themselves where a connection breaks, or a gateway ends, stops answering or has no scheduler: with
    the next gateway, or the same one where there is only one, from where the answer was. No token comes twice and none is left out,
    and the request is not computed a second time while a scheduler knows it. Where nothing new comes for `resume_timeout_s`, the last
    error is raised. Refusals are raised at once, RESOURCE_EXHAUSTED of the first try too unless `retry_overloaded` is set. A gateway
    that lives and loses its client aborts the request, unless it was started with a `--detach-grace-ms`: then an answer that could
    have gone on ends with the finish ABORTED.

    Calls go to the first gateway that has not failed; those other than `generate` and `stream` are tried once at each.
    """

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
        self._channels = [open_channel(address, tls) for address in self._gateways.addresses]
        self._stubs: list[Any] = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels]
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the connections; calls still running are cancelled."""
        self._closed.set()
        for channel in self._channels:
            channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        """The whole answer. It is resumed like a stream."""
        return joined(list(self.stream(prompt, **options)))

    def generate_several(self, prompt: Prompt, n: int, **options: Unpack[GenerateOptions]) -> list[Answer]:
        """`n` whole answers to one prompt, which is computed once; answer i is that of the seed plus i. In one call, which is not resumed."""
        request = pb.GenerateRequest(generation=several_of(prompt, n, options))
        try:
            message = self._stubs[self._gateways.present].Generate(
                request, timeout=time_left_s(options, 0.0), metadata=with_trace(self._metadata)
            )
        except grpc.RpcError as error:
            raise error_of(error, request.generation.request_id) from error
        return convert.answers_from_proto(message)

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generator[Piece, None, None]:
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
                for message in call:
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
                if self._closed.wait(step.delay_s):
                    raise failure from error
            finally:
                call.cancel()

    def abort(self, request_id: str) -> None:
        """End a running request; its own call gets the finish ABORTED. Every gateway is asked, but of those behind one name only the one
        in use: raises NotFound where it runs at none of them."""
        failure: TesseraError | None = None
        for gateway in self._gateways.order():
            try:
                request = pb.AbortRequest(request_id=request_id)
                self._stubs[gateway].Abort(request, timeout=SHORT_CALL_TIMEOUT_S, metadata=with_trace(self._metadata))
                return
            except grpc.RpcError as error:
                found = error_of(error, request_id)
                failure = found if failure is None or isinstance(failure, NotFound) else failure
        assert failure is not None, "there is at least one gateway"
        raise failure

    def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        **chat: Unpack[ChatOptions],
    ) -> tuple[int, ...]:
        """Token ids of text, or of chat messages through the model's template (where `add_special_tokens` has no effect)."""
        return tuple(self._ask("Tokenize", tokenize_request(prompt, model, add_special_tokens, chat)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = self._ask("Detokenize", request).text
        return text

    def model(self, name: str = "") -> Model:
        """One served model; an empty name means the only one."""
        return convert.model_from_proto(self._ask("GetModel", pb.GetModelRequest(model=name)).model)

    def models(self) -> list[Model]:
        """All served models."""
        return [convert.model_from_proto(model) for model in self._ask("ListModels", pb.ListModelsRequest()).models]

    def _ask(self, method: str, request: Any) -> Any:
        return ask(self._gateways, self._stubs, method, request, self._metadata)
