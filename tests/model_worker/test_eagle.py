"""EAGLE heads: ours guess what the same heads in plain torch do; what is published in other ways, or for another model, is found out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import Row, entry
from head_driver import HeadDriver
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.deterministic import DeterministicLM, deterministic_config
from model_worker.models.eagle_head import Eagle3Head, EagleHead
from model_worker.weights.errors import DraftMismatch, ModelFileDamaged, ModelUnsupported, WeightMissing, WeightUnexpected
from model_worker.weights.open_model import load_eagle_head, load_model, open_model
from tests.parity.eagle_reference import EagleReference
from tests.parity.tiny_models import VOCAB_SIZE, save_random, tiny_configs

PROMPT = [5, 17, 3, 88, 41, 9, 120]
TABLE = [7, 2, 4, 5, 6]
KNOWN = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:50].sort().values


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    directory = tmp_path_factory.mktemp("target")
    return save_random(tiny_configs()["LlamaForCausalLM"][0], directory), directory


def loaded(directory: Path, target: Path, model_name: str = "model") -> tuple[Any, EagleHead | Eagle3Head]:
    kernels = TorchKernels()
    model = load_model(open_model(str(target)), kernels)
    return model, load_eagle_head(str(directory), kernels, model, model_name)


def with_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("own", "layer"),
    [
        ({}, "layers.0"),
        ({"bias": True, "own_embedding": True}, "layers.0"),
        ({"taps": (0, 1, 2)}, "midlayer"),
        ({"taps": (2, 1, 1), "token_ids": KNOWN, "own_embedding": True}, "midlayer"),
        ({"taps": (0, 2, 1), "norm_before_residual": True}, "model.layers.0"),
    ],
)
def test_drafts_are_those_of_the_head_in_plain_torch(
    target: tuple[PreTrainedModel, Path], tmp_path: Path, own: dict[str, Any], layer: str
) -> None:
    reference = EagleReference(target[0], **own)
    reference.save(tmp_path, layer)
    driver = HeadDriver(*loaded(tmp_path, target[1]), [reference])
    driver.run([Row(0, 4, 4)], [entry(0, PROMPT, TABLE)], num_decodes=0)
    driver.run([Row(0, 3, 7)], num_decodes=0)
    for _ in range(3):
        assert driver.proposed() == driver.expected()
        computed = driver.engine.report(1).slots[0].computed_len
        driver.run([Row(0, 4, computed + 4)], num_decodes=1, seen_step=driver.step)
    if own.get("token_ids") is not None:
        assert set(driver.proposed()) <= set(KNOWN.tolist())


@pytest.mark.parametrize(
    ("said", "taps"),
    [
        ({}, (2, 1, 0)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, (0, 1, 2)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 0]}}, (1, 2, 1)),
    ],
)
def test_which_layers_of_the_model_a_head_builds_on(
    target: tuple[PreTrainedModel, Path], tmp_path: Path, said: dict[str, Any], taps: tuple[int, ...]
) -> None:
    """Its own authors' three where it says nothing; inputs of layers as vLLM counts them, outputs as SGLang does."""
    EagleReference(target[0], taps=(0, 1, 2)).save(tmp_path)
    with_config(tmp_path, **{"eagle_aux_hidden_state_layer_ids": None} | said)
    assert loaded(tmp_path, target[1])[1].taps == taps


def test_layers_that_the_model_does_not_have_are_refused(target: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    EagleReference(target[0], taps=(0, 1, 2)).save(tmp_path)
    with_config(tmp_path, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    with pytest.raises(ModelUnsupported, match=r"the inputs of layers \[1, 2, 3\], the model has 3"):
        loaded(tmp_path, target[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 300}, "head for 300 token ids and cannot draft for model with its 199"),
        ({"target_hidden_size": 128}, "head for hidden states of 128 numbers and cannot draft for model with its 64"),
    ],
)
def test_a_head_for_another_model_is_refused_and_both_are_named(
    target: tuple[PreTrainedModel, Path], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    EagleReference(target[0], taps=(0, 1, 2)).save(tmp_path / "head")
    with_config(tmp_path / "head", **changes)
    with pytest.raises(DraftMismatch, match=f"head is a {message}"):
        loaded(tmp_path / "head", target[1])


def test_an_eagle_head_of_another_width_is_refused(target: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    EagleReference(target[0]).save(tmp_path)
    with_config(tmp_path, hidden_size=32)
    with pytest.raises(DraftMismatch, match="head for hidden states of 32 numbers and cannot draft for model with its 64"):
        loaded(tmp_path, target[1])


def test_ids_of_its_own_must_be_the_model_s(target: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    EagleReference(target[0], taps=(0, 1, 2), token_ids=KNOWN).save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for d2t in (torch.full((50,), 190), -torch.arange(50)):
        save_file(weights | {"d2t": d2t}, tmp_path / "model.safetensors")
        with pytest.raises(ModelFileDamaged, match="d2t names ids twice, or beyond the vocabulary of 199"):
            loaded(tmp_path, target[1])
    save_file({name: values for name, values in weights.items() if name not in ("d2t", "t2d")}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileDamaged, match="has 50 ids of its own and no d2t to say what they are"):
        loaded(tmp_path, target[1])


def test_weights_that_are_missing_or_too_many_are_named(target: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    EagleReference(target[0]).save(tmp_path, "layers.0")
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"layers.0.input_layernorm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightUnexpected, match=r"layers\.0\.input_layernorm\.weight is in the model's files"):
        loaded(tmp_path, target[1])
    del weights["fc.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightMissing, match=r"fc\.weight is missing"):
        loaded(tmp_path, target[1])


def test_a_model_without_hidden_states_cannot_have_a_head(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="m shows no hidden states: use another proposer"):
        load_eagle_head(str(tmp_path), TorchKernels(), DeterministicLM(deterministic_config(97, 40)), "m")
