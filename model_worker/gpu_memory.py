"""How much of a GPU's memory is left for the KV pool, and why: for a worker whose pool has no size given, as one on a CPU has."""

from collections.abc import Sequence
from dataclasses import dataclass

from tessera.values.config import ConfigError

MIB = 1 << 20


class NoMemoryForKV(ConfigError):
    """Weights and what computing takes leave no room for a KV pool; the message has the numbers."""


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """What one rank has measured of its device, in bytes, before it reserves the pool. Model and computing do not overlap: `activations` is
    what a pass of the largest batch took at its peak beyond what was there before it."""

    total: int
    weights: int
    activations: int
    communication: int = 0  # buffers of collectives, which no allocator of torch's counts
    graphs: int = 0  # captured decode batches and their private pools
    others: int = 0  # taken by other processes

    def kv_bytes(self, utilization: float) -> int:
        """What the pool may take where this process, and others, may have `utilization` of the device; negative where it is overdrawn."""
        return int(self.total * utilization) - self.others - self.weights - self.activations - self.communication - self.graphs


@dataclass(frozen=True, slots=True)
class KVBudget:
    """`kv_bytes` for each rank, and `explanation`, a line per rank and one for all."""

    kv_bytes: int
    explanation: tuple[str, ...]


def kv_budget(ranks: Sequence[GPUMemory], utilization: float) -> KVBudget:
    """What every rank can give to its pool: the least of all, since a block has a part on each. `utilization` is in (0, 1]. Raises
    NoMemoryForKV, ConfigError."""
    if not 0.0 < utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, got {utilization}")
    budgets = [memory.kv_bytes(utilization) for memory in ranks]
    least = min(range(len(ranks)), key=budgets.__getitem__)
    lines = [_line(rank, memory, utilization) for rank, memory in enumerate(ranks)]
    if budgets[least] <= 0:
        raise NoMemoryForKV(
            f"no memory is left for KV: {lines[least]}; raise gpu_memory_utilization, lower max_num_batched_tokens, or use more ranks"
        )
    lines.append(f"every rank gives its KV pool {_mib(budgets[least])}, the least of {len(ranks)}: that of rank {least}")
    return KVBudget(budgets[least], tuple(lines))


def _line(rank: int, memory: GPUMemory, utilization: float) -> str:
    parts = {
        "other processes": memory.others,
        "weights": memory.weights,
        "activations": memory.activations,
        "communication": memory.communication,
        "graphs": memory.graphs,
    }
    less = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items() if size)
    budget = memory.kv_bytes(utilization)
    return f"rank {rank}: {utilization:g} of {_mib(memory.total)}, less {less or 'nothing'}, is {_mib(budget)}"


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
