"""The one place where what a handler raises becomes a status."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError

from services.rpc.errors import FieldViolation, InvalidArgument, ServiceError
from services.rpc.status import INTERNAL_TEXT, code_of, status_of

_log = structlog.get_logger()

Note: TypeAlias = Callable[[ServiceError], None]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: a ServiceError ends the call with its status, any other exception with INTERNAL and a fixed text.

    Cancellation, and an abort that a handler made itself, pass. Handlers are coroutines, or asynchronous generators for
    streamed answers; `intercept_service` returns before the call runs, so the handler's own function is wrapped. `note` gets
    each ServiceError that ends a call.
    """

    def __init__(self, note: Note | None = None) -> None:
        self._note = note

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wrap the handler found for this call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = kind_of(handler)
        function = getattr(handler, kind)
        deserialize = handler.request_deserializer
        guard = _guard_stream if inspect.isasyncgenfunction(function) else _guard_call
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            guard(function, handler_call_details.method, self._note),
            request_deserializer=deserialize if handler.request_streaming else _deferring(deserialize),
            response_serializer=handler.response_serializer,
        )


def kind_of(handler: Any) -> str:
    """The attribute in which a handler has its function: `unary_unary` and so on."""
    request = "stream" if handler.request_streaming else "unary"
    return f"{request}_{'stream' if handler.response_streaming else 'unary'}"


def _deferring(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The request, or the DecodeError for the guard to raise: raised here, it would end the call as UNKNOWN, with a traceback in the log."""

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return error

    return decode


def _decoded(request: Any) -> Any:
    if isinstance(request, DecodeError):
        raise InvalidArgument((FieldViolation("request", f"cannot be decoded: {request}"),), reason="MALFORMED_MESSAGE")
    return request


def _guard_call(
    function: Callable[[Any, Any], Awaitable[Any]], method: str, note: Note | None
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def guarded(request: Any, context: Any) -> Any:
        try:
            return await function(_decoded(request), context)
        except Exception as error:  # noqa: BLE001 - every failure ends as a status, here and nowhere else
            await _end(error, method, context, note)

    return guarded


def _guard_stream(
    function: Callable[[Any, Any], AsyncIterator[Any]], method: str, note: Note | None
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(function(_decoded(request), context)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except Exception as error:  # noqa: BLE001 - every failure ends as a status, here and nowhere else
            await _end(error, method, context, note)

    return guarded


async def _end(error: Exception, method: str, context: Any, note: Note | None) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, ServiceError):
        # A client that does not read holds up its own end: nothing of what served it is to wait for that.
        error.__traceback__ = error.__context__ = None
        code, text, trailers = status_of(error)
        _log.debug("call refused", method=method, code=code_of(error).name, reason=error.reason)
        if note is not None:
            note(error)
        await _abort(context, code, text, trailers)
    _log.error("a handler failed", method=method, exc_info=error)
    await _abort(context, grpc.StatusCode.INTERNAL, INTERNAL_TEXT, ())


async def _abort(context: Any, code: grpc.StatusCode, text: str, trailers: tuple[tuple[str, str | bytes], ...]) -> NoReturn:
    """End the call. The call keeps the AbortError that this raises, whose traceback leads back to the call: a circle of fifty objects for each
    refusal, which the collector would stop everything to find. So the traceback goes once grpc has caught it, in the next turn of the loop."""
    try:
        await context.abort(code, text, trailers)
    except grpc.aio.AbortError as aborted:
        asyncio.get_running_loop().call_soon(aborted.with_traceback, None)
        raise
    raise AssertionError("abort never returns")
