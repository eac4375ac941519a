"""The result of joining what Redis, the workers and the gateways know: what a new leader starts from."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_manager.published_block import PublishedBlock
from services.scheduler.core.kept_logprobs import KeptLogprobs
from services.scheduler.core.record import Arrival
from tessera.values.finish import Finish
from tessera.values.logprobs import Logprobs
from tessera.values.report import SlotReport
from tessera.values.request import RequestTimings, Submission


@dataclass(frozen=True, slots=True)
class Adoption:
    """A live worker slot that goes on under the new leader: nothing of its computed length is computed again."""

    worker: str
    slot: SlotReport


@dataclass(frozen=True, slots=True)
class RecoveredRequest:
    """One request after the join. RUNNING iff `adoption` is set, FINISHED iff `finish` is, else WAITING. `attempt` is the highest that
    anybody has seen, which is not always that of the slot adopted: the next entry into a batch takes one above. `tokens_max` is the length
    that it was promised, `logprobs` and `prompt_logprobs` are what is known of them (see `StoredRequest`)."""

    submission: Submission
    arrival: Arrival
    subscriber: int
    attempt: int
    output_token_ids: tuple[int, ...]
    adoption: Adoption | None
    finish: Finish | None
    num_cached_tokens: int = 0
    timings: RequestTimings = RequestTimings()
    tokens_max: int = 0
    logprobs: KeptLogprobs | None = None
    prompt_logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class OrphanSlot:
    """A live slot of a request nobody has told the new leader about yet. Its blocks stay reserved until the grace ends:
    a late Submit or a gateway's claim adopts it; else it is dropped."""

    worker: str
    slot: SlotReport


@dataclass(frozen=True, slots=True)
class SlotToDrop:
    """A live slot that the first batch to this worker drops."""

    worker: str
    slot: int
    request_id: bytes
    attempt: int
    finish: Finish | None


@dataclass(frozen=True, slots=True)
class RecoveredWorker:
    """One worker after the join: `next_step` continues its numbering, `published` are the prefix-cache entries that hold."""

    worker: str
    boot_id: bytes
    next_step: int
    published: Sequence[PublishedBlock]


@dataclass(frozen=True, slots=True)
class Recovered:
    """Everything a new leader starts from. `last_record` is the number of the last record read from the store,
    `num_contradictions` how many sources told an output that another one contradicts (0 in a deterministic system)."""

    last_record: int
    requests: tuple[RecoveredRequest, ...]
    workers: tuple[RecoveredWorker, ...]
    orphans: tuple[OrphanSlot, ...]
    drops: tuple[SlotToDrop, ...]
    num_contradictions: int = 0
