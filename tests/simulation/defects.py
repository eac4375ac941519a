"""Planted defects: one rule each taken out of the real code. The simulation must find every one of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from gateway.leadership import Answer, Leadership
from kv_manager.published_block import PublishedBlock
from kv_manager.published_blocks import PublishedBlocks
from services.scheduler.core import held_blocks, recovery
from services.scheduler.core.journal_call import Append, Applied, JournalReply
from services.scheduler.core.lease import LeaseHold, LeaseWatch
from services.scheduler.core.recovery import Tokens
from services.scheduler.leader import Leader
from services.scheduler.sessions import GatewaySession
from services.scheduler.store.memory import MemoryStore
from tessera.values.identity import Epoch
from tessera.values.report import WorkerReport
from tessera.values.session import Hello, HelloAck
from tests.simulation.gateway_actor import SimLink
from tests.simulation.worker_actor import SimWorker

Patch = pytest.MonkeyPatch

HELD_LEASE_TAKEN_US = 3_500_000
"""In the middle of the load."""


@dataclass(frozen=True)
class Defect:
    """`faults` bring it out within `seeds` seeds."""

    plant: Callable[[Patch], None]
    faults: str
    seeds: int


def _keep_overwritten_hashes(patch: Patch) -> None:
    """A prefix-cache entry is believed although its block was written since."""
    real = held_blocks.held_blocks

    def held(report: WorkerReport, recorded: Iterable[PublishedBlock]) -> PublishedBlocks:
        forgetful = replace(report, last_write_step=np.zeros_like(report.last_write_step))
        return real(forgetful, recorded)

    patch.setattr(recovery, "held_blocks", held)


def _apply_records_twice(patch: Patch) -> None:
    """The store does not see that it has the records of a retried call already."""
    real = MemoryStore._append

    def append(self: MemoryStore, epoch: Epoch, call: Append) -> JournalReply:
        side = self._complete
        if side is None or self.epoch != epoch or side.generation != call.generation or call.first > side.last + 1:
            return real(self, epoch, call)
        side.log.extend(call.log)
        side.last += len(call.log)
        num_needed = call.last - call.log_from + 1
        num_extra = side.last - call.last if num_needed else 0
        del side.log[: max(0, len(side.log) - num_needed - num_extra)]
        side.put(call.requests, call.pages)
        for request_id in call.forgotten:
            side.requests.pop(request_id, None)
        return Applied(side.last)

    patch.setattr(MemoryStore, "_append", append)


def _deliver_stale_frames(patch: Patch) -> None:
    """A gateway goes on listening to a leader that it has left."""
    patch.setattr(Leadership, "counts", lambda self, scheduler, epoch: True)
    patch.setattr(SimLink, "reopen", lambda self: None)
    _speak_after_a_pause(patch)


def _follow_lower_epochs(patch: Patch) -> None:
    """A gateway follows whoever has invited it last."""

    def invited(self: "Leadership[SimLink]", scheduler: SimLink, epoch: Epoch) -> Answer:
        self.highest, self.leader = epoch, scheduler
        self._invitations[scheduler] = epoch
        return Answer.FOLLOW

    patch.setattr(Leadership, "invited", invited)
    _speak_after_a_pause(patch)


def _speak_after_a_pause(patch: Patch) -> None:
    """A leader waits for no confirmation."""
    patch.setattr(LeaseHold, "may_speak", lambda self, now_us: True)
    patch.setattr(LeaseHold, "may_greet", lambda self, now_us: True)


def _adopt_old_attempts(patch: Patch) -> None:
    """A slot is adopted though the journal knows a later attempt."""

    def slot_to_adopt(
        stored: recovery.StoredRequest, live: list[recovery._LiveSlot], tokens: Tokens
    ) -> recovery._LiveSlot | None:
        known = [*stored.submission.prompt_token_ids.tolist(), *tokens]
        oldest_first = [(item, item.slot.computed_len) for item in reversed(live)]
        return next((item for item, end in oldest_first if item.slot.token_ids[:end].tolist() == known[:end]), None)

    patch.setattr(recovery, "_slot_to_adopt", slot_to_adopt)


def _adopt_nothing(patch: Patch) -> None:
    """Every request is computed again at a takeover: slower, and nothing else."""
    patch.setattr(recovery, "_slot_to_adopt", lambda stored, live, tokens: None)


def _take_held_leases(patch: Patch) -> None:
    """A standby takes, once, a lease that is held, and workers obey whoever speaks."""
    real = LeaseWatch.saw
    taken_at = [0]

    def saw(self: LeaseWatch, now_us: int, epoch: Epoch, is_held: bool, is_empty: bool) -> bool:
        may_lead = real(self, now_us, epoch, is_held, is_empty)
        if now_us < taken_at[0]:  # another run
            taken_at[0] = 0
        if is_held and now_us > HELD_LEASE_TAKEN_US and not taken_at[0]:
            taken_at[0] = now_us
            return True
        return may_lead

    patch.setattr(LeaseWatch, "saw", saw)
    patch.setattr(SimWorker, "is_fencing", False)


def _hear_earlier_sessions(patch: Patch) -> None:
    """A leader does not end the session that a gateway had before."""
    real = Leader.session_opened

    def opened(self: Leader, session: GatewaySession, hello: Hello) -> HelloAck:
        self._sessions.clear()
        return real(self, session, hello)

    patch.setattr(Leader, "session_opened", opened)


DEFECTS = {
    "a hash is not dropped after an overwrite": Defect(_keep_overwritten_hashes, "lag", 80),
    "a record is applied twice": Defect(_apply_records_twice, "lag", 60),
    "a stale leader's frame is delivered": Defect(_deliver_stale_frames, "stale", 60),
    "a gateway does not refuse lower epochs": Defect(_follow_lower_epochs, "stale", 30),
    "a slot is adopted at an old attempt": Defect(_adopt_old_attempts, "moved", 40),
    "positions that a worker holds are computed again": Defect(_adopt_nothing, "scheduler", 20),
    "a lease is taken too early, and no worker fences": Defect(_take_held_leases, "none", 20),
    "an earlier session of a gateway is heard": Defect(_hear_earlier_sessions, "cut", 80),
}
