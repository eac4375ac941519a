"""Ranks on GPUs: what can be shown without any."""

import pytest
import torch.distributed
from torch.distributed import HashStore

from model_worker.group import GroupBroken
from model_worker.ranks.nccl_group import NcclGroup


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has nccl")
def test_a_torch_without_nccl_says_so() -> None:
    with pytest.raises(GroupBroken, match="rank 1 cannot join the others: this torch has no nccl"):
        NcclGroup(HashStore(), 1, 2).join(0)


def test_ranks_on_gpus_meet_once() -> None:
    with pytest.raises(GroupBroken, match="rank 0 cannot meet the others again: a pass failed"):
        NcclGroup(HashStore(), 0, 2).join(1)
