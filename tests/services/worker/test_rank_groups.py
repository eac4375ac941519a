"""By what ranks are joined follows from where they compute and with what."""

import pytest

from model_worker.kernels.aiter.aiter_group import AiterGroup
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.nccl_group import NcclGroup
from model_worker.ranks.torch_group import TorchGroup
from services.worker.device_choice import DeviceChoice
from services.worker.rank_groups import peer_group, rank_group


@pytest.mark.parametrize(
    ("device", "kernels", "ranks", "peers"),
    [
        ("cpu", "torch", GlooGroup, GlooGroup),
        ("cuda", "torch", NcclGroup, NcclGroup),
        ("cuda", "aiter", AiterGroup, NcclGroup),
        ("cuda", "aiter-native", AiterGroup, NcclGroup),
        ("cuda", "aiter-triton", NcclGroup, NcclGroup),
    ],
)
def test_sums_of_ranks_are_aiters_where_its_compiled_kernels_may_be_used(
    device: str, kernels: str, ranks: type[TorchGroup], peers: type[TorchGroup]
) -> None:
    choice = DeviceChoice(device, kernels)
    assert rank_group(choice) is ranks and peer_group(choice) is peers
