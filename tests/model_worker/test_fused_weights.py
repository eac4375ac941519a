"""A checkpoint may store experts one by one or all in one tensor, and projections each for itself or one above the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import reference, save

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.causal_lm import CausalLM
from model_worker.weights.errors import WeightMissing, WeightShapeMismatch, WeightUnexpected
from model_worker.weights.open_model import load_model, open_model
from tests.parity.tiny_models import save_random, tiny_configs

FUSED = {name: configs[0] for name, configs in tiny_configs().items() if getattr(configs[0], "num_experts_per_tok", None)}
LAYER = "model.layers.0"


def load(directory: Path) -> CausalLM:
    return load_model(open_model(str(directory)), TorchKernels())


def assert_same(one: CausalLM, other: CausalLM) -> None:
    slots, others = one.slots(), other.slots()
    assert slots.keys() == others.keys()
    assert all(torch.equal(slot.view, others[name].view) for name, slot in slots.items())


@pytest.mark.parametrize("architecture", FUSED)
def test_experts_one_by_one_or_in_one_tensor(architecture: str, tmp_path: Path) -> None:
    save_random(FUSED[architecture], tmp_path / "split", max_shard_size="50KB")
    save_random(FUSED[architecture], tmp_path / "fused", save_original_format=False)
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    assert any(name.endswith(".experts.gate_up_proj") for name in load_file(tmp_path / "fused" / "model.safetensors"))
    assert_same(load(tmp_path / "split"), load(tmp_path / "fused"))


def test_projections_one_above_the_other(tmp_path: Path) -> None:
    directory = save(reference("biases-wide-heads"), tmp_path / "tiny")
    expected = load(directory)
    path = directory / "model.safetensors"
    weights = load_file(path)
    fused = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    for layer in range(3):
        for name, parts in fused.items():
            prefix = f"model.layers.{layer}.{name.partition('.')[0]}"
            for kind in ("weight", "bias"):
                stacked = torch.cat([weights.pop(f"{prefix}.{part}.{kind}") for part in parts])
                weights[f"model.layers.{layer}.{name}.{kind}"] = stacked
    save_file(weights, path)
    assert_same(load(directory), expected)


def change_gate(weights: dict[str, torch.Tensor], size: int, dim: int) -> None:
    name = f"{LAYER}.mlp.experts.gate_up_proj"
    weights[name] = weights[name].narrow(dim, 0, size).contiguous()


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda w: change_gate(w, 5, 0), WeightMissing, r"layers\.0\.mlp\.experts\.5\.gate_proj\.weight, .* are missing"),
        (lambda w: change_gate(w, 62, 1), WeightShapeMismatch, r"experts\.0\.gate_proj\.weight is \(31, 64\).*\(32, 64\)"),
        (lambda w: w.pop(f"{LAYER}.mlp.experts.down_proj"), WeightMissing, r"experts\.0\.down_proj\.weight"),
        (lambda w: w.pop(f"{LAYER}.mlp.gate.weight"), WeightMissing, r"layers\.0\.mlp\.gate\.weight is missing"),
        (lambda w: w.update({f"{LAYER}.mlp.experts.scale": torch.ones(6)}), WeightUnexpected, r"experts\.scale is in"),
        (
            lambda w: w.update({f"{LAYER}.self_attn.qkv_proj.weight": torch.ones(192, 64)}),
            WeightUnexpected,
            r"self_attn\.q_proj\.weight is there twice: as .*\.qkv_proj\.weight",
        ),
    ],
)
def test_a_wrong_fused_weight_is_named(tmp_path: Path, change: Any, error: type[Exception], named: str) -> None:
    save_random(FUSED["Qwen3MoeForCausalLM"], tmp_path, save_original_format=False)
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(error, match=named):
        load(tmp_path)


def test_an_expert_too_many_is_named(tmp_path: Path) -> None:
    save_random(FUSED["Qwen3MoeForCausalLM"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = f"{LAYER}.mlp.experts.%d.up_proj.weight"
    weights[name % 6] = weights[name % 5].clone()
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightUnexpected, match=r"layers\.0\.mlp\.experts\.6\.up_proj\.weight is in"):
        load(tmp_path)
