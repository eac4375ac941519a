"""The requests of one gateway that a scheduler may still send something for."""

from collections import Counter
from collections.abc import Iterator

from services.gateway.refusals import rejection_of, taken_over
from services.gateway.request_stream import RequestStream
from tessera.values.session import LiveRequest, Rejected, TakenOver

HELLO_REQUESTS_MAX = 65_536
HELLO_TOKENS_MAX = 16 << 20
"""Most that a Hello lists: well below the largest message between our processes. What is beyond is submitted after the Hello."""


class LiveRequests:
    """By internal id, and by (principal, client's id) while a client may still abort them: two streams of one request have one until it
    is known that they are of one."""

    def __init__(self) -> None:
        self._streams: dict[bytes, RequestStream] = {}
        self._client_ids: dict[tuple[str, str], list[RequestStream]] = {}
        self._reserved: Counter[str] = Counter()  # tokens by principal; of those alone that have any
        self.num_reserved = 0  # tokens, of all

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[RequestStream]:
        """All of them, also while some are removed."""
        return iter(list(self._streams.values()))

    def add(self, stream: RequestStream) -> None:
        """A request that is to be submitted."""
        self._streams[stream.request_id] = stream
        self._reserve(stream.submission.principal, stream.num_reserved)
        self._client_ids.setdefault(_client_key(stream), []).append(stream)

    def reserved_of(self, principal: str) -> int:
        """Tokens that all requests of a principal may come to."""
        return self._reserved[principal]  # which adds nothing: it is a Counter

    def get(self, request_id: bytes) -> RequestStream | None:
        """The request with this internal id."""
        return self._streams.get(request_id)

    def of_client(self, principal: str, client_request_id: str) -> tuple[RequestStream, ...]:
        """The streams of what this principal calls `client_request_id`."""
        return tuple(self._client_ids.get((principal, client_request_id), ()))

    def rename(self, stream: RequestStream, request_id: bytes) -> RequestStream | None:
        """`stream` goes on with what lives as `request_id`. Returns the stream that had it until now, which is no longer live."""
        earlier = self._streams.get(request_id)
        if earlier is stream:
            return None
        if earlier is not None:
            self.remove(earlier)
        del self._streams[stream.request_id]
        stream.go_on_as(request_id)
        self._streams[request_id] = stream
        return earlier

    def known_as(self, request_id: bytes, subscriber: int, known_request_id: bytes) -> None:
        """A stream goes on with an older request; if that has a stream here, this one takes it over."""
        stream = self._of_subscriber(request_id, subscriber)
        earlier = self.rename(stream, known_request_id) if stream is not None else None
        if earlier is not None:
            earlier.close(taken_over())

    def close(self, request_id: bytes, subscriber: int, why: Rejected | TakenOver) -> None:
        """The stream of this subscriber ends, and the request is no longer live here; nothing where another one has it by now."""
        stream = self._of_subscriber(request_id, subscriber)
        if stream is None:
            return
        stream.close(rejection_of(why, stream.prompt_field) if isinstance(why, Rejected) else taken_over())
        self.remove(stream)

    def release_client_id(self, stream: RequestStream) -> None:
        """The client is done with this one; the request itself goes on until its scheduler has ended it."""
        key = _client_key(stream)
        streams = self._client_ids.get(key, [])
        if stream in streams:
            streams.remove(stream)
            if not streams:
                del self._client_ids[key]

    def remove(self, stream: RequestStream) -> None:
        """Nothing more will come for this request."""
        self.release_client_id(stream)
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
            self._reserve(stream.submission.principal, -stream.num_reserved)

    def _reserve(self, principal: str, num_tokens: int) -> None:
        self.num_reserved += num_tokens
        self._reserved[principal] += num_tokens
        if not self._reserved[principal]:
            del self._reserved[principal]

    def for_hello(self) -> tuple[LiveRequest, ...]:
        """What a Hello lists of them: all, within its bounds."""
        listed: list[LiveRequest] = []
        num_tokens = 0
        for stream in self:
            num_tokens += stream.num_tokens
            if len(listed) == HELLO_REQUESTS_MAX or num_tokens > HELLO_TOKENS_MAX:
                break
            listed.append(stream.live())
        return tuple(listed)

    def _of_subscriber(self, request_id: bytes, subscriber: int) -> RequestStream | None:
        stream = self._streams.get(request_id)
        return stream if stream is not None and stream.subscriber == subscriber else None


def _client_key(stream: RequestStream) -> tuple[str, str]:
    return stream.submission.principal, stream.submission.client_request_id
