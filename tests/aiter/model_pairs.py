"""Two engines around the same small model, one on the torch backend in float32, one on AITER's: what each computes for the same steps.

Weights are rounded to bfloat16 first, so that both have the same. Every token is decided beforehand (only one is allowed), so that a near tie does
not part the two.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.engine import Engine
from model_worker.kernels.interface import Kernels
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts
from tessera.values.batch import SlotEntry
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.sampling import SamplingParams
from tests.model_worker.engine_driver import EngineDriver, Row, entry
from tests.model_worker.random_llama import build

BLOCK, NUM_BLOCKS, MAX_LEN = 16, 8, 64
SAID = 7
"""The token that every request says."""
FORCED = SamplingParams(seed=0, temperature=0.0, allowed_token_ids=(SAID,))
PROMPT = [int(token) for token in np.random.default_rng(3).integers(10, 90, size=18)]
SIBLING = [*PROMPT[:BLOCK], 31, 45]


class _Watched:
    """A model, and the logits that it gave."""

    def __init__(self, model: CausalLM) -> None:
        self.config = model.config
        self.logits: list[Tensor] = []
        self._model = model

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        logits = self._model.forward(batch, kv)
        self.logits.append(logits.to("cpu", copy=True))
        return logits


class _Echo:
    """Drafts what everybody says."""

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        return Drafts(rooms.astype(np.int64), np.full((len(slots), int(rooms.max(initial=0))), SAID, np.int32))


class PagedDriver(EngineDriver):
    """A driver whose pool has blocks of 16 positions, kept as the kernels read them. It is full of large numbers. `kv_dtype`: of the pool, if
    not the model's."""

    def __init__(self, shape: ModelConfig, kernels: Kernels, kv_dtype: torch.dtype | None = None) -> None:
        model = build(shape, kernels)
        round_weights(model.slots())
        self.watched = _Watched(model)
        self.model, self.step = self.watched, 0
        self.pool = kv = KVPool.of_shape(shape.kv_shape, NUM_BLOCKS, BLOCK, kernels.kv_store(kv_dtype))
        if kernels.flavour != "torch":
            for layer in range(kv.num_layers):
                for plane in (kv.keys(layer), kv.values(layer)):  # what another request left
                    plane[: kv.null_block].view(torch.uint8).fill_(0x7B)
        info = ModelInfo("m", shape.architecture, shape.vocab_size, MAX_LEN, (), None, "", "")
        geometry = KVGeometry(NUM_BLOCKS, BLOCK, kv.bytes_per_token, kv.geometry.kv_format, 0)
        limits = WorkerLimits(max_num_seqs=2, max_num_batched_tokens=32, num_speculative_tokens=2)
        self.engine = Engine(self.watched, kv, WorkerDescription(b"b" * 16, info, geometry, limits), _Echo())

    def conversation(self) -> Tensor:
        """A prompt in two chunks, a second request on its first block beside a decode of the first, decodes of both, and a verification of two
        drafts. The logits of all, `[n, vocab_size]`."""
        first, second = _entry(0, PROMPT, [5, 2, 0], "a"), _entry(1, SIBLING, [5, 7, 1], "b", cached=BLOCK)
        self._said([Row(0, 11, 11)], [first])
        self._said([Row(0, 7, 18)])
        self._said([Row(0, 1, 19), Row(1, 2, 18)], [second])
        self._said([Row(0, 1, 20), Row(1, 1, 19)])
        self._said([Row(0, 3, 23)], num_decodes=1)
        return torch.cat(self.watched.logits)

    def _said(self, rows: Sequence[Row], entries: Sequence[SlotEntry] = (), **changes: int) -> None:
        output = self.run(rows, entries, **changes)
        assert output.row_errors == () and set(output.token_ids.tolist()) <= {SAID}


def worst_error(
    shape: ModelConfig, kernels: Kernels, kv_dtype: torch.dtype | None = None, reference: Kernels | None = None
) -> float:
    """The largest difference between a logit of `kernels` and one of `reference`, which is the torch backend in float32 unless given, in standard
    deviations of the latter."""
    expected = PagedDriver(shape, reference or TorchKernels()).conversation()
    found = PagedDriver(shape, kernels, kv_dtype).conversation()
    assert found.shape == expected.shape and found.dtype == torch.float32
    return float((found - expected).abs().max() / expected.std())


def _entry(slot: int, token_ids: Sequence[int], table: Sequence[int], name: str, cached: int = 0) -> SlotEntry:
    return entry(slot, token_ids, table, name, cached=cached, sampling=FORCED)


def round_weights(slots: dict[str, WeightSlot]) -> None:
    """To what bfloat16 holds."""
    for slot in slots.values():
        slot.view.copy_(slot.view.to(torch.bfloat16))
