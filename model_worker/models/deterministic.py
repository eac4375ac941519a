"""A model without weights whose tokens depend on every KV entry it reads: for tests of everything around the forward pass.

The KV of a position is a 64-bit number made from the tokens up to it, added to the number that the pool holds for the position
before. The next token is a hash over the numbers of the whole context, read through the block table. So a wrong block, a stale one,
one shared by mistake or overwritten too early, a swap's missing or exchanged pair, a fork without its copy gives another token, and
hundreds of streams cost next to no compute. It cannot show what nobody reads: a block that should have been zeroed, say.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig

ARCHITECTURE = "Deterministic"

FIRST_LOGIT, SECOND_LOGIT = 16.0, 15.0
"""Logits of the two tokens that the hash names; all others have 0. Greedy takes the first, sampling chooses between both."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def deterministic_config(vocab_size: int, max_model_len: int) -> ModelConfig:
    """A shape with one 64-bit number of KV per position."""
    return ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_model_len=max_model_len,
        rms_norm_eps=1.0,
        rope_theta=1.0,
        tie_word_embeddings=True,
    )


def next_tokens(token_ids: Sequence[int], vocab_size: int) -> tuple[int, int]:
    """The tokens with the best and the second best logit after `token_ids`, computed without any pool."""
    positions = np.arange(len(token_ids), dtype=np.uint64)
    kv = np.cumsum(_links(np.array(token_ids, dtype=np.int64), positions), dtype=np.uint64)
    first, second = _favourites(np.sum(kv * _weights(positions), dtype=np.uint64).reshape(1), vocab_size)
    return int(first[0]), int(second[0])


class DeterministicLM:
    """See `CausalLM` for the contract. It has no weights, and its pool has one layer, one head of one float32 (`deterministic_config`)."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._logits = torch.zeros(0, config.vocab_size)

    def slots(self) -> dict[str, WeightSlot]:
        """No weights."""
        return {}

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """Write the KV numbers of the batch, read those of every row's whole context, and hash them. The logits are a view of a buffer
        that the next call overwrites: fresh pages for hundreds of rows would cost more than all the rest."""
        low, high = _halves(kv.keys(0)), _halves(kv.values(0))
        counts, cu_seqlens_q = batch.cu_seqlens_q.diff().numpy(), batch.cu_seqlens_q.numpy()
        context_lens, tables = batch.context_lens.numpy(), batch.block_tables.numpy()
        before = _read(low, high, tables, (context_lens - counts - 1)[:, None], kv.block_size)[:, 0]
        numbers = _numbers(batch, counts, before)
        slot_mapping = batch.slot_mapping.numpy()
        low[slot_mapping] = numbers.astype(np.uint32)
        high[slot_mapping] = (numbers >> np.uint64(32)).astype(np.uint32)

        logits_rows = batch.logits_rows.numpy()
        wanted = np.searchsorted(cu_seqlens_q, logits_rows, side="right") - 1
        lens = batch.positions.numpy()[logits_rows] + 1
        positions = np.arange(int(lens.max(initial=0)))
        visible = np.where(positions < lens[:, None], positions, -1)
        context = _read(low, high, tables[wanted], visible, kv.block_size)
        states: np.ndarray = (context * _weights(positions.astype(np.uint64))).sum(axis=1, dtype=np.uint64)
        if len(self._logits) < len(wanted):
            self._logits = torch.empty(len(wanted), self.config.vocab_size)
        logits = self._logits[: len(wanted)].zero_()
        first, second = _favourites(states, self.config.vocab_size)
        rows = np.arange(len(wanted))
        logits.numpy()[rows, second] = SECOND_LOGIT
        logits.numpy()[rows, first] = FIRST_LOGIT
        return logits


def _numbers(batch: Batch, counts: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The KV numbers of all new positions, uint64 `[T]`; `before` is the number in front of each row's first one."""
    running = np.cumsum(_links(batch.input_ids.numpy(), batch.positions.numpy().astype(np.uint64)), dtype=np.uint64)
    starts = batch.cu_seqlens_q.numpy()[:-1]
    base: np.ndarray = before - np.where(starts > 0, running[starts - 1], np.uint64(0))
    numbers: np.ndarray = running + np.repeat(base, counts)
    return numbers


def _halves(tensor: Tensor) -> np.ndarray:
    """One half of the numbers, uint32 `[(num_blocks + 1) * block_size]`, sharing the pool's memory."""
    return tensor.view(torch.int32).view(-1).numpy().view(np.uint32)


def _read(low: np.ndarray, high: np.ndarray, tables: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """The numbers at `positions` `[R, n]` of each row, through its table; 0 where the position is negative. uint64 `[R, n]`."""
    blocks = np.take_along_axis(tables, np.maximum(positions, 0) // block_size, axis=1)
    index = blocks.astype(np.int64) * block_size + positions % block_size
    numbers = low[index].astype(np.uint64) | high[index].astype(np.uint64) << np.uint64(32)
    return np.where(positions < 0, np.uint64(0), numbers)


def _links(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return _mix(token_ids.astype(np.uint64) + (positions << np.uint64(32)) + np.uint64(1))


def _weights(positions: np.ndarray) -> np.ndarray:
    return positions * np.uint64(2) + np.uint64(1)


def _favourites(states: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    first = _mix(states)
    return first % np.uint64(vocab_size), _mix(first) % np.uint64(vocab_size)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64."""
    x = x + _GOLDEN
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ x >> np.uint64(31)
    return mixed
