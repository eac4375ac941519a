"""Compares the KV that workers hold in cached blocks with a fresh prefill of the tokens which the store says the blocks stand for.

A block adopted wrongly at a takeover gives wrong tokens only to whoever hits it later, so it is looked for here, not waited for. What was
swapped out, came back and was published is among them; when nothing runs, no host block is anybody's, and what lies there is only counted.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import numpy as np
import torch

from kv_manager.published_block import PublishedBlock
from model_worker.batch import Batch
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.models.deterministic import DeterministicLM, deterministic_config
from model_worker.weights.open_model import load_model, open_model
from services.scheduler.store.port import LeaseView, StoredJournal
from services.scheduler.store.redis_store import RedisStore
from tessera.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.chaos.cluster import GROUP, Cluster
from tests.chaos.setups import MODEL, Setup

BLOCK_SIZE = 16
BLOCKS_PER_CALL = 256
MESSAGE_BYTES_MAX = 64 << 20

RELATIVE_TOLERANCE = 1e-3
"""Of the largest magnitude in the block's layer. The order of additions differs between a prefill and decodes of float32, by some 1e-5; other
tokens or another position differ by about 1."""


@dataclass(slots=True)
class KVVerdict:
    """`difference_max` is relative to the layer's largest magnitude, over all blocks that were compared. `host_blocks` were written by
    swap outs in the workers' present boots."""

    blocks: int = 0
    host_blocks: int = 0
    mismatches: int = 0
    difference_max: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every block holds what it should."""
        return not self.mismatches


class FreshPrefill:
    """The KV of token ids, computed in this process. `computed` keeps it by the digest of the block's whole prefix."""

    def __init__(self, setup: Setup) -> None:
        source = open_model(MODEL)
        self.computed: dict[int, np.ndarray] = {}
        self._is_exact = setup.is_deterministic
        self._model: CausalLM
        if self._is_exact:
            self._model = DeterministicLM(deterministic_config(source.info.vocab_size, source.info.max_model_len))
        else:
            self._model = load_model(source, TorchKernels())

    def blocks(self, token_ids: list[int]) -> np.ndarray:
        """float32 `[blocks, layers, 2, block_size, kv_heads, head_dim]` of whole blocks of tokens."""
        config, count = self._model.config, len(token_ids)
        num_blocks = count // BLOCK_SIZE
        pool = KVPool(config.num_layers, num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        positions = torch.arange(count)
        batch = Batch(
            input_ids=torch.tensor(token_ids),
            positions=positions,
            slot_mapping=positions,
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            context_lens=torch.tensor([count], dtype=torch.int32),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
            num_decodes=0,
            logits_rows=torch.tensor([count - 1]),
        )
        threads = torch.get_num_threads()
        torch.set_num_threads(
            1
        )  # the idle cluster still takes some time of each core, and threads that wait for each other feel it
        with torch.inference_mode():
            self._model.forward(batch, pool)
        torch.set_num_threads(threads)
        layers = [torch.stack([pool.keys(layer)[:-1], pool.values(layer)[:-1]], 1) for layer in range(config.num_layers)]
        return torch.stack(layers, 1).transpose(3, 4).contiguous().numpy()

    def difference(self, held: np.ndarray, fresh: np.ndarray) -> float:
        """Largest difference of two blocks `[layers, 2, block_size, kv_heads, head_dim]`, relative to the layer's largest magnitude.
        1 or 0 for the deterministic model, whose numbers are bits."""
        if self._is_exact:
            return float(held.tobytes() != fresh.tobytes())
        scale = np.abs(fresh).max(axis=(2, 3, 4), keepdims=True)
        return float((np.abs(held - fresh) / scale).max())


def check_kv(cluster: Cluster, prefill: FreshPrefill) -> KVVerdict:
    """Every cached block of every worker's present boot. To be called when nothing runs."""
    verdict = KVVerdict()
    stored = asyncio.run(_stored_blocks(cluster.redis.url))
    for worker in cluster.workers:
        with grpc.insecure_channel(worker.address, options=[("grpc.max_receive_message_length", MESSAGE_BYTES_MAX)]) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            description = stub.Describe(worker_pb2.DescribeRequest(), timeout=10).description
            cached = {block.block_id: block for block in stored.get(description.boot_id, [])}
            held = _read_blocks(stub, sorted(cached))
            host = _read_blocks(stub, list(range(description.geometry.num_host_blocks)), is_host=True)
        verdict.host_blocks += sum(bool(kv.view(np.uint32).any()) for kv in host.values())
        compare(worker.name, cached, held, prefill, verdict)
    return verdict


def compare(
    worker: str, cached: dict[int, PublishedBlock], held: dict[int, np.ndarray], prefill: FreshPrefill, verdict: KVVerdict
) -> None:
    """Count in `verdict` where `held`, the blocks of a worker as flat float32, is not the KV of the tokens in `cached`."""
    for block, fresh in _fresh_blocks(cached, prefill, verdict):
        difference = prefill.difference(held[block.block_id].reshape(fresh.shape), fresh)
        verdict.blocks += 1
        verdict.difference_max = max(verdict.difference_max, difference)
        if not difference <= RELATIVE_TOLERANCE:
            verdict.mismatches += 1
            verdict.complaints.append(
                f"{worker}: block {block.block_id} is not the KV of {block.token_ids}: {difference:.2g} apart, "
                f"published at step {block.published_step}"
            )


async def _stored_blocks(url: str) -> dict[bytes, list[PublishedBlock]]:
    """The prefix-cache entries in the store, by the boot id of their worker."""
    store = RedisStore(url, GROUP)
    try:
        view = await store.look()
        assert isinstance(view, LeaseView), view
        stored = await store.read(view.epoch)
        assert isinstance(stored, StoredJournal), stored
    finally:
        await store.close()
    return {boot_id: list(blocks.values()) for (_, boot_id), blocks in stored.state.blocks.items()}


def _read_blocks(
    stub: worker_pb2_grpc.WorkerServiceStub, block_ids: list[int], *, is_host: bool = False
) -> dict[int, np.ndarray]:
    held: dict[int, np.ndarray] = {}
    for start in range(0, len(block_ids), BLOCKS_PER_CALL):
        request = worker_pb2.ReadBlocksRequest(block_ids=block_ids[start : start + BLOCKS_PER_CALL], is_host=is_host)
        for answer in stub.ReadBlocks(request, timeout=60):
            held[answer.block_id] = np.frombuffer(answer.kv, "<f4")
    return held


def _fresh_blocks(
    cached: dict[int, PublishedBlock], prefill: FreshPrefill, verdict: KVVerdict
) -> Iterator[tuple[PublishedBlock, np.ndarray]]:
    """Each cached block once, with the KV that it should hold: one prefill per longest cached prefix."""
    by_digest: dict[int, list[PublishedBlock]] = {}
    for block in cached.values():
        by_digest.setdefault(block.digest, []).append(block)
    parents = {block.parent for block in cached.values()}
    done: set[int] = set()
    for digest in by_digest.keys() - parents:
        chain: list[int] = []
        link: int | None = digest
        while link is not None and link in by_digest:
            chain.append(link)
            link = by_digest[link][0].parent
        if link is not None:
            verdict.mismatches += len(chain)
            verdict.complaints.append(f"{len(chain)} cached blocks hang on a prefix that is not cached")
            continue
        chain.reverse()
        if not prefill.computed.keys() >= set(chain):
            fresh = prefill.blocks([token for link in chain for token in by_digest[link][0].token_ids])
            prefill.computed.update(zip(chain, fresh, strict=True))
        for link in chain:
            if link not in done:
                done.add(link)
                yield from ((block, prefill.computed[link]) for block in by_digest[link])
