"""Planted defects: one rule each taken out of the real code. The simulation must find every one of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from gateway.leadership import Answer, Leadership
from kv_manager.published_block import PublishedBlock
from services.scheduler.core import held_blocks, recovery
from services.scheduler.core.journal_call import Append, Applied, JournalReply
from services.scheduler.core.lease import LeaseHold, LeaseWatch
from services.scheduler.core.recovery import Tokens
from services.scheduler.store.memory import MemoryStore
from tessera.values.identity import Epoch
from tessera.values.report import WorkerReport
from tests.simulation.gateway_actor import SimLink
from tests.simulation.worker_actor import SimWorker

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Defect:
    """`faults` bring it out within `seeds` seeds."""

    plant: Callable[[Patch], None]
    faults: str
    seeds: int


def _keep_overwritten_hashes(patch: Patch) -> None:
    """A prefix-cache entry is believed although its block was written since."""
    real = held_blocks.held_blocks

    def held(report: WorkerReport, recorded: Iterable[PublishedBlock]) -> tuple[PublishedBlock, ...]:
        entries = {entry.block_id: entry for entry in real(report, ())}
        return tuple({**{entry.block_id: entry for entry in recorded}, **entries}.values())

    patch.setattr(recovery, "held_blocks", held)


def _apply_records_twice(patch: Patch) -> None:
    """The store carries a retried call out again."""

    def append(self: MemoryStore, epoch: Epoch, call: Append) -> JournalReply:
        side = self._complete
        if side is not None and side.generation == call.generation and self.epoch == epoch and call.last <= side.last:
            side.log.extend(call.log)
            side.last += len(call.log)
            return Applied(side.last)
        return real(self, epoch, call)

    real = MemoryStore._append
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
    """A leader does not wait for a confirmation."""
    patch.setattr(LeaseHold, "may_speak", lambda self, now_us: True)


def _adopt_old_attempts(patch: Patch) -> None:
    """A slot is adopted though the journal knows a later attempt."""

    def slot_to_adopt(
        stored: recovery.StoredRequest, live: list[recovery._LiveSlot], tokens: Tokens
    ) -> recovery._LiveSlot | None:
        known = [*stored.submission.prompt_token_ids.tolist(), *tokens]
        fit = (
            item
            for item in reversed(live)
            if item.slot.token_ids[: item.slot.computed_len].tolist() == known[: item.slot.computed_len]
        )
        return next(fit, None)

    patch.setattr(recovery, "_slot_to_adopt", slot_to_adopt)


def _take_held_leases(patch: Patch) -> None:
    """A standby does not wait for the lease to end, and workers obey whoever speaks."""
    patch.setattr(LeaseWatch, "saw", lambda self, now_us, epoch, is_held, is_empty: True)
    patch.setattr(SimWorker, "is_fencing", False)


DEFECTS = {
    "a hash is not dropped after an overwrite": Defect(_keep_overwritten_hashes, "scheduler", 300),
    "a record is applied twice": Defect(_apply_records_twice, "store", 300),
    "a stale leader's frame is delivered": Defect(_deliver_stale_frames, "scheduler", 300),
    "a gateway does not refuse lower epochs": Defect(_follow_lower_epochs, "scheduler", 300),
    "a slot is adopted at an old attempt": Defect(_adopt_old_attempts, "scheduler", 300),
    "a lease is taken too early, and no worker fences": Defect(_take_held_leases, "none", 20),
}
