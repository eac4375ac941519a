"""Which flavour of AITER's kernels serves a model on a machine: its compiled ones, or those that Triton compiles."""

import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from model_worker.group import ALONE, Group
from model_worker.kernels.aiter.library import AiterLibrary, AiterUnavailable
from model_worker.layers.share import head_share, kv_head_share
from model_worker.models.latent_config import LatentConfig
from model_worker.models.model_config import ModelConfig

NATIVE_ARCHS = frozenset({"gfx942", "gfx950"})
"""MI300X, MI325X, MI350X and MI355X: AITER holds assembled kernels for these, and for no others."""

HEAD_DIM = 128
BLOCK_SIZE = 16
SHARED_HEADS_MAX = 16
"""What AITER's paged attention in assembly is made for: the size of a head, of a block, and the query heads of a KV head."""

LATENT = 512, 64
"""Elements of the latent and of the rotated part that its latent attention in assembly is made for."""

LATENT_HEADS = 16, 128
"""How many query heads that one takes. Fewer are filled up with zeros."""


EXPERT_TILE = 128
"""What its products of experts cut weights into, without a remainder."""


class Flavour(Enum):
    """As the worker's option `kernels` names them."""

    NATIVE = "aiter-native"
    TRITON = "aiter-triton"


@dataclass(frozen=True, slots=True)
class Machine:
    """`arch` as ROCm names it. `has_compiled`: whether AITER's compiled modules are there, or ROCm's compiler, which AITER calls for those that are
    missing."""

    arch: str
    has_compiled: bool

    @property
    def has_native_kernels(self) -> bool:
        """Whether any compiled kernel of AITER runs here."""
        return self.arch in NATIVE_ARCHS and self.has_compiled

    @classmethod
    def of(cls, library: AiterLibrary) -> "Machine":
        """This one."""
        folder = Path(library.function("aiter.jit.core", "get_user_jit_dir")())
        return cls(library.arch, shutil.which("hipcc") is not None or any(folder.glob("module_*.so")))


@dataclass(frozen=True, slots=True)
class Demand:
    """What a worker wants of kernels besides the model: numbers of weights and of KV, the size of blocks, the ranks that share the heads."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    group: Group = ALONE


@dataclass(frozen=True, slots=True)
class Choice:
    """`reason` is for the log."""

    flavour: Flavour
    reason: str


def choose_flavour(config: ModelConfig, demand: Demand, machine: Machine) -> Choice:
    """The native kernels where they can serve the model on this machine, or else Triton's."""
    obstacle = native_obstacle(config, demand, machine)
    if obstacle is None:
        return Choice(Flavour.NATIVE, f"{machine.arch} has compiled kernels for this model")
    return Choice(Flavour.TRITON, obstacle)


def require_native(config: ModelConfig, demand: Demand, machine: Machine) -> None:
    """Raises AiterUnavailable where the native kernels cannot serve."""
    obstacle = native_obstacle(config, demand, machine)
    if obstacle is not None:
        raise AiterUnavailable(f"kernels {Flavour.NATIVE.value}: {obstacle}: choose kernels {Flavour.TRITON.value}")


def native_obstacle(config: ModelConfig, demand: Demand, machine: Machine) -> str | None:
    """Why the native kernels cannot serve; None where they can."""
    if machine.arch not in NATIVE_ARCHS:
        return f"AITER has no compiled kernels for {machine.arch}, only for {', '.join(sorted(NATIVE_ARCHS))}"
    if not machine.has_compiled:
        return "neither AITER's compiled modules nor hipcc, which makes them, are here"
    if demand.dtype != torch.bfloat16:
        return f"compiled kernels compute in bfloat16, and dtype is {demand.dtype}"
    if config.sliding_windows or (config.experts is not None and config.experts.swiglu is not None):
        return "its attention has sinks and windows, for which there are no compiled kernels here"
    attention = _head_obstacle(config, demand) if config.latent is None else _latent_obstacle(config, config.latent, demand)
    return attention or _experts_obstacle(config)


def _head_obstacle(config: ModelConfig, demand: Demand) -> str | None:
    if config.head_dim != HEAD_DIM:
        return f"compiled attention reads heads of {HEAD_DIM} elements, and the model's have {config.head_dim}"
    if demand.block_size != BLOCK_SIZE:
        return f"compiled attention reads blocks of {BLOCK_SIZE} tokens, and block_size is {demand.block_size}"
    shared = head_share(config.num_heads, demand.group).size // kv_head_share(config.num_kv_heads, demand.group).size
    if shared > SHARED_HEADS_MAX:
        return f"compiled attention takes {SHARED_HEADS_MAX} query heads to a KV head, and the model has {shared}"
    return None


def _latent_obstacle(config: ModelConfig, latent: LatentConfig, demand: Demand) -> str | None:
    if latent.indexer is not None:
        return "its attention is over chosen positions, for which there are no compiled kernels here"
    if (latent.kv_lora_rank, latent.qk_rope_head_dim) != LATENT:
        found = f"{latent.kv_lora_rank} and {latent.qk_rope_head_dim}"
        return f"compiled latent attention reads {LATENT[0]} and {LATENT[1]} elements, and the model keeps {found}"
    if demand.kv_dtype != torch.bfloat16:
        return f"compiled latent attention reads bfloat16, and the KV cache is {demand.kv_dtype}"
    heads = head_share(config.num_heads, demand.group).size
    if heads > LATENT_HEADS[-1]:
        return f"compiled latent attention takes {LATENT_HEADS[-1]} heads, and a rank has {heads}"
    return None


def _experts_obstacle(config: ModelConfig) -> str | None:
    if config.experts is None:
        return None
    sizes = config.hidden_size, config.experts.intermediate_size
    if any(size % EXPERT_TILE for size in sizes):
        return f"compiled experts take sizes that divide by {EXPERT_TILE}, and the model's are {sizes[0]} and {sizes[1]}"
    return None
