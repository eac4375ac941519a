"""The client of operators: what a group does and how it is, its requests, and what may be done to it while it runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from types import TracebackType
from typing import Any, Self

from tessera.client.connection import Gateways, Tls, metadata_of, open_channel, split_addresses
from tessera.client.short_calls import ask
from tessera.v1 import admin_pb2 as pb
from tessera.v1 import admin_pb2_grpc

PAGE_SIZE_MAX = 1000


class WorkerState(Enum):
    """Whether a worker takes requests."""

    SERVING = "serving"
    LEAVING = "leaving"  # it is to end: its requests go to others
    DRAINING = "draining"  # an operator drains it: its requests go to others
    DRAINED = "drained"  # as DRAINING, and it holds no request: it can be stopped
    AWAY = "away"  # it does not answer


class RequestState(Enum):
    """Where a request is."""

    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # it holds KV in a worker's pool
    SWAPPED = "swapped"  # its KV is in a worker's host memory


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker; tokens are in whole KV blocks that requests hold, and that there are."""

    address: str
    state: WorkerState
    num_running: int
    num_swapped: int
    used_kv_tokens: int
    total_kv_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """The whole group at this moment; `prefix_hit_rate`, 0 to 1, is since the leader began. `num_waiting_uncached_tokens` is an upper bound."""

    num_running: int
    num_waiting: int
    num_swapped: int
    used_kv_tokens: int
    total_kv_tokens: int
    prefix_hit_rate: float
    generation_tokens_per_s: float
    num_waiting_uncached_tokens: int
    max_running: int
    workers: tuple[WorkerLoad, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    """What a group does, and how it is. Totals are since its leader began, `uptime_ms` ago."""

    model: str
    epoch: int
    uptime_ms: int
    admission_paused: bool
    durable: bool
    journal_lag_records: int
    journal_lag_ms: int
    num_submitted: int
    num_ended: int
    num_sampled_tokens: int
    num_preemptions: int
    num_readable: int
    load: Load


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request that waits or runs; `worker` is empty while it waits."""

    id: str
    client_request_id: str
    principal: str
    state: RequestState
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    age_ms: int
    worker: str
    priority: int


@dataclass(frozen=True, slots=True)
class CacheReset:
    """Blocks that were forgotten, and that stay cached since requests hold them."""

    num_forgotten_blocks: int
    num_held_blocks: int


_WORKER_STATES = {pb.WorkerState.Value(f"WORKER_STATE_{state.name}"): state for state in WorkerState}
_REQUEST_STATES = {pb.RequestState.Value(f"REQUEST_STATE_{state.name}"): state for state in RequestState}


class AdminClient:
    """Asks the leading scheduler of a group through one of its gateways. Close it, or use it as a context manager; threads may share it. Calls
    raise TesseraError: Unavailable where no scheduler leads, or it was lost before it answered (what was asked may have been done, and may be
    asked again); AccessDenied where the token has not the role `admin`."""

    def __init__(self, addresses: str | Sequence[str], *, tls: Tls | None = None, token: str = "") -> None:
        """As for `Client`."""
        self._gateways = Gateways(split_addresses(addresses))
        self._metadata = metadata_of(token)
        self._channels = [open_channel(address, tls) for address in self._gateways.addresses]
        self._stubs: list[Any] = [admin_pb2_grpc.AdminServiceStub(channel) for channel in self._channels]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and connections."""
        for channel in self._channels:
            channel.close()

    def stats(self) -> Stats:
        """What the group does, and how it is."""
        message = self._ask("GetStats", pb.GetStatsRequest())
        return Stats(**_fields(message, Stats, load=_load(message.load)))

    def requests(self, limit: int | None = None) -> list[RequestInfo]:
        """The requests that wait or run, in the order of their arrival; the first `limit` of them. They change while they are listed."""
        return list(islice(self._listed(limit), limit))

    def abort(self, request_id: str = "", *, principal: str | None = None) -> int:
        """End the request of this `RequestInfo.id`, or all of a principal; returns how many. NotFound for an id that none has."""
        if bool(request_id) == (principal is not None):
            raise ValueError("give a request_id, or a principal")
        target = {"id": request_id} if request_id else {"principal": principal}
        return int(self._ask("AbortRequests", pb.AbortRequestsRequest(**target)).num_aborted)

    def reset_prefix_cache(self) -> CacheReset:
        """Forget the cached prefixes that no request holds, for good."""
        message = self._ask("ResetPrefixCache", pb.ResetPrefixCacheRequest())
        return CacheReset(message.num_forgotten_blocks, message.num_held_blocks)

    def pause_admission(self) -> None:
        """New requests are Unavailable until admission is resumed, or another scheduler leads."""
        self._ask("PauseAdmission", pb.PauseAdmissionRequest())

    def resume_admission(self) -> None:
        """New requests are taken in."""
        self._ask("ResumeAdmission", pb.ResumeAdmissionRequest())

    def drain_worker(self, address: str) -> int:
        """Give a worker no more requests, and its own to others; returns how many it still holds. NotFound where it is none of the group's."""
        return int(self._ask("DrainWorker", pb.DrainWorkerRequest(address=address)).num_requests)

    def undrain_worker(self, address: str) -> None:
        """A drained worker takes requests again."""
        self._ask("UndrainWorker", pb.UndrainWorkerRequest(address=address))

    def _listed(self, limit: int | None) -> Iterator[RequestInfo]:
        size, token = PAGE_SIZE_MAX if limit is None else max(1, min(limit, PAGE_SIZE_MAX)), ""
        while True:
            page = self._ask("ListRequests", pb.ListRequestsRequest(page_size=size, page_token=token))
            for message in page.requests:
                yield RequestInfo(**_fields(message, RequestInfo, state=_REQUEST_STATES[message.state]))
            token = page.next_page_token
            if not token:
                return

    def _ask(self, method: str, request: Any) -> Any:
        return ask(self._gateways, self._stubs, method, request, self._metadata)


def _load(message: pb.Load) -> Load:
    workers = [WorkerLoad(**_fields(worker, WorkerLoad, state=_WORKER_STATES[worker.state])) for worker in message.workers]
    return Load(**_fields(message, Load, workers=tuple(workers)))


def _fields(message: Any, kind: type[Any], **converted: Any) -> dict[str, Any]:
    """Values for the fields of `kind`: those of the message by the same names, but for what is converted already."""
    return {name: getattr(message, name) for name in kind.__dataclass_fields__ if name not in converted} | converted
