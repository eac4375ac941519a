"""From a worker's configuration to an engine that is ready to execute."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import structlog
import torch

from model_worker.engine import Engine
from model_worker.gpu_memory import kv_budget
from model_worker.group import ALONE
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.cpu.backend import is_all_ours
from model_worker.kv_blocks import KVBlocks, LocalBlocks, Moves
from model_worker.kv_pool import KVPool, num_blocks_for
from model_worker.memory_profile import MemoryProfile
from model_worker.models.causal_lm import CausalLM
from model_worker.ranks.crew import Crew, RankFailed, RankLost
from model_worker.ranks.leading import LeadingBlocks, LeadingModel
from model_worker.ranks.lockstep_model import LockstepModel
from model_worker.ranks.orders import PoolSize
from services.worker.config import KV_CACHE_BYTES, WorkerConfig
from services.worker.device_config import UTILIZATION
from services.worker.drafter import Drafter, load_drafter
from services.worker.expert_peers import ExpertPeers
from services.worker.model_part import ModelPart, device_choice, load_part, memory_profile
from services.worker.rank_groups import rank_group
from services.worker.rank_processes import RankProcesses
from tessera.values.config import ConfigError
from tessera.values.identity import new_instance_id
from tessera.values.model import WorkerDescription, WorkerLimits

T = TypeVar("T")

_log = structlog.get_logger()


def load_engine(config: WorkerConfig, ranks: RankProcesses | None = None) -> Engine:
    """Load the model, reserve the KV pool, and put an engine around both; `ranks` are there where several ranks do so together. Takes
    seconds; logs how it goes.

    Raises ModelError for a model that cannot be used, ConfigError and KVPoolTooSmall for numbers that do not fit it, NotInvariant (a
    ConfigError) where `batch_invariant` cannot be had, RankLost.
    """
    started, choice = time.monotonic(), device_choice(config)
    crew = None
    if ranks is not None and ranks.lines:
        crew = Crew(rank_group(choice).at_file(ranks.store, 0, config.tensor_parallel_size), ranks.lines)
    group = crew.group if crew is not None else ALONE
    peers = ExpertPeers(config, 0, choice) if config.experts.expert_parallel_size > 1 else None
    profile = memory_profile(choice, 0)
    loaded = load_part(config, group, peers.group if peers is not None else ALONE, choice)
    drafter = load_drafter(config.speculation, config.max_num_seqs, loaded, crew)
    draft_shape, taps = (drafter.kv_shape, drafter.taps) if drafter is not None else (None, None)
    part = ModelPart(loaded, config, group, draft_shape, taps)
    if crew is not None:
        _in_words(crew, crew.begin)
    if peers is not None:
        peers.join(ranks.lose if ranks is not None else None)
    token_bytes = part.bytes_per_token  # of all ranks
    if group.size > 1:
        is_spread = drafter is not None and drafter.is_spread
        token_bytes += (group.size - 1) * (part if is_spread else replace(part, draft_shape=None)).bytes_per_token
    size = _pool_size(part, token_bytes, profile, crew)
    if crew is not None:
        crew.tell(size)
    kv = part.serving_pool(size)
    info = loaded.info
    model = part.recorded(kv)
    blocks: KVBlocks = LocalBlocks(kv, size.num_host_blocks)
    if crew is not None:
        model, blocks = LeadingModel(model, crew), LeadingBlocks(blocks, model.config.kv_shape.num_kv_heads, crew)
    if peers is not None:
        model = LockstepModel(model, peers.group)
    if config.batch_invariant:
        _find_tiles(model, drafter, kv, blocks)
    num_drafts = config.speculation.num_speculative_tokens
    limits = WorkerLimits(config.max_num_seqs, config.max_num_batched_tokens, num_speculative_tokens=num_drafts)
    geometry = replace(kv.geometry, num_host_blocks=size.num_host_blocks, bytes_per_token=token_bytes)
    description = WorkerDescription(new_instance_id(), info, geometry, limits)
    proposer = drafter.proposer(kv) if drafter is not None else None
    engine = Engine(
        model, kv, description, proposer, blocks, rejects=config.speculation.rejects, find_best=loaded.kernels.best_tokens
    )
    if group.size == 1 and loaded.kernels.flavour == "cpu" and is_all_ours(loaded.model.config, config.block_size):
        _leave_cores_to_kernels()
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


def _leave_cores_to_kernels() -> None:
    """What torch still computes of a pass is little, the cosines of its angles for example, and its second thread does not sleep after that: it spins
    for milliseconds on a core that the kernels' own threads are to have. Behind the engine, whose sampler has as many threads as loading had."""
    torch.set_num_threads(1)


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


def _pool_size(part: ModelPart, token_bytes: int, profile: MemoryProfile | None, crew: Crew | None) -> PoolSize:
    """`token_bytes`: what a position takes on all ranks together. Raises KVPoolTooSmall, NoMemoryForKV."""
    config = part.config
    if config.kv_cache_bytes is not None or profile is None:
        num_blocks = num_blocks_for(config.kv_cache_bytes or KV_CACHE_BYTES, config.block_size, token_bytes)
    else:
        num_blocks = _measured_blocks(part, profile, crew)
    if not config.swap_bytes:
        return PoolSize(num_blocks, 0)
    return PoolSize(num_blocks, num_blocks_for(config.swap_bytes, config.block_size, token_bytes, "swap_bytes"))


def _measured_blocks(part: ModelPart, profile: MemoryProfile, crew: Crew | None) -> int:
    """As many as the rank with the least room has room for, the null block aside; a position takes the most on rank 0, where `part` is."""
    memories = [part.measure(profile)]
    if crew is not None:
        memories += _in_words(crew, crew.measured)
    budget = kv_budget(memories, part.config.compute.gpu_memory_utilization or UTILIZATION)
    for line in budget.explanation:
        _log.info("memory for KV", of=line)
    block_bytes = part.config.block_size * part.bytes_per_token
    return num_blocks_for(budget.kv_bytes - block_bytes, part.config.block_size, part.bytes_per_token, "the room for KV")


def _in_words(crew: Crew, ask: Callable[[], T]) -> T:
    """What `ask` returns. Raises ConfigError for what a rank could not do."""
    try:
        return ask()
    except RankFailed as error:
        raise ConfigError(f"tensor_parallel_size {crew.group.size}: {error}") from error


def _find_tiles(model: CausalLM, drafter: Drafter | None, kv: KVPool, blocks: KVBlocks) -> None:
    """Let the kernels meet every shape now: the first request should not wait for that, nor be the one to fail. Raises NotInvariant."""
    one = np.array([1])
    model.forward(build_dummy_batch(one, one, 1, kv), kv)
    if drafter is not None:
        drafter.find_tiles(kv)
    blocks.move(Moves(zero_blocks=np.array([kv.null_block])))
