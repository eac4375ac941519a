"""What a cluster must look like when every stream is over: nothing leaked, nothing left in Redis, nobody ended by itself."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cluster import GROUP, Cluster
from tests.system.role_process import RoleProcess

IDLE_TIMEOUT_S = 20.0
KEYS_TIMEOUT_S = 10.0
POLL_S = 0.1

KEPT_KEYS = {f"tessera:{{{GROUP}}}:{name}".encode() for name in ("meta", "lease", "a:blocks", "b:blocks")}
"""What may stay in an idle group's store: who leads, and what the workers' prefix caches hold."""

BAD_SIGNS = ("Traceback (most recent call last)", '"level": "error"', '"level": "critical"')
"""Lines that no process may log, whatever happens to the others."""


@dataclass(slots=True)
class Aftermath:
    """Counts; all must be 0."""

    leaked_blocks: int = 0
    orphan_keys: int = 0
    recomputed: int = 0  # positions that a takeover computed again although a reachable worker held them
    died: int = 0  # processes that nobody killed and that are gone
    bad_signs: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether everything was given back."""
        return not (self.leaked_blocks or self.orphan_keys or self.recomputed or self.died or self.bad_signs or self.complaints)


class Inspector:
    """Inspects one cluster after each of several scenarios; remembers what earlier ones left in logs and counters."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._read_bytes: dict[Path, int] = {}
        self._checks_before: dict[Path, int] = {}
        self._recomputed_before: dict[Path, int] = {}

    def inspect(self) -> Aftermath:
        """To be called when no stream runs. Waits until the leader has found itself idle and checked its integrity."""
        found = Aftermath()
        self._check_processes(found)
        if not found.died:
            self._check_leader(found)
            self._check_store(found)
        self._check_logs(found)
        return found

    def _check_processes(self, found: Aftermath) -> None:
        for process in self._cluster.processes:
            if not process.is_running:
                found.died += 1
                found.complaints.append(f"{process.name} is gone:\n{process.log_tail()}")
        if self._cluster.redis.poll() is not None:
            found.died += 1
            found.complaints.append("redis is gone")

    def _check_leader(self, found: Aftermath) -> None:
        leader = self._cluster.leader()
        known = self._checks_before.get(leader.log, 0)
        if not _until(lambda: len(_checks(leader)) > known, IDLE_TIMEOUT_S):
            found.complaints.append(f"{leader.name} does not say that it is idle and whole:\n{leader.log_tail()}")
            return
        checks = _checks(leader)
        self._checks_before[leader.log] = len(checks)
        load = checks[-1]
        found.leaked_blocks = load["num_blocks"] - load["num_free_blocks"]
        if found.leaked_blocks:
            found.complaints.append(f"{leader.name}: {load}")
        before = self._recomputed_before.get(leader.log, 0)
        counted = load["recomputed_positions"]
        found.recomputed = counted - before if counted >= before else counted
        self._recomputed_before[leader.log] = counted

    def _check_store(self, found: Aftermath) -> None:
        with self._cluster.store() as store:
            left = set()

            def is_empty() -> bool:
                left.clear()
                left.update(key for key in store.scan_iter() if key not in KEPT_KEYS)
                return not left

            if not _until(is_empty, KEYS_TIMEOUT_S):
                found.orphan_keys = len(left)
                found.complaints.append(f"keys left in redis: {sorted(left)}")

    def _check_logs(self, found: Aftermath) -> None:
        for process in self._cluster.processes:
            for log in process.logs:
                begun = self._read_bytes.get(log, 0)
                with log.open("rb") as file:
                    file.seek(begun)
                    new = file.read()
                self._read_bytes[log] = begun + len(new)
                lines = new.decode(errors="replace").splitlines()
                bad = [number for number, line in enumerate(lines) if any(sign in line for sign in BAD_SIGNS)]
                found.bad_signs += len(bad)
                if bad:
                    found.complaints.append(f"{log.name}:\n" + "\n".join(lines[bad[0] : bad[0] + 25]))


def _checks(leader: RoleProcess) -> list[dict[str, int]]:
    """Its load at each time that it was idle and found its parts in agreement."""
    return [said for said in leader.events() if said["event"] == "integrity checked"]  # type: ignore[misc]


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
