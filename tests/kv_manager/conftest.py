"""A block manager with sequences that run to their end on it."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kv_manager.allocation import PoolExhausted
from kv_manager.block_manager import BlockManager
from kv_manager.block_table import BlockTable


@dataclass
class Running:
    """An admitted sequence: all its committed tokens, and its table."""

    token_ids: list[int]
    table: BlockTable
    num_cached_tokens: int


@dataclass
class Serving:
    """What a scheduler does with a manager, one sequence at a time; checks integrity after every move."""

    manager: BlockManager
    running: list[Running] = field(default_factory=list)
    step: int = 0

    def check(self) -> None:
        self.manager.check_integrity([sequence.table for sequence in self.running])

    def admit(
        self, token_ids: list[int], num_tokens: int | None = None, resumed: Running | None = None, namespace: bytes = b""
    ) -> Running | PoolExhausted:
        """Allocate for the tokens alone, or for `num_tokens`."""
        table = resumed.table if resumed else BlockTable(namespace=namespace)
        match = self.manager.match(table, token_ids)
        outcome = self.manager.allocate(table, match, num_tokens or len(token_ids), resumed=resumed is not None)
        if isinstance(outcome, PoolExhausted):
            self.check()
            return outcome
        sequence = Running(list(token_ids), table, match.num_cached_tokens)
        self.running.append(sequence)
        self.check()
        return sequence

    def track(self, token_ids: list[int], namespace: bytes = b"") -> Running:
        """A sequence with an empty table, which the test fills."""
        sequence = Running(list(token_ids), BlockTable(namespace=namespace), 0)
        self.running.append(sequence)
        return sequence

    def compute(self, sequence: Running, num_tokens: int | None = None) -> None:
        """One worker step that leaves KV for the first `num_tokens` positions, by default for all."""
        self.step += 1
        self.manager.publish(sequence.table, sequence.token_ids, num_tokens or len(sequence.token_ids), self.step)
        self.check()

    def free(self, sequence: Running) -> None:
        self.running.remove(sequence)
        self.manager.free(sequence.table)
        self.check()

    def run(self, token_ids: list[int], namespace: bytes = b"") -> Running:
        """Admit, compute and finish."""
        sequence = self.admit(token_ids, namespace=namespace)
        assert isinstance(sequence, Running), sequence
        self.compute(sequence)
        self.free(sequence)
        return sequence


@pytest.fixture
def serve() -> Callable[..., Serving]:
    """Builds a `Serving` around a new manager."""

    def build(num_blocks: int = 16, block_size: int = 4, **options: object) -> Serving:
        return Serving(BlockManager(num_blocks, block_size, **options))  # type: ignore[arg-type]

    return build
