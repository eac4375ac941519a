"""A rank reads its part of a weight and no more, from any file format; a name that only another rank holds is neither missing nor
unexpected, and a wrong weight is named as ever."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_gguf import gguf_metadata, gguf_tensors, write_gguf
from tiny_llama import reference, save
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.model_config import ModelConfig
from model_worker.weights.errors import WeightMissing, WeightShapeMismatch, WeightUnexpected
from model_worker.weights.model_source import ModelSource, load_weights
from model_worker.weights.open_model import load_model, open_model
from tests.parity.tiny_models import save_random, tiny_configs


class SlotsOnly:
    """A model of nothing but weight slots."""

    def __init__(self, config: ModelConfig, slots: dict[str, WeightSlot]) -> None:
        self.config = config
        self._slots = slots

    def slots(self) -> dict[str, WeightSlot]:
        return self._slots

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        raise NotImplementedError


def whole_weights(source: ModelSource) -> dict[str, Tensor]:
    return {name: slot.view for name, slot in load_model(source, TorchKernels()).slots().items()}


def parts_of(shape: torch.Size, unit: int) -> Iterator[tuple[int, int, int]]:
    """(dim, start, stop): halves, and one in the middle; those of dimension 0 in steps of `unit`."""
    for dim, size in enumerate(shape):
        step = unit if dim == 0 else 1
        middle = size // step // 2 * step
        yield from ((dim, 0, middle), (dim, middle, size), (dim, size // step // 3 * step, middle))


def check_every_part(source: ModelSource) -> None:
    for name, weight in whole_weights(source).items():
        unit = source.config.head_dim if "_proj" in name and "self_attn" in name else 1
        for dim, start, stop in parts_of(weight.shape, unit):
            expected = weight.narrow(dim, start, stop - start)
            view = torch.full(tuple(reversed(expected.shape)), float("nan")).permute(*range(weight.dim() - 1, -1, -1))
            source.read(name, WeightSlot(view, dim, start, weight.shape[dim]))
            assert torch.equal(view, expected), (name, dim, start, stop)


@pytest.mark.parametrize("split", [True, False])
def test_parts_of_safetensors_whole_and_fused(split: bool, tmp_path: Path) -> None:
    save_random(tiny_configs()["Qwen3MoeForCausalLM"][0], tmp_path, save_original_format=split)
    check_every_part(open_model(str(tmp_path)))


def test_parts_of_weights_with_three_dimensions(tmp_path: Path) -> None:
    save_random(tiny_configs()["GptOssForCausalLM"][0], tmp_path)
    check_every_part(open_model(str(tmp_path)))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_parts_of_gguf(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_worker.weights.gguf.ROWS_PER_READ", 7)
    theirs = reference("biases-wide-heads" if kind == "F32" else "gqa-tied")
    tensors = {name: tensor for name, tensor in gguf_tensors(theirs).items() if not name.endswith(".bias")}
    path = write_gguf(tmp_path / "tiny.gguf", tensors, gguf_metadata(theirs), kind=gguf.GGMLQuantizationType[kind])
    source = open_model(str(path))
    check_every_part(source)


def test_no_more_than_the_part_is_asked_of_the_file(tmp_path: Path) -> None:
    source = open_model(str(save(reference("gqa-tied"), tmp_path / "tiny")))
    weight = whole_weights(source)["model.embed_tokens.weight"]
    source.read("model.embed_tokens.weight", WeightSlot(torch.empty(10, 64), 0, 20, len(weight)))
    before = source._files.read_bytes
    source.read("model.embed_tokens.weight", WeightSlot(torch.empty(10, 64), 0, 20, len(weight)))
    assert source._files.read_bytes - before == 10 * 64 * 4


def test_a_weight_of_another_rank_is_known_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_model(str(save(reference("gqa-tied"), tmp_path / "tiny")))
    slots = load_model(source, TorchKernels()).slots()
    name = "model.layers.1.mlp.up_proj.weight"
    elsewhere = slots | {name: WeightSlot(torch.empty(0, 64), 0, 0, 96)}
    read: list[str] = []
    original = source.read

    def noted(name: str, slot: WeightSlot) -> None:
        read.append(name)
        original(name, slot)

    monkeypatch.setattr(source, "read", noted)
    load_weights(SlotsOnly(source.config, elsewhere), source)
    assert sorted(read) == sorted(slots.keys() - {name})


def test_errors_name_the_whole_weight(tmp_path: Path) -> None:
    directory = save(reference("gqa-tied"), tmp_path / "tiny")
    source = open_model(str(directory))
    half = WeightSlot(torch.empty(30, 64), 0, 30, 60)
    with pytest.raises(WeightShapeMismatch, match=r"norm\.weight is \(64,\), the model needs \(60, 64\)"):
        source.read("model.norm.weight", half)
    slots = load_model(source, TorchKernels()).slots()
    with pytest.raises(WeightMissing, match=r"tiny: extra is missing"):
        load_weights(SlotsOnly(source.config, slots | {"extra": WeightSlot(torch.empty(0, 4), 0, 0, 8)}), source)
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"model.extra.weight": torch.zeros(1)}, path)
    with pytest.raises(WeightUnexpected, match=r"model\.extra\.weight is in"):
        load_weights(SlotsOnly(source.config, slots), open_model(str(directory)))


def test_a_part_lies_within_the_weight() -> None:
    slot = WeightSlot(torch.empty(4, 6), 1, 12, 18)
    assert (slot.shape, slot.stop, slot.is_whole) == ((4, 18), 18, False)
    assert WeightSlot(torch.empty(4, 6), 1, 0, 6).is_whole and WeightSlot(torch.empty(4, 6)).shape == (4, 6)
    with pytest.raises(AssertionError):
        WeightSlot(torch.empty(4, 6), 1, 13, 18)
