"""The group of ranks that AITER adds up for: its calls fit AITER's own declarations. No two GPUs have met in it here."""

from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest
import torch

from model_worker.group import GroupBroken
from model_worker.kernels.aiter.aiter_group import AiterGroup
from model_worker.kernels.aiter.library import AiterLibrary
from model_worker.kernels.aiter.probe import Machine
from model_worker.ranks.torch_group import TorchGroup


class Alone(AiterGroup):
    """Joins no nccl, of which this torch has none; in its place is something that changes nothing."""

    def _connect(self, store: Any) -> Any:
        return MagicMock()

    def _library(self) -> AiterLibrary:
        return AiterLibrary("gfx942")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """AITER's beginning and its coordinator, which take what their declarations say and no more."""
    aiter, state = import_module("aiter"), import_module("aiter.dist.parallel_state")
    coordinator = create_autospec(state.GroupCoordinator, instance=True)
    coordinator.all_reduce.side_effect = lambda input_: input_ * 2
    begin = create_autospec(aiter.init_dist_env)
    monkeypatch.setattr(aiter, "init_dist_env", begin)
    monkeypatch.setattr(Machine, "of", lambda library: Machine(library.arch, has_compiled=True))
    monkeypatch.setattr(state, "get_tp_group", create_autospec(state.get_tp_group, return_value=coordinator))
    return begin, coordinator


def test_ranks_meet_at_a_file_beside_the_others_and_aiter_adds(begun: tuple[Any, Any], tmp_path: Path) -> None:
    begin, coordinator = begun
    group = Alone.at_file(tmp_path / "store", 1, 2)
    assert isinstance(group, TorchGroup)
    group.join(0)
    begin.assert_called_once_with(
        tensor_model_parallel_size=2, rankID=1, distributed_init_method=f"file://{tmp_path}/store.aiter", local_rank=1
    )
    x = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(group.all_reduce(x), 2 * x)
    assert coordinator.all_reduce.call_args.kwargs["input_"].is_contiguous()
    group.leave()
    with pytest.raises(GroupBroken, match="has left"):
        group.all_reduce(x)


def test_what_aiter_says_of_a_lost_rank_is_a_broken_group(begun: tuple[Any, Any], tmp_path: Path) -> None:
    begin, coordinator = begun
    group = Alone.at_file(tmp_path / "store", 0, 2)
    begin.side_effect = RuntimeError("nobody came")
    with pytest.raises(GroupBroken, match=r"cannot join.*nobody came.*aiter-triton"):
        group.join(0)
    begin.side_effect = None
    group.join(0)
    coordinator.all_reduce.side_effect = RuntimeError("gone")
    with pytest.raises(GroupBroken, match=r"cannot add.*gone"):
        group.all_reduce(torch.ones(2))
    with pytest.raises(GroupBroken, match="again"):
        group.join(1)


def test_without_compiled_kernels_sums_go_where_the_rest_goes(
    begun: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "of", lambda library: Machine(library.arch, has_compiled=False))
    begin, coordinator = begun
    group = Alone.at_file(tmp_path / "store", 0, 2)
    group.join(0)
    assert torch.equal(group.all_reduce(torch.ones(2)), torch.ones(2))
    assert not begin.called and not coordinator.all_reduce.called
