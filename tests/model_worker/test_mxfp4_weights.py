"""gpt-oss with experts in MXFP4, as it is published: numbers and the model's logits are those that are meant."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoint import rewrite, to_mxfp4
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.weights.errors import ModelUnsupported, WeightMissing, WeightShapeMismatch, WeightUnexpected
from model_worker.weights.mxfp4_weight import decoded
from model_worker.weights.open_model import load_model, open_model
from tests.parity.architectures import check_source
from tests.parity.mode import Mode
from tests.parity.reference import Reference
from tests.parity.tiny_models import save_random, tiny_configs

MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


def load(directory: Path) -> CausalLM:
    return load_model(open_model(str(directory)), TorchKernels())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Its experts are 5, with 64 inputs, 96 hidden elements: 2 and 3 blocks."""

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        blocks, scales = to_mxfp4(tensor)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    save_random(tiny_configs()["GptOssForCausalLM"][0], tmp_path / "tiny")
    rewrite(tmp_path / "tiny", MXFP4, change)
    return tmp_path / "tiny"


def meant(directory: Path) -> dict[str, Tensor]:
    """What transformers makes of the checkpoint."""
    stored = load_file(directory / "model.safetensors")
    plain = {name: tensor for name, tensor in stored.items() if not name.endswith(("_blocks", "_scales"))}
    for name in stored:
        if name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            plain[stem] = convert_moe_packed_tensors(stored[name], stored[f"{stem}_scales"], dtype=torch.float32)
    return plain


def test_every_byte_and_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).repeat(1, 16)
    theirs = convert_moe_packed_tensors(blocks.unsqueeze(0), scales.unsqueeze(0), dtype=torch.float32)[0].T
    assert torch.equal(decoded(blocks, scales), theirs)
    assert decoded(blocks[:1], torch.full((1, 16), 255, dtype=torch.uint8)).isnan().all()


def test_numbers_logits_and_tokens(directory: Path, tmp_path: Path) -> None:
    expected = meant(directory)
    slots = load(directory).slots()
    assert all(torch.equal(slot.view, expected[name]) for name, slot in slots.items())
    save_random(tiny_configs()["GptOssForCausalLM"][0], tmp_path / "plain")
    save_file(expected, tmp_path / "plain" / "model.safetensors", {"format": "pt"})
    result = check_source(open_model(str(directory)), Reference(tmp_path / "plain"), (Mode(True, True, False),))
    assert result.is_same, result


@pytest.mark.parametrize(
    ("dim", "start", "stop"), [(0, 1, 3), (1, 0, 32), (1, 32, 64), (1, 20, 41), (1, 40, 60), (2, 0, 96), (2, 31, 190)]
)
def test_parts_of_a_weight(directory: Path, dim: int, start: int, stop: int) -> None:
    """As the ranks of a tensor-parallel model take them; some begin and end inside blocks."""
    weight = meant(directory)[GATE_UP]
    expected = weight.narrow(dim, start, stop - start)
    view = torch.empty_like(expected)
    open_model(str(directory)).read(GATE_UP, WeightSlot(view, dim, start, weight.shape[dim]))
    assert torch.equal(view, expected)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (
            lambda w: w.pop(f"{GATE_UP}_scales"),
            WeightMissing,
            rf"{GATE_UP}_blocks is in MXFP4, but {GATE_UP}_scales is missing",
        ),
        (lambda w: w.pop(f"{GATE_UP}_blocks"), WeightMissing, rf"{GATE_UP} is missing"),
        (lambda w: w.update({"model.norm.weight_scales": torch.ones(2)}), WeightUnexpected, r"norm\.weight_scales is in"),
        (lambda w: w.update({GATE_UP: torch.ones(5, 64, 192)}), WeightUnexpected, rf"{GATE_UP} is there twice"),
        (
            lambda w: w.update({f"{GATE_UP}_scales": w[f"{GATE_UP}_scales"][:, :, :1].clone()}),
            WeightShapeMismatch,
            r"_scales is \(5, 192, 1\), .* must be \(5, 192, 2\)",
        ),
        (lambda w: w.update({f"{GATE_UP}_scales": torch.ones(5, 192, 2)}), ModelUnsupported, r"_scales is F32"),
        (
            lambda w: w.update({f"{GATE_UP}_blocks": w[f"{GATE_UP}_blocks"].flatten(2)}),
            ModelUnsupported,
            r"_blocks is \(5, 192, 32\); only blocks of 32 numbers",
        ),
        (
            lambda w: w.update({f"{GATE_UP}_{kind}": w[f"{GATE_UP}_{kind}"][:4].clone() for kind in ("blocks", "scales")}),
            WeightShapeMismatch,
            r"gate_up_proj is \(4, 64, 192\), the model needs \(5, 64, 192\)",
        ),
    ],
)
def test_a_wrong_weight_or_scale_is_named(directory: Path, change: Any, error: type[Exception], named: str) -> None:
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(error, match=named):
        load(directory)


def test_mxfp4_of_other_models_is_refused(tmp_path: Path) -> None:
    save_random(tiny_configs()["Qwen3MoeForCausalLM"][0], tmp_path, save_original_format=False)
    blocks, scales = to_mxfp4(torch.ones(6, 64, 64))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    rewrite(
        tmp_path,
        MXFP4,
        lambda stored, tensor: {f"{name}_blocks": blocks, f"{name}_scales": scales} if stored == name else {stored: tensor},
    )
    with pytest.raises(ModelUnsupported, match=rf"{name} is in MXFP4, which can be read only for gpt-oss"):
        load(tmp_path)
