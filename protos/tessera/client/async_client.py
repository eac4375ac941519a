"""The client for asyncio."""

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from tessera.client import convert
from tessera.client.connection import CHANNEL_OPTIONS, SHORT_CALL_TIMEOUT_S
from tessera.client.errors import error_of, translated_errors
from tessera.client.request import ChatMessage, GenerateOptions, Prompt, generation_of, tokenize_request
from tessera.client.results import Answer, Model, Piece
from tessera.v1 import inference_pb2 as pb
from tessera.v1 import inference_pb2_grpc


class AsyncClient:
    """One connection to a gateway, for one event loop. Close it, or use it as a context manager. Calls raise TesseraError."""

    def __init__(self, address: str) -> None:
        """`address` is `host:port`. Nothing is sent before the first call."""
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; calls still running are cancelled."""
        await self._channel.close()

    async def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Answer:
        """The whole answer."""
        generation = generation_of(prompt, options)
        with translated_errors(generation.request_id):
            request = pb.GenerateRequest(generation=generation)
            return convert.answer_from_proto(await self._stub.Generate(request, timeout=options.get("timeout_s")))

    async def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Piece, None]:
        """The answer piece by piece, the last one with `finish`. Leaving the loop and closing the generator aborts the request."""
        generation = generation_of(prompt, options)
        call = self._stub.StreamGenerate(pb.StreamGenerateRequest(generation=generation), timeout=options.get("timeout_s"))
        received_tokens = 0
        try:
            async for message in call:
                received_tokens = message.token_offset + len(message.token_ids)
                yield convert.piece_from_proto(message)
        except grpc.RpcError as error:
            raise error_of(error, generation.request_id, received_tokens) from error
        finally:
            call.cancel()

    async def abort(self, request_id: str) -> None:
        """End a running request; its own call gets the finish ABORTED. Raises NotFound where none runs."""
        with translated_errors(request_id):
            await self._stub.Abort(pb.AbortRequest(request_id=request_id), timeout=SHORT_CALL_TIMEOUT_S)

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, model: str = "", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Token ids of text, or of chat messages through the model's template (where `add_special_tokens` has no effect)."""
        with translated_errors():
            request = tokenize_request(prompt, model, add_special_tokens)
            return tuple((await self._stub.Tokenize(request, timeout=SHORT_CALL_TIMEOUT_S)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        with translated_errors():
            request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
            text: str = (await self._stub.Detokenize(request, timeout=SHORT_CALL_TIMEOUT_S)).text
            return text

    async def model(self, name: str = "") -> Model:
        """One served model; an empty name means the only one."""
        with translated_errors():
            response = await self._stub.GetModel(pb.GetModelRequest(model=name), timeout=SHORT_CALL_TIMEOUT_S)
            return convert.model_from_proto(response.model)

    async def models(self) -> list[Model]:
        """All served models."""
        with translated_errors():
            response = await self._stub.ListModels(pb.ListModelsRequest(), timeout=SHORT_CALL_TIMEOUT_S)
            return [convert.model_from_proto(model) for model in response.models]
