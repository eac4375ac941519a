"""Client of a Tessera gateway: `Client` for ordinary code, `AsyncClient` for asyncio, `AdminClient` for operators.

Needs grpcio and protobuf, no torch.

from tessera.client import ChatMessage, Client

with Client("127.0.0.1:50051") as client:
    for piece in client.stream([ChatMessage("user", "Why is the sky blue?")], max_tokens=200):
        print(piece.text, end="", flush=True)

With several gateways, as in `Client(["10.0.0.1:50051", "10.0.0.2:50051"])`, an answer outlives the one that it began at.
"""

from tessera.client.admin import AdminClient
from tessera.client.async_client import AsyncClient
from tessera.client.connection import Tls
from tessera.client.errors import (
    AccessDenied,
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    Overloaded,
    RequestAborted,
    TesseraError,
    Unavailable,
)
from tessera.client.request import ChatMessage, ChatOptions, GenerateOptions, Prompt, ToolCall
from tessera.client.results import Answer, Finish, FinishReason, Model, Piece, Timings, TokenLogprob, TokenLogprobs, Usage
from tessera.client.sync_client import Client

__all__ = [
    "AccessDenied",
    "AdminClient",
    "AlreadyExists",
    "Answer",
    "AsyncClient",
    "ChatMessage",
    "ChatOptions",
    "Client",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Finish",
    "FinishReason",
    "GenerateOptions",
    "InternalError",
    "InvalidArgument",
    "Model",
    "NotFound",
    "Overloaded",
    "Piece",
    "Prompt",
    "RequestAborted",
    "TesseraError",
    "Timings",
    "Tls",
    "TokenLogprob",
    "TokenLogprobs",
    "ToolCall",
    "Unavailable",
    "Usage",
]
