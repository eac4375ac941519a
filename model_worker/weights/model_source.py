"""Where a model comes from: its shape, what it is served as, and its weights, whatever the file format."""

from collections.abc import Collection, Mapping
from typing import Protocol

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
    _load(model.slots(), set(source.names()), source)


def load_further_weights(head: MtpHead, source: ModelSource) -> None:
    """The same of the layers behind the last."""
    _load(head.slots(), set(source.further_names()), source)


def _load(slots: Mapping[str, WeightSlot], names: set[str], source: ModelSource) -> None:
    if missing := sorted(slots.keys() - names):
        raise WeightMissing(f"{source.info.name}: {_shown(missing)} missing from the model's files")
    if unexpected := sorted(names - slots.keys()):
        raise WeightUnexpected(
            f"{source.info.name}: {_shown(unexpected)} in the model's files, but {source.config} has no such weight"
        )
    for name, slot in slots.items():
        if slot.view.numel():
            source.read(name, slot)


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{', '.join(names[:NAMES_SHOWN])}{more} {'is' if len(names) == 1 else 'are'}"
