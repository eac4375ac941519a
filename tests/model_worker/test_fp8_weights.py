"""Checkpoints in FP8: every weight becomes number times scale, whatever share a scale, and the model gives what the plain one would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoint import from_fp8, is_linear, rewrite, to_fp8
from safetensors.torch import load_file, save_file
from tiny_llama import reference, save
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.layers.weight_slot import WeightSlot
from model_worker.models.causal_lm import CausalLM
from model_worker.weights.errors import ModelUnsupported, WeightMissing, WeightShapeMismatch, WeightUnexpected
from model_worker.weights.open_model import load_model, load_mtp_head, open_model
from tests.parity.architectures import check_source
from tests.parity.mode import Mode
from tests.parity.mtp_reference import MtpReference, save_layers
from tests.parity.reference import Reference
from tests.parity.tiny_models import save_random, tiny_configs

BLOCK = (24, 40)  # divides nothing here
DEEPSEEK_STYLE = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK), "activation_scheme": "dynamic"}
LAYER, PREDICTING = "model.layers.1", "model.layers.3"


def compressed(strategy: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    weights["block_structure"] = list(BLOCK) if strategy == "block" else None
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def load(directory: Path) -> CausalLM:
    return load_model(open_model(str(directory)), TorchKernels())


def quantize(directory: Path, quantization: dict[str, Any], kind: str, suffix: str) -> dict[str, Tensor]:
    """Bring all linear layers to FP8; returns what they stand for."""
    meant = {}

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, tensor):
            meant[name] = tensor
            return {name: tensor}
        rows, columns = {"block": BLOCK, "channel": (1, tensor.shape[1]), "tensor": tuple(tensor.shape)}[kind]
        numbers, scales = to_fp8(tensor, rows, columns)
        meant[name] = from_fp8(numbers, scales, rows, columns).float()
        return {name: numbers, name + suffix: scales.flatten() if kind == "tensor" else scales}

    rewrite(directory, quantization, change)
    return meant


STYLES = [
    (DEEPSEEK_STYLE, "block", "_scale_inv"),
    ({"quant_method": "fp8", "weight_block_size": None}, "tensor", "_scale"),
    (compressed("tensor"), "tensor", "_scale"),
    (compressed("channel"), "channel", "_scale"),
    (compressed("block"), "block", "_scale"),
]


@pytest.mark.parametrize(("quantization", "kind", "suffix"), STYLES)
def test_every_weight_is_number_times_scale(quantization: dict[str, Any], kind: str, suffix: str, tmp_path: Path) -> None:
    directory = save(reference("biases-wide-heads"), tmp_path / "tiny")
    meant = quantize(directory, quantization, kind, suffix)
    for name, slot in load(directory).slots().items():
        torch.testing.assert_close(slot.view, meant[name], rtol=1e-7, atol=0)


def test_logits_and_tokens_are_those_of_the_weights_that_are_meant(tmp_path: Path) -> None:
    """DeepSeek-V3.2, with experts and an index, its scales in another file than their numbers."""
    plain, directory = tmp_path / "plain", tmp_path / "tiny"
    for path in (plain, directory):
        save_random(tiny_configs()["DeepseekV32ForCausalLM"][0], path)
    meant = quantize(directory, DEEPSEEK_STYLE, "block", "_scale_inv")
    save_file({name: tensor.contiguous() for name, tensor in meant.items()}, plain / "model.safetensors", {"format": "pt"})
    weights = load_file(directory / "model.safetensors")
    scales = {name: weights.pop(name) for name in list(weights) if name.endswith("_scale_inv")}
    assert {
        f"{LAYER}.self_attn.indexer.wq_b.weight_scale_inv",
        f"{LAYER}.mlp.experts.7.down_proj.weight_scale_inv",
    } <= scales.keys()
    save_file(weights, directory / "model.safetensors")
    save_file(scales, directory / "scales.safetensors")
    result = check_source(open_model(str(directory)), Reference(plain), (Mode(True, True, False),))
    assert result.is_same, result


def test_fused_weights_with_scales_of_their_own(tmp_path: Path) -> None:
    """Parts begin inside a block of the whole."""
    save_random(tiny_configs()["Qwen3MoeForCausalLM"][0], tmp_path, save_original_format=False)
    meant: dict[str, Tensor] = {}

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith("experts.gate_up_proj"):
            return {name: tensor}
        numbers, scales = zip(*(to_fp8(expert, *BLOCK) for expert in tensor), strict=True)
        for expert, (number, scale) in enumerate(zip(numbers, scales, strict=True)):
            gate, up = from_fp8(number, scale, *BLOCK).float().chunk(2)
            prefix = f"{name.removesuffix('gate_up_proj')}{expert}"
            meant[f"{prefix}.gate_proj.weight"], meant[f"{prefix}.up_proj.weight"] = gate, up
        return {name: torch.stack(numbers), f"{name}_scale_inv": torch.stack(scales)}

    rewrite(tmp_path, DEEPSEEK_STYLE, change)
    slots = load(tmp_path).slots()
    assert len(meant) == 3 * 6 * 2
    for name, tensor in meant.items():
        torch.testing.assert_close(slots[name].view, tensor, rtol=1e-7, atol=0)


def test_transformers_decodes_the_same(tmp_path: Path) -> None:
    block = [16, 8]  # transformers wants whole blocks
    directory = save(reference("gqa-tied"), tmp_path / "tiny")

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not is_linear(name, tensor):
            return {name: tensor}
        numbers, scales = to_fp8(tensor, *block)
        return {name: numbers, f"{name}_scale_inv": scales}

    stored = rewrite(directory, DEEPSEEK_STYLE | {"weight_block_size": block}, change)
    scaled = [name for name in stored if f"{name}_scale_inv" in stored]
    slots = load(directory).slots()
    assert len(scaled) == 3 * 7
    for name in scaled:
        theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.float32)
        assert torch.equal(slots[name].view, theirs)


def test_scales_may_be_powers_of_two_in_one_byte(tmp_path: Path) -> None:
    directory = save(reference("gqa-tied"), tmp_path / "tiny")
    quantize(directory, DEEPSEEK_STYLE, "block", "_scale_inv")
    name = f"{LAYER}.mlp.up_proj.weight"

    def change(stored: str, tensor: Tensor) -> dict[str, Tensor]:
        return {stored: tensor.log2().round().exp2().to(torch.float8_e8m0fnu) if stored == f"{name}_scale_inv" else tensor}

    weights = rewrite(directory, DEEPSEEK_STYLE, change)
    meant = from_fp8(weights[name], weights[f"{name}_scale_inv"].float(), *BLOCK).float()
    assert torch.equal(load(directory).slots()[name].view, meant)


@pytest.mark.parametrize("rows_per_step", [7, 64])
def test_parts_of_a_weight(rows_per_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the ranks of a tensor-parallel model take them; parts begin inside blocks."""
    monkeypatch.setattr("model_worker.weights.fp8_weight.ROWS_PER_STEP", rows_per_step)
    directory = save(reference("biases-wide-heads"), tmp_path / "tiny")
    meant = quantize(directory, DEEPSEEK_STYLE, "block", "_scale_inv")
    source, name = open_model(str(directory)), f"{LAYER}.mlp.up_proj.weight"
    for dim, start, stop in ((0, 0, 48), (0, 31, 96), (1, 0, 32), (1, 39, 64), (1, 41, 42)):
        expected = meant[name].narrow(dim, start, stop - start)
        view = torch.empty_like(expected)
        source.read(name, WeightSlot(view, dim, start, (96, 64)[dim]))
        torch.testing.assert_close(view, expected, rtol=1e-7, atol=0)


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_layers_that_predict_further_tokens_may_be_in_fp8(architecture: str, tmp_path: Path) -> None:
    save_layers([MtpReference(save_random(tiny_configs()[architecture][0], tmp_path))], tmp_path)
    meant = quantize(tmp_path, DEEPSEEK_STYLE, "block", "_scale_inv")
    source, kernels = open_model(str(tmp_path)), TorchKernels()
    slots = load_mtp_head(source, kernels, load_model(source, kernels)).slots()
    assert f"{PREDICTING}.mlp.shared_experts.up_proj.weight_scale_inv" in load_file(tmp_path / "mtp.safetensors")
    for name, slot in slots.items():
        if ".experts." not in name:  # those are in one tensor here
            torch.testing.assert_close(slot.view, meant[name], rtol=1e-7, atol=0)


UP = f"{LAYER}.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda w: w.pop(f"{UP}_scale_inv"), WeightMissing, rf"{UP} is in FP8, but {UP}_scale_inv is missing"),
        (lambda w: w.pop(UP), WeightMissing, rf"{UP} is missing"),
        (lambda w: w.update({UP: w[UP].float()}), WeightUnexpected, rf"{UP}_scale_inv is in"),
        (lambda w: w.update({f"{UP}_extra": torch.ones(1)}), WeightUnexpected, rf"{UP}_extra is in"),
        (
            lambda w: w.update({f"{UP}_scale_inv": torch.ones(4, 3)}),
            WeightShapeMismatch,
            r"_scale_inv is \(4, 3\): for \(96, 64\) neither one nor one per row and no grid of 24 x 40 blocks",
        ),
        (
            lambda w: w.update({f"{UP}_scale_inv": torch.ones(4, 2, dtype=torch.int8)}),
            ModelUnsupported,
            r"_scale_inv is torch\.int8",
        ),
        (lambda w: w.update({UP: w[UP][:50].clone(), f"{UP}_scale_inv": torch.ones(3, 2)}), WeightShapeMismatch, r"\(50, 64\)"),
        (
            lambda w: w.update(
                {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn), "model.norm.weight_scale": torch.ones(1)}
            ),
            ModelUnsupported,
            r"model\.norm\.weight is \(64,\) in FP8",
        ),
        (lambda w: w.update({UP: w[UP].view(torch.float8_e5m2)}), WeightUnexpected, rf"{UP}_scale_inv is in"),
    ],
)
def test_a_wrong_weight_or_scale_is_named(tmp_path: Path, change: Any, error: type[Exception], named: str) -> None:
    directory = save(reference("gqa-tied"), tmp_path / "tiny")
    quantize(directory, DEEPSEEK_STYLE, "block", "_scale_inv")
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(error, match=named):
        load(directory)


def test_weights_without_scales_are_plain_and_scales_of_activations_are_left_aside(tmp_path: Path) -> None:
    directory = save(reference("gqa-tied"), tmp_path / "tiny")
    plain = load_file(directory / "model.safetensors")
    quantize(directory, DEEPSEEK_STYLE | {"modules_to_not_convert": [f"{LAYER}.mlp"]}, "block", "_scale_inv")
    weights = load_file(directory / "model.safetensors")
    del weights[f"{UP}_scale_inv"]
    weights[UP] = plain[UP]
    weights[f"{LAYER}.mlp.down_proj.input_scale"] = torch.ones(1)
    save_file(weights, directory / "model.safetensors")
    assert torch.equal(load(directory).slots()[UP].view, plain[UP])
    weights[f"{LAYER}.mlp.up_proj.input_scale"] = torch.ones(1)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(WeightUnexpected, match=r"up_proj\.input_scale is in"):
        load(directory)


def test_fp8_that_config_json_does_not_speak_of_is_refused(tmp_path: Path) -> None:
    directory = save(reference("gqa-tied"), tmp_path / "tiny")
    rewrite(directory, None, lambda name, tensor: {name: tensor.to(torch.float8_e4m3fn) if name == UP else tensor})
    with pytest.raises(ModelUnsupported, match=rf"{UP} is torch\.float8_e4m3fn"):
        load(directory)


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        (
            {"quant_method": "awq", "bits": 4},
            r"quant_method 'awq' is not supported, only 'fp8' and 'compressed-tensors' and 'mxfp4'",
        ),
        ({"bits": 4}, "quant_method None is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size \[128\] is not supported"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
        (compressed("block") | {"format": "pack-quantized"}, "format 'pack-quantized' is not supported"),
        (compressed("group"), r"config_groups\.group_0\.weights\.strategy 'group' is not supported"),
    ],
)
def test_what_cannot_be_decoded_is_refused_by_name(quantization: dict[str, Any], named: str, tmp_path: Path) -> None:
    directory = save(reference("gqa-tied"), tmp_path / "tiny")
    rewrite(directory, quantization, lambda name, tensor: {name: tensor})
    with pytest.raises(ModelUnsupported, match=named):
        open_model(str(directory))
