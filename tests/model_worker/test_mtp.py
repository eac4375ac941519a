"""Multi-token prediction: our layers guess what the same layers in plain torch do, however the context came about."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import DRAFTS_MAX, Row, drop, entry, pairs, swap
from head_driver import HeadDriver
from torch import Tensor
from transformers import PreTrainedModel

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.mtp_head import MtpHead
from model_worker.weights.errors import ModelUnsupported, WeightMissing
from model_worker.weights.open_model import load_model, load_mtp_head, open_model
from tests.parity.mtp_reference import MtpReference, save_layers
from tests.parity.tiny_models import VOCAB_SIZE, save_random, tiny_configs

PROMPT = [5, 17, 3, 88, 41, 9, 120]
TABLE = [7, 2, 4, 5, 6]


class MtpDriver(HeadDriver):
    """A small random model with layers of multi-token prediction, saved to `directory` with `further` weights."""

    def __init__(
        self,
        architecture: str,
        directory: Path,
        num_layers: int,
        further: Callable[[PreTrainedModel], dict[str, Tensor]],
    ) -> None:
        config = tiny_configs()[architecture][0]
        config.num_nextn_predict_layers = num_layers
        self.reference = save_random(config, directory)
        layers = [MtpReference(self.reference, seed) for seed in range(num_layers)]
        save_layers(layers, directory, further(self.reference))
        source, kernels = open_model(str(directory)), TorchKernels()
        model = load_model(source, kernels)
        super().__init__(model, load_mtp_head(source, kernels, model), layers)


def nothing(_: PreTrainedModel) -> dict[str, Tensor]:
    return {}


@pytest.fixture(params=["DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "Glm4MoeForCausalLM"], scope="module")
def directory_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, tmp_path_factory.mktemp(request.param)


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_drafts_are_those_of_the_layers_in_plain_torch(directory_of: tuple[str, Path], num_layers: int) -> None:
    driver = MtpDriver(directory_of[0], directory_of[1] / str(num_layers), num_layers, nothing)
    driver.run([Row(0, 4, 4)], [entry(0, PROMPT, TABLE)], num_decodes=0)
    driver.run([Row(0, 3, 7)], num_decodes=0)
    for _ in range(3):
        assert driver.proposed() == driver.expected()
        computed = driver.engine.report(1).slots[0].computed_len
        driver.run([Row(0, 4, computed + 4)], num_decodes=1, seen_step=driver.step)


@pytest.fixture
def driver(directory_of: tuple[str, Path], tmp_path: Path) -> MtpDriver:
    return MtpDriver(directory_of[0], tmp_path, 1, nothing)


def test_an_embedding_and_a_head_of_the_layer_s_own_are_used_where_the_checkpoint_has_them(
    directory_of: tuple[str, Path], tmp_path: Path
) -> None:
    tables = torch.randn(2, VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(3)) * 0.15

    def own(model: PreTrainedModel) -> dict[str, Tensor]:
        prefix = f"model.layers.{model.config.num_hidden_layers}"
        return {f"{prefix}.embed_tokens.weight": tables[0], f"{prefix}.shared_head.head.weight": tables[1]}

    driver = MtpDriver(directory_of[0], tmp_path, 1, own)
    driver.run([Row(0, 7, 7)], [entry(0, PROMPT, TABLE)], num_decodes=0)
    shared = driver.expected(count=1)
    hidden = driver.reference.model(torch.tensor([PROMPT])).last_hidden_state
    driver.reference.model.embed_tokens.weight.data, driver.reference.lm_head.weight.data = tables[0], tables[1]
    with torch.inference_mode():
        row = driver.layers[0](torch.tensor([driver.ids()[1:]]), hidden)[0, -1]
        expected = int(driver.layers[0].logits(row).argmax())
    assert driver.proposed(count=1) == [expected] != shared


def test_drafts_are_the_same_after_a_swap_and_a_copy_and_over_shared_blocks(driver: MtpDriver) -> None:
    """What is kept for drafts moves with the blocks. A fork computes its prompt's last position alone, over a copy of its block."""
    driver.run([Row(0, 7, 7)], [entry(0, PROMPT, TABLE)], num_decodes=0)
    expected = driver.expected()
    driver.run(swap_outs=(swap(0, [3, 1, 0, 8, 9], [(7, 3), (2, 1), (4, 0), (5, 8), (6, 9)]),))
    driver.run(zero_blocks=np.array(TABLE, np.int32))
    back = [(3, 10), (1, 11), (0, 12), (8, 13), (9, 14)]
    driver.run(swap_ins=(swap(0, [10, 11, 12, 13, 14], back),))
    assert driver.proposed() == expected
    driver.run([Row(1, 1, 7)], [entry(1, PROMPT, [10, 15, 16], "fork", cached=6)], copies=pairs((11, 15)), num_decodes=1)
    assert driver.ids(1) == driver.ids(0) and driver.proposed(1, 2) == expected[:2]


def test_who_follows_in_a_slot_gets_no_drafts_of_who_held_it(driver: MtpDriver) -> None:
    driver.run([Row(0, 7, 7)], [entry(0, PROMPT, TABLE)], num_decodes=0)
    assert len(driver.proposed()) == DRAFTS_MAX
    ids = [*PROMPT, 11]
    output = driver.run([Row(0, 4, 11)], [entry(0, ids, [7, 2, 4], "next", cached=7)], [drop(0)], num_decodes=1)
    assert not len(output.draft_counts), "its first row has room, and it is as long as who held the slot before"
    assert len(driver.proposed()) == DRAFTS_MAX


def test_a_row_that_no_pass_was_told_of_gets_no_drafts_and_the_next_one_does(driver: MtpDriver) -> None:
    driver.run([Row(0, 7, 7)], [entry(0, PROMPT, TABLE)], num_decodes=0)
    forward, driver.head.forward = driver.head.forward, lambda *_: 1 / 0  # type: ignore[method-assign, assignment]
    output = driver.run([Row(0, 4, 11)], num_decodes=1)
    assert output.row_errors == () and output.token_counts.tolist() == [1], "the model's token comes all the same"
    driver.head.forward = forward  # type: ignore[method-assign]
    assert driver.proposed() == []
    driver.run([Row(0, 1, 12)])
    assert len(driver.proposed()) == DRAFTS_MAX


def test_layers_are_loaded_only_when_asked_for_and_then_must_be_whole(directory_of: tuple[str, Path], tmp_path: Path) -> None:
    driver = MtpDriver(directory_of[0], tmp_path, 1, nothing)
    assert not set(driver.model.slots()) & set(driver.head.slots())
    source, kernels = open_model(str(tmp_path)), TorchKernels()
    source.config = replace(source.config, num_mtp_layers=2)
    with pytest.raises(WeightMissing, match=r"model\.layers\.4\.eh_proj\.weight"):
        load_mtp_head(source, kernels, driver.model)
    (tmp_path / "mtp.safetensors").unlink()
    with pytest.raises(ModelUnsupported, match="has no layers that predict further tokens"):
        load_mtp_head(open_model(str(tmp_path)), kernels, driver.model)


def test_a_llama_has_no_such_layers(tmp_path: Path) -> None:
    save_random(tiny_configs()["LlamaForCausalLM"][1], tmp_path)
    source, kernels = open_model(str(tmp_path)), TorchKernels()
    with pytest.raises(ModelUnsupported, match=r"\(LlamaForCausalLM\) cannot have layers that predict further tokens"):
        load_mtp_head(source, kernels, load_model(source, kernels))


def test_a_layer_is_named_by_its_place_in_the_checkpoint(driver: MtpDriver) -> None:
    assert isinstance(driver.head, MtpHead)
    assert {name.split(".")[2] for name in driver.head.slots()} == {"3"}
