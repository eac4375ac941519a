"""Where a model comes from: its shape, what it is served as, and its weights, whatever the file format."""

from collections.abc import Callable, Collection
from typing import Protocol

import torch

from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.models.mtp_head import MtpHead
from model_worker.weights.errors import WeightMissing, WeightUnexpected
from tessera.values.model import ModelInfo

NAMES_SHOWN = 8


class ModelSource(Protocol):
    """An opened model; weights are read one by one on demand, so opening costs little time and memory."""

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    @property
    def info(self) -> ModelInfo:
        """What a worker serving this model says of it."""
        ...

    @property
    def stored_dtype(self) -> torch.dtype:
        """What the model's numbers were made in, and are best computed with where there is a choice."""
        ...

    def names(self) -> Collection[str]:
        """Names of the weights there are, in Hugging Face's naming."""
        ...

    def further_names(self) -> Collection[str]:
        """Names of further weights, which belong to layers behind the last: a model runs without them."""
        ...

    def read(self, name: str, slot: WeightSlot) -> None:
        """Copy the part of the weight `name` that `slot` is for into its view, converted to the view's dtype. No more of the file is held
        in memory than that part needs.

        Raises WeightShapeMismatch, ModelUnsupported (a format that cannot be converted) or ModelFileDamaged.
        """
        ...


def load_weights(model: CausalLM, source: ModelSource) -> None:
    """Copy every weight of `source`, or the part that is this rank's, into its slot of `model`. Raises WeightMissing or WeightUnexpected before
    anything is read."""
    fill(model.slots(), set(source.names()), source.read, source.info.name, source.config)


def load_further_weights(head: MtpHead, source: ModelSource) -> None:
    """The same of the layers behind the last."""
    fill(head.slots(), set(source.further_names()), source.read, source.info.name, source.config)


def fill(
    slots: dict[str, WeightSlot],
    names: set[str],
    read: Callable[[str, WeightSlot], None],
    whose: str,
    shape: ModelConfig,
) -> None:
    """Read every weight into its slot: `names` are those that the files of `whose` have, which is of this shape. Empties `slots`, for what a weight
    was read into need not be kept when kernels have taken it over. Raises as above."""
    if missing := sorted(slots.keys() - names):
        raise WeightMissing(f"{whose}: {_shown(missing)} missing from the model's files")
    if unexpected := sorted(names - slots.keys()):
        raise WeightUnexpected(
            f"{whose}: {_shown(unexpected)} in the model's files, but {shape.architecture} of {shape.num_layers} layers, "
            f"as configured, has no such weight"
        )
    for name in list(slots):
        slot = slots.pop(name)
        if slot.view.numel():
            read(name, slot)
        slot.when_read()


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more} {'is' if len(names) == 1 else 'are'}"
