"""The interleavings find what they are for: each of these defects, planted, makes the test of its name fail."""

import pytest
import recovery_rig
import test_interleavings
import test_several_workers

from services.scheduler.core import recovery, scheduler
from services.scheduler.core.journal_call import Append, Applied, JournalReply
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.sequence import Sequence
from services.scheduler.store.memory import MemoryStore
from tessera.values.identity import Epoch


def test_a_hash_that_is_not_dropped_after_its_block_was_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker reads another request's KV, and says so."""
    scenario = test_interleavings.test_a_hash_journalled_and_its_block_then_evicted_and_overwritten
    scenario()
    monkeypatch.setattr(recovery, "held_blocks", lambda report, recorded: tuple(recorded))
    with pytest.raises(AssertionError, match="is not its own"):
        scenario()


def test_a_record_that_is_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does not see that it has the records of a call already: the next leader reads tokens that stand there twice."""

    def append(self: MemoryStore, epoch: Epoch, call: Append) -> JournalReply:
        side = self._complete
        assert side is not None
        side.log.extend(call.log)
        side.last += len(call.log)
        side.put(call.requests, call.pages)
        return Applied(side.last)

    scenario = test_interleavings.test_a_script_applied_whose_reply_was_lost_and_that_is_tried_again
    scenario(dies=True)
    monkeypatch.setattr(MemoryStore, "_append", append)
    with pytest.raises(AssertionError, match="instead of"):
        scenario(dies=True)


def test_a_frame_of_a_stale_leader_that_is_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway listens to whoever speaks. Its client would be sent a token twice."""
    scenario = test_interleavings.test_old_leader_stopped_and_continued
    scenario()
    monkeypatch.setattr(recovery_rig.Gateway, "listens_to", lambda *_: True)
    with pytest.raises(AssertionError, match="was due"):
        scenario()


def test_a_slot_that_is_adopted_at_an_old_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The join does not ask whether the store knows of a later one."""
    scenario = test_several_workers.test_a_slot_that_the_leader_had_moved_on_from_is_not_gone_back_to
    scenario()
    monkeypatch.setattr(recovery, "_slot_to_adopt", lambda stored, live, tokens: live[0] if live else None)
    with pytest.raises(AssertionError):
        scenario()


def test_an_attempt_that_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker has seen of a request that is given up is forgotten."""
    real = scheduler.adopt_orphans

    def forgetful(lifecycle: Lifecycle, sequence: Sequence) -> int:
        count = real(lifecycle, sequence)
        sequence.attempt_floor = 0
        return count

    scenario = test_several_workers.test_an_orphan_whose_gateway_comes_after_the_grace
    scenario()
    monkeypatch.setattr(scheduler, "adopt_orphans", forgetful)
    with pytest.raises(AssertionError, match="an attempt came again"):
        scenario()
