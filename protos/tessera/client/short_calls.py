"""Calls that one answer ends: tried once at each gateway, in order, where one cannot answer."""

from collections.abc import Sequence
from typing import Any

import grpc

from tessera.client.connection import SHORT_CALL_TIMEOUT_S, Gateways, Metadata, with_trace
from tessera.client.errors import error_of
from tessera.client.resume import is_broken


def ask(gateways: Gateways, stubs: Sequence[Any], method: str, request: Any, metadata: Metadata) -> Any:
    """The answer of the first gateway that can answer. Raises TesseraError."""
    order = gateways.order()
    for gateway in order:
        try:
            return getattr(stubs[gateway], method)(request, timeout=SHORT_CALL_TIMEOUT_S, metadata=with_trace(metadata))
        except grpc.RpcError as error:
            failure = error_of(error)
            if not is_broken(failure) or gateway == order[-1]:
                raise failure from error
            gateways.leave(gateway)
    raise AssertionError("the last gateway answers or raises")
