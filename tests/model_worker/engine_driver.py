"""Drives an Engine in tests: builds batches from short descriptions and numbers the steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from model_worker.engine import Engine
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.models.causal_lm import CausalLM
from model_worker.models.deterministic import DeterministicLM, deterministic_config, next_tokens
from model_worker.speculation.proposer import Proposer
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput, SlotDrop, SlotEntry, SlotSwap
from tessera.values.identity import Epoch
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.sampling import SamplingParams

EPOCH = Epoch(1, b"scheduler-number")
GREEDY = SamplingParams(seed=0, temperature=0.0)
VOCAB, BLOCK, NUM_BLOCKS, NUM_HOST_BLOCKS, MAX_LEN = 97, 4, 24, 12, 40
LIMITS = WorkerLimits(max_num_seqs=4, max_num_batched_tokens=32)
DRAFTS_MAX = 3
PROMPT = [5, 17, 3, 88, 41, 9]


def continuation(prompt: list[int], count: int) -> list[int]:
    """The greedy output of the deterministic model, computed without an engine."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_tokens(ids, VOCAB)[0])
    return ids[len(prompt) :]


def int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def request_id(name: str) -> bytes:
    return name.encode().ljust(16, b".")


def entry(
    slot: int,
    token_ids: Sequence[int],
    table: Sequence[int],
    name: str = "r",
    *,
    cached: int = 0,
    **changes: Any,
) -> SlotEntry:
    """An entry of request `name`, attempt 1, all of whose ids are prompt, greedy; `changes` override."""
    fields = {"attempt": 1, "prompt_len": len(token_ids), "sampling": GREEDY} | changes
    return SlotEntry(
        slot=slot,
        request_id=request_id(name),
        token_ids=int32(token_ids),
        block_table=int32(table),
        num_cached_tokens=cached,
        **fields,
    )


def drop(slot: int, name: str = "r", attempt: int = 1, **changes: Any) -> SlotDrop:
    return SlotDrop(slot, request_id(name), attempt, **changes)


def pairs(*sources_and_targets: tuple[int, int]) -> np.ndarray:
    return np.array(sources_and_targets, dtype=np.int32).reshape(-1, 2)


def swap(slot: int, table: Sequence[int], moves: Sequence[tuple[int, int]], name: str = "r", attempt: int = 1) -> SlotSwap:
    return SlotSwap(slot, request_id(name), attempt, int32(table), pairs(*moves))


@dataclass(frozen=True)
class Row:
    """A row that computes `count` positions up to `context_len`."""

    slot: int
    count: int
    context_len: int
    new_blocks: Sequence[int] = ()


@dataclass
class EngineDriver:
    """An engine, by default around the deterministic model, and the number of its next step. With a proposer it has room for
    `DRAFTS_MAX` drafts. `make` makes one on a pool of the shape `paired`."""

    model: CausalLM = field(default_factory=lambda: DeterministicLM(deterministic_config(VOCAB, MAX_LEN)))
    step: int = 0
    proposer: Proposer | None = None
    paired: KVShape | None = None
    make: Callable[[KVPool], Proposer] | None = None
    rejects: bool = False

    def __post_init__(self) -> None:
        config = self.model.config
        self.pool = kv = KVPool.of_shape(config.kv_shape, NUM_BLOCKS, BLOCK, paired=self.paired)
        if self.make is not None:
            assert kv.paired is not None
            self.proposer = self.make(kv.paired)
        info = ModelInfo("m", config.architecture, config.vocab_size, MAX_LEN, (), None, "", "")
        limits = replace(LIMITS, num_speculative_tokens=DRAFTS_MAX if self.proposer else 0)
        geometry = KVGeometry(NUM_BLOCKS, BLOCK, kv.bytes_per_token, kv.geometry.kv_format, NUM_HOST_BLOCKS)
        description = WorkerDescription(b"b" * 16, info, geometry, limits)
        self.engine = Engine(self.model, kv, description, self.proposer, rejects=self.rejects)

    def batch(
        self,
        rows: Sequence[Row] = (),
        entries: Sequence[SlotEntry] = (),
        drops: Sequence[SlotDrop] = (),
        **changes: Any,
    ) -> ScheduledBatch:
        """The next step; leading rows of one position count as decodes unless `num_decodes` says otherwise."""
        num_decodes = next((index for index, row in enumerate(rows) if row.count > 1), len(rows))
        fields = {"step_id": self.step + 1, "durable_step": 0, "num_decodes": num_decodes} | changes
        return ScheduledBatch(
            epoch=EPOCH,
            nonce=1,
            entries=tuple(entries),
            drops=tuple(drops),
            slots=int32([row.slot for row in rows]),
            num_scheduled_tokens=int32([row.count for row in rows]),
            context_lens=int32([row.context_len for row in rows]),
            new_block_counts=int32([len(row.new_blocks) for row in rows]),
            new_block_ids=int32([block for row in rows for block in row.new_blocks]),
            **fields,
        )

    def run(self, *args: Any, **changes: Any) -> ScheduledBatchOutput:
        """Build and execute a batch."""
        batch = self.batch(*args, **changes)
        output = self.engine.execute(batch)
        self.step = batch.step_id
        return output

    def kv(self, *block_ids: int, is_host: bool = False) -> list[bytes]:
        """What blocks hold, bit for bit."""
        return [block.kv.tobytes() for block in self.engine.read_blocks(block_ids, is_host=is_host)]

    def decode(self, slot: int, context_len: int, new_blocks: Sequence[int] = ()) -> int:
        """One decode of one slot by itself; the token."""
        (token,) = self.run([Row(slot, 1, context_len, new_blocks)]).token_ids.tolist()
        return int(token)
