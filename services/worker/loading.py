"""From a worker's configuration to an engine that is ready to execute."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import structlog
import torch

from model_worker.engine import Engine
from model_worker.group import ALONE, Group
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.invariant_backend import InvariantKernels, ask_mkl_for_invariance
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_blocks import KVBlocks, LocalBlocks, Moves
from model_worker.kv_pool import KVPool, num_blocks_for
from model_worker.kv_shape import KVShape
from model_worker.models.causal_lm import CausalLM
from model_worker.models.deterministic import ARCHITECTURE, DeterministicLM, deterministic_config
from model_worker.ranks.crew import Crew, RankFailed, RankLost
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.leading import LeadingBlocks, LeadingModel
from model_worker.ranks.lockstep_model import LockstepModel
from model_worker.ranks.orders import PoolSize
from model_worker.weights.open_model import load_model, open_model
from services.worker.config import WorkerConfig
from services.worker.drafter import Drafter, LoadedModel, load_drafter
from services.worker.expert_peers import ExpertPeers
from services.worker.rank_processes import RankProcesses
from tessera.values.config import ConfigError
from tessera.values.identity import new_instance_id
from tessera.values.model import ModelInfo, WorkerDescription, WorkerLimits

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


def load_engine(config: WorkerConfig, ranks: RankProcesses | None = None) -> Engine:
    """Load the model, reserve the KV pool, and put an engine around both; `ranks` are there where several ranks do so together. Takes
    seconds; logs how it goes.

    Raises ModelError for a model that cannot be used, ConfigError and KVPoolTooSmall for numbers that do not fit it, NotInvariant (a
    ConfigError) where `batch_invariant` cannot be had, RankLost.
    """
    started = time.monotonic()
    crew = None
    if ranks is not None and ranks.lines:
        crew = Crew(GlooGroup.at_file(ranks.store, 0, config.tensor_parallel_size), ranks.lines)
    group = crew.group if crew is not None else ALONE
    peers = ExpertPeers(config, 0) if config.experts.expert_parallel_size > 1 else None
    loaded = load_part(config, group, peers.group if peers is not None else ALONE)
    loaded = replace(loaded, info=replace(loaded.info, max_model_len=_max_model_len(config, loaded.info)))
    model, info = loaded.model, loaded.info
    drafter = load_drafter(config.speculation, config.max_num_seqs, loaded, crew)
    draft_shape = drafter.kv_shape if drafter is not None else None
    token_bytes = group.size * model.config.kv_shape_of(group).bytes_per_token()  # of all ranks
    if drafter is not None and draft_shape is not None:
        token_bytes += (group.size if drafter.is_spread else 1) * draft_shape.bytes_per_token()
    size = _pool_size(config, token_bytes)
    kv = part_pool(model, group, config, size, draft_shape)
    blocks: KVBlocks = LocalBlocks(kv, size.num_host_blocks)
    if crew is not None:
        _begin(crew, size)
        model, blocks = LeadingModel(model, crew), LeadingBlocks(blocks, model.config.kv_shape.num_kv_heads, crew)
    if peers is not None:
        peers.join(ranks.lose if ranks is not None else None)
        model = LockstepModel(model, peers.group)
    if config.batch_invariant:
        _find_tiles(model, drafter, kv, blocks)
    num_drafts = config.speculation.num_speculative_tokens
    limits = WorkerLimits(config.max_num_seqs, config.max_num_batched_tokens, num_speculative_tokens=num_drafts)
    geometry = replace(kv.geometry, num_host_blocks=size.num_host_blocks, bytes_per_token=token_bytes)
    description = WorkerDescription(new_instance_id(), info, geometry, limits)
    proposer = drafter.proposer(kv) if drafter is not None else None
    engine = Engine(model, kv, description, proposer, blocks, rejects=config.speculation.rejects)
    _log.info(
        "model loaded",
        model=info.name,
        architecture=info.architecture,
        seconds=round(time.monotonic() - started, 2),
        max_model_len=info.max_model_len,
        ranks=group.size,
        kv_blocks=size.num_blocks,
        block_size=config.block_size,
        kv_tokens=kv.geometry.num_tokens,
        kv_mib=round(size.num_blocks * config.block_size * token_bytes / 2**20),
        host_blocks=size.num_host_blocks,
        speculative_tokens=num_drafts,
    )
    return engine


def load_in_background(load: Callable[[WorkerConfig], Engine], config: WorkerConfig) -> "asyncio.Future[Engine]":
    """What `load` returns or raises, computed in a thread of its own that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    loaded: asyncio.Future[Engine] = loop.create_future()

    def tell(set_outcome: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if loaded.done() else set_outcome())

    def work() -> None:
        try:
            engine = load(config)
        except (Exception, RankLost) as error:  # noqa: BLE001 - handed to the loop, which ends the process
            failure = error
            tell(lambda: loaded.set_exception(failure))
        else:
            tell(lambda: loaded.set_result(engine))

    threading.Thread(target=work, name="loading", daemon=True).start()
    return loaded


def load_part(config: WorkerConfig, group: Group, peers: Group = ALONE) -> LoadedModel:
    """The model, or this rank's part of it where others have theirs (`peers`: experts), loaded with as many threads as it computes with. Raises ModelError, ConfigError."""
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // group.size)
    torch.set_num_threads(threads)
    _log.info("loading model", model=config.model, rank=group.rank, threads=threads, batch_invariant=config.batch_invariant)
    name = config.model
    if name == DETERMINISTIC:
        return _deterministic(_DETERMINISTIC_ALONE)
    prefix, _, likeness = name.partition(":")
    if prefix == DETERMINISTIC:
        info = open_model(likeness).info
        return _deterministic(replace(info, architecture=ARCHITECTURE, weights_digest=DETERMINISTIC))
    source = open_model(name)
    if config.batch_invariant:
        ask_mkl_for_invariance()
    backend = InvariantKernels if config.batch_invariant else TorchKernels
    model = load_model(source, backend(group, peers))
    return LoadedModel(model, source.info, source, backend(group), backend())


def part_pool(
    model: CausalLM, group: Group, config: WorkerConfig, size: PoolSize, draft_shape: KVShape | None = None
) -> KVPool:
    """The pool of the model, or of this rank's part."""
    return KVPool.of_shape(model.config.kv_shape_of(group), size.num_blocks, config.block_size, paired=draft_shape)


def _pool_size(config: WorkerConfig, token_bytes: int) -> PoolSize:
    """`token_bytes`: what a position takes on all ranks together. Raises KVPoolTooSmall."""
    num_blocks = num_blocks_for(config.kv_cache_bytes, config.block_size, token_bytes)
    if not config.swap_bytes:
        return PoolSize(num_blocks, 0)
    return PoolSize(num_blocks, num_blocks_for(config.swap_bytes, config.block_size, token_bytes, "swap_bytes"))


def _begin(crew: Crew, size: PoolSize) -> None:
    try:
        crew.begin(size)
    except RankFailed as error:
        raise ConfigError(f"tensor_parallel_size {crew.group.size}: {error}") from error


def _find_tiles(model: CausalLM, drafter: Drafter | None, kv: KVPool, blocks: KVBlocks) -> None:
    """Let the kernels meet every shape now: the first request should not wait for that, nor be the one to fail. Raises NotInvariant."""
    one = np.array([1])
    model.forward(build_dummy_batch(one, one, 1, kv), kv)
    if drafter is not None:
        drafter.find_tiles(kv)
    blocks.move(Moves(zero_blocks=np.array([kv.null_block])))


def _deterministic(info: ModelInfo) -> LoadedModel:
    model, kernels = DeterministicLM(deterministic_config(info.vocab_size, info.max_model_len)), TorchKernels()
    return LoadedModel(model, info, None, kernels, kernels)


def _max_model_len(config: WorkerConfig, info: ModelInfo) -> int:
    if config.max_model_len is None:
        return info.max_model_len
    if config.max_model_len > info.max_model_len:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but {info.name} was trained for {info.max_model_len} tokens"
        )
    return config.max_model_len
