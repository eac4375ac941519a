"""What workers and gateways tell a term that does not lead yet: the sources, beside the store, that recovery joins."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from services.scheduler.core.fleet import check_layout, check_model
from services.scheduler.core.record import StoredState
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.stop_rules import StopRules
from services.scheduler.sessions import GatewaySession
from tessera.values.batch import ScheduledBatch
from tessera.values.finish import Finish
from tessera.values.model import ModelInfo
from tessera.values.report import WorkerReport
from tessera.values.request import Submission
from tessera.values.session import Hello


class Gathering:
    """Reports and Hellos of those that are there at present. Given up after the join: they are large, and grow old."""

    def __init__(self) -> None:
        self.reports: dict[str, WorkerReport] = {}
        self.senders: dict[str, Callable[[ScheduledBatch], None]] = {}
        self.leaving: set[str] = set()  # of those who reported
        self._hellos: dict[GatewaySession, Hello] = {}
        self._changed = asyncio.Event()

    def worker_attached(self, address: str, report: WorkerReport, send: Callable[[ScheduledBatch], None]) -> None:
        """A worker reported. Raises ModelMismatch unless it serves what those do that are there."""
        for other in self.reports.values():
            check_model(address, report.description, other.description.model)
            check_layout(address, report.description.geometry, other.description.geometry)
        self.reports[address] = report
        self.senders[address] = send
        self._changed.set()

    def worker_leaving(self, address: str) -> None:
        """It is to end soon."""
        self.leaving.add(address)

    def worker_detached(self, address: str) -> None:
        """Its report says nothing any more."""
        self.leaving.discard(address)
        self.reports.pop(address, None)
        self.senders.pop(address, None)

    @contextlib.contextmanager
    def hello(self, session: GatewaySession, hello: Hello) -> Iterator[None]:
        """A gateway waits for its answer while the body runs."""
        self._hellos[session] = hello
        self._changed.set()
        try:
            yield
        finally:
            del self._hellos[session]

    async def hear_workers(self, expected: frozenset[str], wait_s: float) -> None:
        """Wait for one report at least, and at most `wait_s` for those of the `expected` workers."""
        await self._until(lambda: bool(self.reports))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._until(lambda: expected <= self.reports.keys())
        await self._until(lambda: bool(self.reports))  # it may have gone meanwhile

    async def hear_gateways(self, stored: StoredState, wait_s: float) -> None:
        """Give gateways time to say what they hold of the requests that live, at most `wait_s`. Where the store has a request's end, a slot
        that still holds it was only not dropped yet: nobody will claim it."""
        ended = {request_id for request_id, request in stored.requests.items() if request.finish is not None}
        in_slots = {slot.request_id for report in self.reports.values() for slot in report.slots}
        live = (stored.requests.keys() | in_slots) - ended
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._until(lambda: live <= {claim.request_id for hello in self._hellos.values() for claim in hello.live})

    def join(self, stored: StoredState) -> Recovered:
        """What all sources together say. At least one worker has reported."""
        model = next(iter(self.reports.values())).description.model
        return join(stored, self.reports, self._claims_on(model), self._stop_rule(model, stored))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _claims_on(self, model: ModelInfo) -> list[GatewayClaim]:
        """What gateways hold. What cannot be output of `model` is left out: `Leader.session_opened` answers it."""
        return [
            GatewayClaim(live.request_id, live.subscriber, live.token_ids)
            for hello in self._hellos.values()
            if hello.tokenizer_digest == model.tokenizer_digest
            for live in hello.live
            if max(live.token_ids, default=0) < model.vocab_size
        ]

    def _stop_rule(self, model: ModelInfo, stored: StoredState) -> Callable[[Submission, tuple[int, ...]], Finish | None]:
        """Ends a stored request by its tokens, but never before what it was promised: a larger worker may only be away."""
        pool_len_max = max(report.description.geometry.num_tokens for report in self.reports.values()) + 1

        def first_stop(submission: Submission, output_token_ids: tuple[int, ...]) -> Finish | None:
            promised_len = stored.requests[submission.request_id].tokens_max
            return StopRules.of(submission, model, max(pool_len_max, promised_len)).first_stop(output_token_ids)

        return first_stop
