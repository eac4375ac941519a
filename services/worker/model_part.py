"""What one rank of a worker holds: the model, or its part of it, its KV pool, and what is recorded of both."""

import contextlib
import os
import threading
import time
from dataclasses import dataclass, replace

import numpy as np
import structlog
import torch

from model_worker.device_memory import TorchDeviceMemory
from model_worker.device_race import rehearse
from model_worker.gpu_memory import GPUMemory
from model_worker.graphs.device_recorder import DeviceRecorder
from model_worker.graphs.graphed_model import GraphedModel
from model_worker.graphs.padded_sizes import PaddedSizes
from model_worker.group import ALONE, Group
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.memory_profile import MemoryProfile, largest_batches
from model_worker.models.causal_lm import CausalLM
from model_worker.models.deterministic import ARCHITECTURE, DeterministicLM, deterministic_config
from model_worker.ranks.orders import PoolSize
from model_worker.weights.open_model import load_model, open_model
from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice, Hardware, choose_device
from services.worker.drafter import LoadedModel
from services.worker.model_kernels import model_kernels
from tessera.values.config import ConfigError
from tessera.values.model import ModelInfo

_log = structlog.get_logger()

DETERMINISTIC = "deterministic"
"""The model name that loads no weights; `deterministic:NAME` says of itself what the model NAME would (vocabulary, tokenizer, ...)."""

_DETERMINISTIC_ALONE = ModelInfo(
    name=DETERMINISTIC,
    architecture=ARCHITECTURE,
    vocab_size=512,
    max_model_len=8192,
    eos_token_ids=(),
    bos_token_id=None,
    tokenizer_digest="",
    weights_digest=DETERMINISTIC,
)


_NICEST = 19


def _fill(kv: KVPool) -> None:
    with contextlib.suppress(OSError):  # a container may forbid it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)  # of this thread
    if not kv.make_resident():
        _log.info("the KV cache's memory comes as it is first written: the system is too old, or has too little left")


def device_choice(config: WorkerConfig) -> DeviceChoice:
    """Where this worker computes, on this machine. Raises ConfigError."""
    return choose_device(config, Hardware.found(), computes=config.model.partition(":")[0] != DETERMINISTIC)


def load_part(config: WorkerConfig, group: Group, peers: Group = ALONE, choice: DeviceChoice | None = None) -> LoadedModel:
    """The model, or this rank's part of it where others have theirs (`peers`: experts), loaded with as many threads as it computes with. Raises
    ModelError, ConfigError."""
    choice = choice or device_choice(config)
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // group.size)
    torch.set_num_threads(threads)
    _log.info(
        "loading model",
        model=config.model,
        rank=group.rank,
        threads=threads,
        batch_invariant=config.batch_invariant,
        device=str(choice.device_of(group.rank)),
        kernels=choice.kernels,
    )
    if choice.lacks is not None and group.rank == 0:
        _log.warning(
            "kernels for this processor are missing, so torch computes alone, several times slower: the reason says what to do",
            reason=choice.lacks,
        )
    name = config.model
    if name == DETERMINISTIC:
        return _limited(config, _deterministic(_DETERMINISTIC_ALONE))
    prefix, _, likeness = name.partition(":")
    if prefix == DETERMINISTIC:
        info = open_model(likeness).info
        return _limited(config, _deterministic(replace(info, architecture=ARCHITECTURE, weights_digest=DETERMINISTIC)))
    source = open_model(name)
    kernels = model_kernels(config, choice, source.config, source.stored_dtype, group, peers)
    model = load_model(source, kernels.spread)
    return _limited(config, LoadedModel(model, source.info, source, kernels.draft, kernels.alone, kernels.store))


@dataclass(frozen=True, slots=True, eq=False)
class ModelPart:
    """What is loaded of one rank. `draft_shape`: what whoever drafts keeps of a position here; `taps`: what the model is asked for, see
    `GraphedModel`."""

    loaded: LoadedModel
    config: WorkerConfig
    group: Group
    draft_shape: KVShape | None = None
    taps: tuple[int, ...] | None = None

    @property
    def bytes_per_token(self) -> int:
        """What a position takes on this rank."""
        dtype = self.loaded.store.dtype
        own = self.loaded.model.config.kv_shape_of(self.group).bytes_per_token(dtype)
        return own + (self.draft_shape.bytes_per_token(dtype) if self.draft_shape is not None else 0)

    def pool(self, size: PoolSize) -> KVPool:
        """Reserved. Raises ConfigError."""
        shape = self.loaded.model.config.kv_shape_of(self.group)
        return KVPool.of_shape(shape, size.num_blocks, self.config.block_size, self.loaded.store, self.draft_shape)

    def serving_pool(self, size: PoolSize) -> KVPool:
        """A pool that is to be used for long: its memory comes while the worker starts, not in the middle of the first prompts. Raises ConfigError."""
        kv = self.pool(size)
        threading.Thread(target=_fill, args=(kv,), name="kv-pages", daemon=True).start()
        return kv

    @torch.inference_mode()
    def measure(self, profile: MemoryProfile) -> GPUMemory:
        """What the model takes of a GPU beside its KV pool; the other ranks do the same at the same time."""
        model, limits, info = self.loaded.model, self.config, self.loaded.info
        kv = self.pool(PoolSize(1, 0))
        one = np.array([1])
        kernels = self.loaded.kernels
        largest = largest_batches(
            limits.max_num_seqs, limits.max_num_batched_tokens, info.max_model_len, kv, kernels.captured_tokens_max
        )

        def run_largest() -> None:
            for batch in largest:
                rehearse(model.forward(batch, kv))

        return profile.measure(
            lambda: model.forward(build_dummy_batch(one, one, 1, kv), kv), run_largest, lambda: self.recorded(kv)
        )

    def recorded(self, kv: KVPool) -> CausalLM:
        """The model with its decodes over this pool recorded, where that is wanted and can be; otherwise the model."""
        sizes = self._graph_sizes()
        if not sizes.sizes:
            return self.loaded.model
        started, device = time.monotonic(), self.loaded.store.device
        model = GraphedModel(self.loaded.model, kv, sizes, self.loaded.info.max_model_len, DeviceRecorder(device), self.taps)
        _log.info("decodes are recorded", rows=sizes.sizes, seconds=round(time.monotonic() - started, 2))
        return model

    def _graph_sizes(self) -> PaddedSizes:
        """None on a CPU; nor where workers share their experts, since these agree on counts of tokens on the host."""
        compute, kernels = self.config.compute, self.loaded.kernels
        is_gpu = self.loaded.store.device.type != "cpu"
        shares = self.config.experts.expert_parallel_size > 1
        if not is_gpu or compute.enforce_eager or shares or not kernels.can_be_captured:
            return PaddedSizes(())
        sizes = PaddedSizes.usual(self.config.max_num_seqs)
        if compute.graph_sizes:
            sizes = PaddedSizes.given(compute.graph_sizes, self.config.max_num_seqs)
        return sizes.within(kernels.captured_tokens_max // self.loaded.info.max_model_len)


def _deterministic(info: ModelInfo) -> LoadedModel:
    model, kernels = DeterministicLM(deterministic_config(info.vocab_size, info.max_model_len)), TorchKernels()
    return LoadedModel(model, info, None, kernels, kernels)


def _limited(config: WorkerConfig, loaded: LoadedModel) -> LoadedModel:
    """With the length that requests may have here."""
    info = loaded.info
    if config.max_model_len is None:
        return loaded
    if config.max_model_len > info.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but {info.name} was trained for {info.max_model_len} tokens"
        )
    return replace(loaded, info=replace(info, max_model_len=config.max_model_len))


def memory_profile(choice: DeviceChoice, rank: int) -> MemoryProfile | None:
    """To be made before anything is loaded; None on a CPU."""
    return MemoryProfile(TorchDeviceMemory(choice.device_of(rank))) if choice.is_gpu else None
