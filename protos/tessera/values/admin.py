"""What an operator asks of a group through a gateway, and what its leader answers."""

from dataclasses import dataclass, field
from typing import TypeAlias

from tessera.values.load import GroupLoad

PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1000
"""Requests on one page of a list."""


@dataclass(frozen=True, slots=True, order=True)
class PageMark:
    """A place in the list of requests, which is in the order of arrival: (epoch number, counter)."""

    epoch_number: int
    counter: int


@dataclass(frozen=True, slots=True)
class GetStats:
    """Asks for `GroupStats`."""


@dataclass(frozen=True, slots=True)
class ListRequests:
    """Asks for the requests that have not ended and came after `after`; None: from the first on."""

    page_size: int = PAGE_SIZE_DEFAULT
    after: PageMark | None = None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """One request by its internal id, or all that belong to a principal; exactly one of the two is given."""

    request_id: bytes | None = None
    principal: str | None = None


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """The workers' prefix caches forget what no request holds."""


@dataclass(frozen=True, slots=True)
class SetAdmission:
    """Whether new requests are refused from now on; until the term ends."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class SetDrain:
    """Whether a worker is to be emptied; until its process or the term ends."""

    worker: str
    is_drained: bool


AdminCommand: TypeAlias = GetStats | ListRequests | AbortRequests | ResetPrefixCache | SetAdmission | SetDrain


@dataclass(frozen=True, slots=True)
class AdminQuery:
    """A gateway asks for an operator; `number` is its own, and comes back with the reply."""

    number: int
    command: AdminCommand


@dataclass(frozen=True, slots=True)
class GroupStats:
    """A group at one moment; totals are since its term began, `uptime_ms` ago."""

    model: str
    epoch: int
    uptime_ms: int
    is_admission_paused: bool
    is_durable: bool
    journal_lag_records: int  # made, and not acknowledged by the store
    journal_lag_ms: int  # the age of the oldest of them
    num_submitted: int
    num_ended: int
    num_sampled_tokens: int
    num_preemptions: int
    num_readable: int  # ended, and still there for who resumes
    load: GroupLoad = field(default_factory=GroupLoad)


@dataclass(frozen=True, slots=True)
class RequestView:
    """What an operator sees of a request: neither its text nor its tokens. `status` is a name of `SequenceStatus`; `worker` is empty while
    it waits. `num_cached_tokens` of the prompt were found cached."""

    request_id: bytes
    client_request_id: str
    principal: str
    status: str
    prompt_len: int
    output_len: int
    num_cached_tokens: int
    age_ms: int
    worker: str
    priority: int


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Requests in the order of their arrival. `next` is None where there are no more."""

    requests: tuple[RequestView, ...]
    next: PageMark | None = None


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """So many requests ended."""

    count: int


@dataclass(frozen=True, slots=True)
class PrefixCacheReset:
    """So many blocks were forgotten; so many requests hold, and stay cached."""

    num_forgotten_blocks: int
    num_held_blocks: int


@dataclass(frozen=True, slots=True)
class AdmissionSet:
    """`SetAdmission` is done."""

    is_paused: bool


@dataclass(frozen=True, slots=True)
class WorkerDrained:
    """The worker takes no more requests, and still holds so many."""

    num_requests: int


@dataclass(frozen=True, slots=True)
class WorkerUndrained:
    """The worker takes requests."""


@dataclass(frozen=True, slots=True)
class NoSuch:
    """What the command names is not there; nothing changed. `field` is where the command names it, `text` for people."""

    field: str
    text: str


AdminAnswer: TypeAlias = (
    GroupStats | RequestPage | RequestsAborted | PrefixCacheReset | AdmissionSet | WorkerDrained | WorkerUndrained | NoSuch
)


@dataclass(frozen=True, slots=True)
class AdminReply:
    """The answer to the query of this number."""

    number: int
    answer: AdminAnswer
