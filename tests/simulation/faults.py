"""Faults: what breaks, when and for how long."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.gateway_actor import SimGateway
from tests.simulation.scheduler_actor import SimScheduler
from tests.simulation.worker_actor import SimWorker

if TYPE_CHECKING:
    from tests.simulation.system import System

SECOND = 1_000_000
HANG = 13 * SECOND
"""Longer than the least time after which a step is overdue."""

_SPARES = frozenset(("drain", "kill", "pause"))


@dataclass(frozen=True)
class Fault:
    """`victim` chooses among those there are; times in microseconds."""

    at: int
    kind: str
    victim: int
    duration: int

    @property
    def ends_at(self) -> int:
        return self.at + self.duration

    @property
    def spares_workers_and_store(self) -> bool:
        """Whether every position that a worker holds survives it."""
        verb, *what = self.kind.split()
        return what == ["session"] or (verb in _SPARES and what[0] in ("leader", "scheduler"))


def strike(fault: Fault, system: "System") -> None:
    """Let it happen."""
    verb, *what = fault.kind.split()
    duration = fault.duration
    if what == ["store"] and verb != "break":
        _strike_store(verb, duration, system)
        return
    groups = {
        "scheduler": system.schedulers,
        "worker": system.workers,
        "gateway": system.gateways,
        "leader": [scheduler for scheduler in system.schedulers if scheduler.term is not None] or system.schedulers,
        "client": [client for client in system.clients if not client.is_done] or system.clients,
        "store": [system.store],
    }
    if verb in ("cut", "slow"):
        one = groups[what[0]][fault.victim % len(groups[what[0]])]
        other = groups[what[1]][fault.victim // 7 % len(groups[what[1]])]
        (system.world.cut if verb == "cut" else system.world.slow_down)(one, other, duration)
        return
    if verb == "break":
        kinds = {"session": ("session",), "call": ("call",), "store": ("store",), "worker": ("execute", "attach")}[what[0]]
        ends = [end for actor in system.world.actors.values() for end in actor.ends if end.kind in kinds]
        if ends:
            end = ends[fault.victim % len(ends)]
            system.world.log("BREAK", end.kind, "of", end.owner.name)
            end.break_off()
        return
    victim = groups[what[0]][fault.victim % len(groups[what[0]])]
    if victim.is_down:
        return
    if verb == "kill":
        victim.crash(duration)
    elif verb == "drain":
        assert isinstance(victim, SimScheduler | SimWorker | SimGateway)
        if not victim.is_paused:
            victim.drain(duration)
    elif verb == "hang":
        assert isinstance(victim, SimWorker)
        victim.log("will HANG for", HANG)
        victim.hang = HANG
    else:
        victim.pause(duration)


def _strike_store(verb: str, duration: int, system: "System") -> None:
    store = system.store
    if store.is_down:
        return
    match verb:
        case "restart":
            store.crash(duration)
        case "empty":
            store.restart_empty(duration)
        case "older":
            store.restart_older(duration)
        case "full":
            store.fill(duration)
        case "pause":
            store.pause(duration)
