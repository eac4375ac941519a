"""The requests of one gateway that a scheduler may still send something for."""

from collections.abc import Iterator

from services.gateway.request_stream import RequestStream
from services.rpc.errors import AlreadyExists


class LiveRequests:
    """By internal id, and by (principal, client's id) while its client may still abort it."""

    def __init__(self) -> None:
        self._streams: dict[bytes, RequestStream] = {}
        self._client_ids: dict[tuple[str, str], RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        """All of them, also while some are removed."""
        return iter(list(self._streams.values()))

    def add(self, stream: RequestStream) -> None:
        """Raises AlreadyExists where the client's id lives."""
        key = _client_key(stream)
        if key in self._client_ids:
            raise AlreadyExists(
                f"generation.request_id: a request with the id {key[1]!r} is running",
                reason="REQUEST_ID_IN_USE",
                metadata={"field": "generation.request_id"},
            )
        self._streams[stream.request_id] = stream
        self._client_ids[key] = stream

    def get(self, request_id: bytes) -> RequestStream | None:
        """The request with this internal id."""
        return self._streams.get(request_id)

    def of_client(self, principal: str, client_request_id: str) -> RequestStream | None:
        """The request that this principal calls `client_request_id`."""
        return self._client_ids.get((principal, client_request_id))

    def release_client_id(self, stream: RequestStream) -> None:
        """The client's id may be used again; the request itself goes on until its scheduler has ended it."""
        key = _client_key(stream)
        if self._client_ids.get(key) is stream:
            del self._client_ids[key]

    def remove(self, stream: RequestStream) -> None:
        """Nothing more will come for this request."""
        self.release_client_id(stream)
        self._streams.pop(stream.request_id, None)


def _client_key(stream: RequestStream) -> tuple[str, str]:
    return stream.submission.principal, stream.submission.client_request_id
