"""Which part of a dimension a rank holds: every element is somebody's, and heads that cannot be spread are refused with their numbers."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_worker.group import ALONE, Alone
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.layers.linear import RowLinear
from model_worker.layers.share import HeadsDoNotDivide, Share, head_share, kv_head_share
from model_worker.models.registry import build_model
from model_worker.weights.hugging_face_config import HuggingFaceConfig
from tests.parity.tiny_models import tiny_configs


@dataclass
class OneOf(Alone):
    """A rank without the others."""

    rank: int
    size: int


def ranks(size: int) -> list[OneOf]:
    return [OneOf(rank, size) for rank in range(size)]


@given(st.integers(0, 300), st.integers(1, 20))
def test_the_shares_of_all_ranks_are_all_elements_and_about_equal(whole: int, size: int) -> None:
    shares = [Share.of_rank(whole, group) for group in ranks(size)]
    assert [element for share in shares for element in range(share.start, share.stop)] == list(range(whole))
    sizes = {share.size for share in shares}
    assert max(sizes) - min(sizes) <= 1 and Share.all_of(whole) == Share.of_rank(whole, ALONE)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 8), st.integers(1, 16))
def test_a_rank_has_the_kv_heads_of_its_query_heads(groups: int, kv_per_group: int, shared: int, size: int) -> None:
    num_kv_heads = groups * kv_per_group
    num_heads = num_kv_heads * shared
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        return
    for group in ranks(size):
        heads, kv_heads = head_share(num_heads, group), kv_head_share(num_kv_heads, group)
        read = {head // shared for head in range(heads.start, heads.stop)}
        assert read == set(range(kv_heads.start, kv_heads.stop))
        assert heads.size % kv_heads.size == 0, "as many query heads to each"


def test_heads_that_cannot_be_spread_are_refused_with_their_numbers() -> None:
    with pytest.raises(
        HeadsDoNotDivide,
        match="tensor_parallel_size is 4, which does not divide the model's 14 attention heads: use 1, 2, 7 or 14",
    ):
        head_share(14, OneOf(0, 4))
    with pytest.raises(HeadsDoNotDivide, match=r"tensor_parallel_size is 4, .* the model's 6 KV heads"):
        kv_head_share(6, OneOf(0, 4))
    assert kv_head_share(2, OneOf(5, 8)) == Share(1, 2, 2)


REPLICATED = ("norm", ".gate.", ".router.", "q_a_proj", "kv_a_proj", ".indexer.")
"""Of weights that every rank holds: small beside the others, or what makes what every rank keeps."""


@pytest.mark.parametrize("architecture", tiny_configs())
def test_what_is_not_replicated_is_held_once_and_covered_without_a_gap(architecture: str, tmp_path: Path) -> None:
    """Over four ranks; the two KV heads of most of these shapes are held by two each."""
    theirs = tiny_configs()[architecture][0]
    theirs.architectures = [architecture]
    theirs.save_pretrained(tmp_path)
    config = HuggingFaceConfig(tmp_path).model_config()
    spread = [build_model(config, TorchKernels(group)).slots() for group in ranks(4)]
    copies = 4 // config.num_kv_heads if config.num_kv_heads < 4 else 1
    for name, whole in build_model(config, TorchKernels()).slots().items():
        assert all(slots[name].shape == whole.shape for slots in spread), name
        parts = sorted((slots[name].start, slots[name].stop) for slots in spread if slots[name].view.numel())
        size = whole.shape[next(slots[name].dim for slots in spread)]
        if any(word in name for word in REPLICATED):
            assert parts == [(0, size)] * 4, name
            continue
        times = copies if ".k_proj." in name or ".v_proj." in name else 1
        distinct = sorted(set(parts))
        assert parts == sorted(distinct * times), name
        assert [start for start, _ in distinct] + [size] == [0] + [stop for _, stop in distinct], name


def test_the_bias_of_a_sum_over_ranks_is_added_once() -> None:
    layers = [RowLinear(TorchKernels(group), Share.of_rank(5, group), "o_proj", 3, bias=True) for group in ranks(2)]
    for layer in layers:
        slots = layer.slots("a")
        assert slots["a.o_proj.weight"].shape == (3, 5) and slots["a.o_proj.bias"].shape == (3,)
        for slot in slots.values():
            slot.view.fill_(1.0)
    x = torch.ones(2, 5)
    assert (layers[0].partial(x[:, :2]) + layers[1].partial(x[:, 2:])).tolist() == [[6.0] * 3] * 2
