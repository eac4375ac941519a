"""Who may call what: each service has a role, and a caller has roles by a token or by a certificate.

With a file of tokens it is the token that counts. Without one it is the client's certificate, which TLS has verified: at a
gateway it is good for the public services; at the other servers it must have `tls_peer_name`, where there is one. A server that has
neither answers everybody. Health and reflection are open.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

import grpc

from services.rpc.caller import ANYBODY, set_caller
from services.rpc.errors import PermissionDenied, Unauthenticated
from services.rpc.tokens import Caller, Role, TokenFile

BEARER = "bearer "


class Gatekeeper:
    """Says who a caller is. `certificate_role` is what any client certificate is good for, None where no client shows one."""

    def __init__(self, tokens: TokenFile | None, certificate_role: Role | None, peer_name: str = "") -> None:
        self._tokens = tokens
        self._certificate_role = certificate_role
        self._peer_name = peer_name

    def admit(self, role: Role, metadata: Mapping[str, str | bytes], context: Any) -> Caller:
        """The caller, who has `role`. Raises Unauthenticated or PermissionDenied."""
        caller = self._caller(metadata, context)
        if role not in caller.roles:
            raise PermissionDenied(f"this service needs the role {role}", reason="ROLE_MISSING", metadata={"role": role})
        return caller

    def _caller(self, metadata: Mapping[str, str | bytes], context: Any) -> Caller:
        if self._tokens is not None:
            return self._holder(self._tokens, metadata)
        if self._certificate_role is None:
            return ANYBODY
        names = sorted(name.decode(errors="replace") for name in context.peer_identities() or ())
        is_known = bool(names) and (self._certificate_role is Role.PUBLIC or self._peer_name in ("", *names))
        if not is_known:
            raise PermissionDenied("the client's certificate has not the name of this system", reason="WRONG_CERTIFICATE")
        return Caller("".join(names[0].split()), frozenset((self._certificate_role,)))

    @staticmethod
    def _holder(tokens: TokenFile, metadata: Mapping[str, str | bytes]) -> Caller:
        given = metadata.get("authorization", "")
        if not isinstance(given, str) or not given.lower().startswith(BEARER):
            raise Unauthenticated("give a token in the metadata: authorization: Bearer TOKEN", reason="TOKEN_MISSING")
        caller = tokens.caller_of(given[len(BEARER) :].strip())
        if caller is None:
            raise Unauthenticated("the token is not known here", reason="TOKEN_UNKNOWN")
        return caller


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Lets through to a service of `roles` (full name -> role; the server adds to it) whom `keeper` admits; other services are open. It
    goes inside the ErrorInterceptor, which makes statuses of refusals."""

    def __init__(self, keeper: Gatekeeper, roles: Mapping[str, Role]) -> None:
        self._keeper = keeper
        self._roles = roles

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """Wrap the handler found for this call."""
        handler = await continuation(handler_call_details)
        role = self._roles.get(handler_call_details.method.split("/")[1]) if handler is not None else None
        if role is None:
            return handler
        needed, metadata = role, dict(handler_call_details.invocation_metadata or ())

        def admit(context: Any) -> None:
            set_caller(self._keeper.admit(needed, metadata, context))

        kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
        function = getattr(handler, kind)
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            _admitted_stream(function, admit) if isasyncgenfunction(function) else _admitted_call(function, admit),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


def _admitted_call(
    function: Callable[[Any, Any], Awaitable[Any]], admit: Callable[[Any], None]
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def admitted(request: Any, context: Any) -> Any:
        admit(context)
        return await function(request, context)

    return admitted


def _admitted_stream(
    function: Callable[[Any, Any], AsyncIterator[Any]], admit: Callable[[Any], None]
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def admitted(request: Any, context: Any) -> AsyncIterator[Any]:
        admit(context)
        async with aclosing(function(request, context)) as responses:  # type: ignore[type-var]
            async for response in responses:
                yield response

    return admitted
