"""What must hold of the whole system, seen from outside: watched while it runs, and asked when it has come to rest."""

from typing import Any

from services.scheduler.core.record import StoredState
from services.scheduler.core.replica import Replica
from services.scheduler.core.scheduler import Scheduler
from tessera.values.identity import Epoch
from tessera.values.report import SlotReport, WorkerReport
from tests.services.scheduler.core.fake_worker import FakeWorker, prefix_digests
from tests.simulation.world import Violation, World


class Oracle:
    """Knows what workers physically hold. `is_strict`: no position that a reachable worker held when a scheduler took over may be computed
    again; only for runs in which nothing but schedulers and sessions fail."""

    def __init__(self, world: World, is_strict: bool) -> None:
        self._world = world
        self.is_strict = is_strict
        self.num_recomputed = 0
        self.num_takeovers = 0
        self._held: dict[str, dict[tuple[bytes, int], int]] = {}
        self._is_due: set[str] = set()
        self._outputs: dict[str, list[int]] = {}
        self._machines: dict[str, FakeWorker] = {}

    def expects(self, client_request_id: str, token_ids: list[int]) -> None:
        """What the model gives for a request."""
        self._outputs[client_request_id] = token_ids

    def watches(self, worker: str, machine: FakeWorker) -> None:
        """The memory of a worker."""
        self._machines[worker] = machine

    def is_fenced_anew(self, worker: str) -> None:
        """A new leader attaches this worker; its next report counts."""
        self._is_due.add(worker)

    def reported(self, worker: str, report: WorkerReport, machine: Any) -> None:
        """Remember the KV of live slots at the moment of a takeover."""
        if worker not in self._is_due:
            return
        self._is_due.discard(worker)
        held = self._held[worker] = {}
        size = report.description.geometry.block_size
        for slot in report.slots:
            memory = machine.host_kv if slot.is_swapped else machine.kv
            for position in range(slot.computed_len):
                block = int(slot.block_table[position // size])
                held[slot.request_id, position] = int(memory[block, position % size])

    def drops(self, worker: str, request_id: bytes) -> None:
        """A slot is given up. What its leader has decided to compute again does not count; that it began in this slot, `joined` checks."""
        held = self._held.get(worker, {})
        for key in [key for key in held if key[0] == request_id]:
            del held[key]

    def joined(self, epoch: Epoch, scheduler: Scheduler, reports: dict[str, WorkerReport], stored: StoredState) -> None:
        """A new leader has begun: everything that its workers reported as computed is held or cached."""
        for request in stored.requests.values():
            tokens = self._outputs[request.submission.client_request_id]
            told = request.output_token_ids.tolist()
            assert told == tokens[: len(told)], f"the store tells {told}, an undisturbed run gives {tokens}"
        for sequence in scheduler.requests():
            known = stored.requests.get(sequence.request_id)
            assert known is None or sequence.attempt >= known.attempt, "an attempt is behind the journal's"
        for worker, report in reports.items():
            replica, machine = scheduler.replica(worker), self._machines[worker]
            assert replica is not None
            if (machine.epoch, machine.nonce) != (epoch, report.nonce):
                continue  # it has restarted since, or obeys somebody else
            self._check_memory(replica, machine)
            if not self.is_strict:
                continue
            tables = [sequence.table.block_ids for sequence in replica.running.values()]
            tables += [orphan.table.block_ids for orphan in replica.orphans.values()]
            kept = {block for table in tables for block in table} | {entry.block_id for entry in replica.manager.published()}
            host_tables = [sequence.table.host_block_ids for sequence in replica.swapped.values()]
            host_tables += [orphan.table.host_block_ids for orphan in replica.orphans.values()]
            kept_on_host = {block for table in host_tables for block in table}
            for slot in report.slots:
                full = slot.block_table[: slot.computed_len // report.description.geometry.block_size].tolist()
                lost = set(full) - (kept_on_host if slot.is_swapped else kept)
                assert not lost, f"blocks {lost} of slot {slot.slot} of {worker} are lost"
                self._check_slot(scheduler, worker, slot, stored)

    def _check_memory(self, replica: Replica, machine: FakeWorker) -> None:
        """What a new leader believes of a worker's memory is there: the KV of prefix-cache entries, and of sequences that go on."""
        size = machine.geometry.block_size
        entries = {entry.digest: entry for entry in replica.manager.published()}
        for entry in replica.manager.published():
            tokens, link = list(entry.token_ids), entry.parent
            while link is not None:
                tokens, link = [*entries[link].token_ids, *tokens], entries[link].parent
            held = machine.kv[entry.block_id].tolist()
            assert held == prefix_digests(tokens)[-size:], f"block {entry.block_id} of {machine.name} does not hold {tokens}"
        for sequence in (*replica.running.values(), *replica.swapped.values()):
            ledger, table = sequence.ledger, sequence.table
            memory, block_ids = (
                (machine.host_kv, table.host_block_ids) if table.host_block_ids else (machine.kv, table.block_ids)
            )
            digests = prefix_digests(ledger.token_ids[: ledger.computed_len])
            held = [int(memory[block_ids[at // size], at % size]) for at in range(ledger.computed_len)]
            assert held == digests, f"{sequence.request_id.hex()[:4]} goes on with the KV of something else"

    def _check_slot(self, scheduler: Scheduler, worker: str, slot: SlotReport, stored: StoredState) -> None:
        sequence, known = scheduler.request(slot.request_id), stored.requests.get(slot.request_id)
        if sequence is None or known is None or sequence.finish is not None or slot.attempt < known.attempt:
            return
        is_there = (sequence.worker, sequence.slot) == (worker, slot.slot)
        assert is_there or sequence.attempt > slot.attempt, f"slot {slot.slot} of {worker} is not gone on with"

    def computes(self, worker: str, request_id: bytes, position: int, digest: int, kv: Any) -> None:
        """A position is about to be computed."""
        held = self._held.get(worker)
        if not held or held.pop((request_id, position), None) != digest:
            return
        if (kv[:, position % kv.shape[1]] == digest).any():
            self.num_recomputed += 1
            self._world.log("RECOMPUTED", request_id.hex()[:4], "position", position, "on", worker)
            if self.is_strict:
                raise Violation(f"position {position} of {request_id.hex()[:4]} was held by {worker}, and is computed again")
