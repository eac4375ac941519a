"""Hugging Face directories: every weight arrives, in any dtype and number of files; what cannot be served is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_llama import Pair, reference, save
from transformers import LlamaForCausalLM

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.causal_lm import CausalLM
from model_worker.models.registry import UnknownArchitecture
from model_worker.weights.errors import (
    ModelFileDamaged,
    ModelUnsupported,
    WeightMissing,
    WeightShapeMismatch,
    WeightUnexpected,
)
from model_worker.weights.open_model import load_model, open_model
from tessera.values.known_models import ModelError, ModelFileMissing


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    return reference("gqa-tied")


@pytest.fixture
def directory(theirs: LlamaForCausalLM, tmp_path: Path) -> Path:
    return save(theirs, tmp_path / "tiny")


def load(directory: Path) -> CausalLM:
    return load_model(open_model(str(directory)), TorchKernels())


def assert_weights(model: CausalLM, theirs: LlamaForCausalLM, dtype: torch.dtype = torch.float32) -> None:
    expected = dict(theirs.named_parameters())
    slots = model.slots()
    assert slots.keys() == expected.keys()
    for name, slot in slots.items():
        assert slot.view.dtype == torch.float32 and torch.equal(slot.view, expected[name].to(dtype).float()), name


def test_every_weight_of_every_shape(pair: Pair) -> None:
    assert_weights(pair.ours, pair.theirs)


def test_description(directory: Path) -> None:
    info = open_model(str(directory)).info
    assert (info.name, info.architecture, info.vocab_size, info.max_model_len) == ("tiny", "LlamaForCausalLM", 199, 256)
    assert (info.eos_token_ids, info.bos_token_id) == ((2,), 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files(theirs: LlamaForCausalLM, tmp_path: Path, dtype: torch.dtype) -> None:
    directory = save(reference("gqa-tied").to(dtype), tmp_path / "half")
    assert_weights(load(directory), theirs, dtype)


def test_several_files(tmp_path: Path) -> None:
    theirs = reference("biases-wide-heads")
    directory = save(theirs, tmp_path / "sharded", max_shard_size="100KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert_weights(load(directory), theirs)
    shards[1].unlink()
    with pytest.raises(ModelFileMissing, match=shards[1].name):
        load(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ModelFileDamaged, match="weight_map"):
        load(directory)


def test_a_file_is_opened_again_after_some_bytes(
    directory: Path, theirs: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each weight would take long where a file names thousands, once for all would keep all of its pages in memory."""
    opened = []

    def counted(path: Path, framework: str) -> Any:
        opened.append(path)
        return safe_open(path, framework)

    monkeypatch.setattr("model_worker.weights.tensor_files.REOPEN_BYTES", 50_000)
    source = open_model(str(directory))
    monkeypatch.setattr("model_worker.weights.tensor_files.safe_open", counted)
    assert_weights(load_model(source, TorchKernels()), theirs)
    size = (directory / "model.safetensors").stat().st_size
    assert 2 <= len(opened) <= -(-size // 50_000) < len(source.names())


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def test_config_as_transformers_4_wrote_it(directory: Path) -> None:
    new = open_model(str(directory)).config
    assert new.rope_theta == 5000.0

    def older(values: dict[str, Any]) -> None:
        values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
        values["rope_scaling"] = None
        values["torch_dtype"] = values.pop("dtype")
        del values["head_dim"]

    edit(directory / "config.json", older)
    assert open_model(str(directory)).config == new


def test_eos_ids_of_the_generation_config_win(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    info = open_model(str(directory)).info
    assert (info.eos_token_ids, info.bos_token_id) == ((7, 9), 1)
    (directory / "generation_config.json").unlink()
    edit(directory / "config.json", lambda values: values.update(eos_token_id=None, bos_token_id=None))
    info = open_model(str(directory)).info
    assert (info.eos_token_ids, info.bos_token_id) == ((), None)


def test_copies_a_checkpoint_may_hold_are_ignored(directory: Path, theirs: LlamaForCausalLM) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(weights, path)
    assert_weights(load(directory), theirs)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda w: w.pop("model.norm.weight"), WeightMissing, r"tiny: model\.norm\.weight is missing"),
        (lambda w: w.update({"model.extra.weight": torch.zeros(1)}), WeightUnexpected, r"model\.extra\.weight is in"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(63)}), WeightShapeMismatch, r"norm.*\(63,\).*\(64,\)"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), ModelUnsupported, r"norm.*int8"),
        (lambda w: w.clear(), WeightMissing, "and 21 more are missing"),
    ],
)
def test_wrong_weights(directory: Path, change: Any, error: type[ModelError], named: str) -> None:
    path = directory / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    with pytest.raises(error, match=named):
        load(directory)


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (lambda c: c.update(architectures=["MysteryForCausalLM"]), UnknownArchitecture, "MysteryForCausalLM.*LlamaForCausalLM"),
        (lambda c: c.pop("architectures"), ModelFileDamaged, "architectures"),
        (lambda c: c.pop("hidden_size"), ModelFileDamaged, "hidden_size is missing"),
        (lambda c: c.update(num_hidden_layers="3"), ModelFileDamaged, "num_hidden_layers is '3'"),
        (lambda c: c.update(hidden_act="gelu"), ModelUnsupported, "hidden_act 'gelu'"),
        (
            lambda c: c.update(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5}),
            ModelFileDamaged,
            r"rope_parameters\.factor is missing",
        ),
        (
            lambda c: c.update(rope_parameters=None, rope_scaling={"type": "yarn", "factor": "4"}),
            ModelFileDamaged,
            r"rope_scaling\.factor is '4'",
        ),
        (
            lambda c: c.update(rope_parameters={"rope_type": "longrope"}),
            ModelUnsupported,
            "rope_type 'longrope'.*llama3 and yarn",
        ),
        (lambda c: c.update(use_sliding_window=True), ModelUnsupported, "use_sliding_window"),
        (lambda c: c.update(rope_parameters=None, rope_scaling={"type": "linear"}), ModelUnsupported, "rope_type 'linear'"),
        (lambda c: c.update(partial_rotary_factor=0.5), ModelUnsupported, "partial_rotary_factor 0.5"),
        (lambda c: c.update(quantization_config={"bits": 4}), ModelUnsupported, "quantization_config"),
    ],
)
def test_wrong_config(directory: Path, change: Any, error: type[ModelError], named: str) -> None:
    edit(directory / "config.json", change)
    with pytest.raises(error, match=named):
        open_model(str(directory))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(ModelFileMissing, match=rf"{directory} has no .*{name.removeprefix('model')}"):
        open_model(str(directory))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("raw", [b"", b"[1]", b"no such thing"])
def test_a_damaged_file_is_named(directory: Path, name: str, raw: bytes) -> None:
    (directory / name).write_bytes(raw)
    with pytest.raises(ModelFileDamaged, match=name):
        open_model(str(directory))


@pytest.mark.parametrize("said", ["x", -2, [1, None]])
def test_an_end_that_is_no_token_id_is_refused(directory: Path, said: Any) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(ModelFileDamaged, match=r"generation_config\.json: eos_token_id is .*, neither a token id nor a list"):
        open_model(str(directory))


def test_the_digest_names_content_not_place(directory: Path, tmp_path: Path) -> None:
    digest = open_model(str(directory)).info.weights_digest
    moved = Path(shutil.copytree(directory, tmp_path / "moved"))
    assert open_model(str(moved)).info.weights_digest == digest
    path = moved / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert open_model(str(moved)).info.weights_digest != digest
