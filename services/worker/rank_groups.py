"""By what the ranks of a worker, or its peers, are joined."""

from model_worker.kernels.aiter.aiter_group import AiterGroup
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.nccl_group import NcclGroup
from model_worker.ranks.torch_group import TorchGroup
from services.worker.device_choice import DeviceChoice


def rank_group(choice: DeviceChoice) -> type[TorchGroup]:
    """For the ranks that hold one model together, on one machine."""
    return AiterGroup if choice.kernels in ("aiter", "aiter-native") else peer_group(choice)


def peer_group(choice: DeviceChoice) -> type[TorchGroup]:
    """For tensors that lie where this worker computes."""
    return NcclGroup if choice.is_gpu else GlooGroup
