"""What takes a GPU's memory: the batches that are tried, and what follows from what was measured, on a scripted device."""

import multiprocessing
from dataclasses import dataclass, field

import pytest
from torch.distributed import HashStore

from model_worker.gpu_memory import GPUMemory
from model_worker.kv_pool import KVPool
from model_worker.memory_profile import MemoryProfile, largest_batches
from model_worker.ranks.crew import Crew, RankFailed
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.orders import Answer, send


@dataclass
class Ledger:
    """A device on which things take and give back memory; torch keeps what is given back until `settle`."""

    total: int = 1000
    others: int = 30
    outside: int = 0  # of this process, but not torch's
    used: int = 0
    kept: int = 0
    peak: int = 0
    events: list[str] = field(default_factory=list)

    def free(self) -> int:
        return self.total - self.others - self.outside - self.used - self.kept

    def held(self) -> int:
        return self.used + self.kept

    def peak_held(self) -> int:
        return self.peak

    def settle(self) -> None:
        self.kept = 0
        self.peak = self.used

    def take(self, size: int) -> None:
        reused = min(size, self.kept)
        self.kept -= reused
        self.used += size
        self.peak = max(self.peak, self.used + self.kept)

    def give_back(self, size: int) -> None:
        self.used -= size
        self.kept += size


class Recorded:
    def __init__(self, device: Ledger) -> None:
        self._device = device
        device.take(40)

    def __del__(self) -> None:
        self._device.give_back(40)


def test_each_part_is_measured_by_itself() -> None:
    device = Ledger()
    profile = MemoryProfile(device)
    device.take(300)

    def warm_up() -> None:
        device.take(25)  # weights take another form: what they were is given back
        device.give_back(60)
        device.outside += 15  # a library's buffers

    def run_largest() -> None:
        for size in (90, 120):
            device.take(size)
            device.give_back(size)

    memory = profile.measure(warm_up, run_largest, lambda: Recorded(device))
    assert memory == GPUMemory(total=1000, weights=265, activations=120, communication=15, graphs=40, others=30)
    assert device.used == 265 and not device.kept, "what was recorded is gone"


def test_the_batches_that_are_tried_are_as_large_as_may_come() -> None:
    kv = KVPool(1, 1, 16, 1, 8)
    mixed, decodes, at_once = largest_batches(max_num_seqs=8, max_tokens=300, max_len=128, kv=kv, tokens_at_once=512)
    assert mixed.num_decodes == 5 and mixed.num_rows == 8 and mixed.num_tokens <= 300 < mixed.num_tokens + 3
    assert mixed.max_query_len <= 128 and len(mixed.logits_rows) == 8
    assert (decodes.num_rows, at_once.num_rows) in ((8, 4), (4, 8)) and decodes.num_decodes == decodes.num_rows
    for batch in (mixed, decodes, at_once):
        assert batch.context_lens.unique().tolist() == [128] and batch.block_tables.unique().tolist() == [kv.null_block]


@pytest.mark.parametrize(("seqs", "tokens", "max_len"), [(1, 1, 8), (1, 100, 8), (4, 4, 2048), (300, 512, 100)])
def test_any_limits_make_batches(seqs: int, tokens: int, max_len: int) -> None:
    kv = KVPool(1, 1, 16, 1, 8)
    for batch in largest_batches(seqs, tokens, max_len, kv, 1 << 62):
        assert batch.num_tokens <= max(tokens, seqs) and batch.max_query_len <= max_len


def test_rank_0_hears_what_every_rank_has_measured() -> None:
    near, far = multiprocessing.Pipe()
    crew = Crew(GlooGroup(HashStore(), 0, 2), [near])
    memory = GPUMemory(total=10, weights=4, activations=1)
    send(far, Answer(memory=memory))
    assert crew.measured() == [memory]
    send(far, Answer(failure="OutOfMemoryError: no room"))
    with pytest.raises(RankFailed, match="rank 1: OutOfMemoryError: no room"):
        crew.measured()
