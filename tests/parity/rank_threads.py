"""A model over several ranks that are threads of this process: gloo joins them as it joins processes, and nothing has to be started."""

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.distributed import HashStore

from model_worker.group import ALONE, Group
from model_worker.kernels.interface import Kernels
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_blocks import KVBlocks, LocalBlocks
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.ranks.crew import Crew
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.leading import LeadingBlocks, LeadingHead, LeadingModel
from model_worker.ranks.shard import Shard
from model_worker.speculation.draft_head import DraftHead


@dataclass(frozen=True)
class Held:
    """What an engine needs: a model, its pool, and the blocks in it; a head that drafts, if there is one."""

    model: CausalLM
    kv: KVPool
    blocks: KVBlocks
    head: DraftHead | None = None


class RankThreads:
    """`size` ranks, each with a model of its own from `build`, and a head on it from `build_head`; with 1 there are no threads."""

    def __init__(
        self,
        size: int,
        build: Callable[[Kernels], CausalLM],
        kernels: Callable[[Group], Kernels] = TorchKernels,
        build_head: Callable[[Kernels, CausalLM], DraftHead] | None = None,
    ) -> None:
        store = HashStore()  # of the first session; `held` has one for each
        self.groups = [GlooGroup(store, rank, size) for rank in range(size)] if size > 1 else [ALONE]
        made = self._kernels = [kernels(group) for group in self.groups]
        self.models = [build(each) for each in made]
        self.heads = [build_head(*pair) if build_head else None for pair in zip(made, self.models, strict=True)]

    @contextmanager
    def held(self, block_size: int, num_blocks: int, num_host_blocks: int = 0) -> Iterator[Held]:
        """Fresh pools, and threads that serve them while the context lasts."""
        groups = [group for group in self.groups if isinstance(group, GlooGroup)]
        pools = [
            KVPool.of_shape(
                model.config.kv_shape_of(group), num_blocks, block_size, kernels.kv_store(), head.kv_shape if head else None
            )
            for model, group, kernels, head in zip(self.models, self.groups, self._kernels, self.heads, strict=True)
        ]
        blocks = [LocalBlocks(kv, num_host_blocks) for kv in pools]
        if not groups:
            yield Held(self.models[0], pools[0], blocks[0], self.heads[0])
            return
        store = HashStore()  # in an old one they would find each other's old addresses
        for group in groups:
            group._store = store
        pipes = [multiprocessing.Pipe() for _ in groups[1:]]
        shards = [
            Shard(*parts) for parts in zip(self.models[1:], pools[1:], blocks[1:], groups[1:], self.heads[1:], strict=True)
        ]
        with ExitStack() as stack:
            threads = [
                threading.Thread(target=_serve, args=(shard, far)) for shard, (_, far) in zip(shards, pipes, strict=True)
            ]
            for thread, (near, _) in zip(threads, pipes, strict=True):
                thread.start()
                stack.callback(thread.join)
                stack.callback(near.close)
            groups[0].join(0)
            stack.callback(groups[0].leave)
            crew = Crew(groups[0], [near for near, _ in pipes])
            num_kv_heads = self.models[0].config.kv_shape.num_kv_heads
            head = LeadingHead(self.heads[0], crew) if self.heads[0] else None
            yield Held(LeadingModel(self.models[0], crew), pools[0], LeadingBlocks(blocks[0], num_kv_heads, crew), head)


def _serve(shard: Shard, line: "multiprocessing.connection.Connection") -> None:
    torch.set_num_threads(1)
    with line:
        shard.group.join(0)
        shard.serve(line)
