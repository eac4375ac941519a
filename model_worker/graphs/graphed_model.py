"""A model whose decode batches are recorded once per padded size, and replayed.

Everything a recorded pass reads lies in a batch on the device that stays where it is. A batch on the host is padded, copied into it, and the
pass replayed; its outputs lie in buffers which all sizes share. Which path a batch takes depends on the batch alone, so all ranks of a model
take the same one, and meet in the same collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.graphs.padded_decodes import DecodeShape, is_decode_only
from model_worker.graphs.padded_sizes import PaddedSizes
from model_worker.graphs.recorder import Recorder, Replay
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM, TappedLM

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    """One size: `batch` lies on the device, and is written before each replay."""

    batch: Batch
    replay: Replay


class GraphedModel:
    """A `CausalLM`, or a `TappedLM` whose hidden states are asked for with `taps`; None: they are not. Batches that are not decodes alone, and those
    of more rows than the largest of `sizes`, go through the model itself, as do those for another pool than `kv`.

    What it returns for a recorded batch is valid until the next call.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KVPool,
        sizes: PaddedSizes,
        max_context: int,
        recorder: Recorder,
        taps: Sequence[int] | None = None,
    ) -> None:
        """Records all sizes, the largest first; writes to the null block alone, and clears it."""
        self.config = model.config
        self._model = model
        self._kv = kv
        self._sizes = sizes
        self._taps = None if taps is None else tuple(taps)
        self._shape = DecodeShape(-(-max_context // kv.block_size), kv.block_size, kv.null_block)
        self._outputs: Outputs = ()
        self._recorded: dict[int, _Recorded] = {}
        for size in reversed(sizes.sizes):
            self._recorded[size] = self._record(size, recorder)

    def slots(self) -> dict[str, WeightSlot]:
        """The model's."""
        return self._model.slots()

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        """See `CausalLM`."""
        size = self._size(batch, kv) if self._taps is None else None
        return self._model.forward(batch, kv) if size is None else self._replay(batch, size)[0]

    def forward_tapped(self, batch: Batch, kv: KVPool, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """See `TappedLM`."""
        size = self._size(batch, kv) if self._taps == tuple(taps) else None
        if size is None:
            return cast(TappedLM, self._model).forward_tapped(batch, kv, taps)
        logits, hidden = self._replay(batch, size)
        return logits, hidden

    def _size(self, batch: Batch, kv: KVPool) -> int | None:
        """What a batch is padded to; None: it is not recorded."""
        return self._sizes.holding(batch.num_rows) if kv is self._kv and is_decode_only(batch) else None

    @torch.inference_mode()
    def _record(self, size: int, recorder: Recorder) -> _Recorded:
        batch = _on(self._kv.store.device, self._shape.blank(size))
        if not self._outputs:  # those of the largest size
            self._outputs = tuple(torch.empty_like(each) for each in self._pass(batch))

        def run() -> None:
            for output, values in zip(self._outputs, self._pass(batch), strict=True):
                output[: len(values)].copy_(values)
            self._kv.clear_null_block()

        return _Recorded(batch, recorder.record(run))

    def _pass(self, batch: Batch) -> Outputs:
        if self._taps is None:
            return (self._model.forward(batch, self._kv),)
        return cast(TappedLM, self._model).forward_tapped(batch, self._kv, self._taps)

    @torch.inference_mode()
    def _replay(self, batch: Batch, size: int) -> Outputs:
        recorded = self._recorded[size]
        for static, values in zip(_tensors(recorded.batch), _tensors(self._shape.pad(batch, size)), strict=True):
            # Tables are as wide as their batch needs: what lies behind that in the static ones lies behind every row's context.
            static[tuple(slice(length) for length in values.shape)].copy_(values, non_blocking=True)
        recorded.replay()
        return tuple(output[: batch.num_rows] for output in self._outputs)


def _tensors(batch: Batch) -> list[Tensor]:
    values = (getattr(batch, item.name) for item in fields(batch))
    return [value for value in values if isinstance(value, Tensor)]


def _on(device: torch.device, batch: Batch) -> Batch:
    moved: dict[str, Any] = {
        item.name: value.to(device) for item in fields(batch) if isinstance(value := getattr(batch, item.name), Tensor)
    }
    return replace(batch, **moved)
