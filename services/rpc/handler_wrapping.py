"""Something around every run of a handler, whatever its kind: one place knows the four kinds."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any

import grpc

from services.rpc.interceptor import kind_of


def wrapped_handler(handler: Any, around: Callable[[Any], AbstractContextManager[None]]) -> Any:
    """`handler` with each of its calls inside `around(context)`. Handlers are coroutines, or asynchronous generators for streamed answers."""
    kind = kind_of(handler)
    function = getattr(handler, kind)

    async def call(request: Any, context: Any) -> Any:
        with around(context):
            return await function(request, context)

    async def stream(request: Any, context: Any) -> Any:
        with around(context):
            async with aclosing(function(request, context)) as responses:
                async for response in responses:
                    yield response

    return getattr(grpc, f"{kind}_rpc_method_handler")(
        stream if inspect.isasyncgenfunction(function) else call,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def status_code_of(context: Any, default: grpc.StatusCode) -> grpc.StatusCode:
    """The call's code so far; grpc has a number until somebody sets a code."""
    code = context.code() or default
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.UNKNOWN)
