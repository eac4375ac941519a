"""Workers of a lockstep group that share their experts give what one worker with all of them gives, whatever each has to compute."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from model_worker.engine import Engine
from model_worker.input_batch import build_dummy_batch
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.layers import expert_parallel
from model_worker.layers.expert_parallel import over_peers
from model_worker.models.causal_lm import CausalLM
from model_worker.ranks.crew import RankLost
from model_worker.ranks.gloo_group import GlooGroup
from model_worker.ranks.lockstep_model import LockstepModel
from model_worker.weights.model_source import ModelSource
from model_worker.weights.open_model import load_model, open_model
from services.scheduler.core.admission import Admitted
from services.scheduler.core.scheduler import Scheduler
from services.worker.config import SpeculationConfig
from services.worker.drafter import LoadedModel, load_drafter
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config
from tessera.values.identity import Epoch, new_instance_id, new_request_id
from tessera.values.model import WorkerDescription, WorkerLimits
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams
from tests.parity.in_process import InProcess
from tests.parity.mtp_reference import MtpReference, save_layers
from tests.parity.rank_threads import RankThreads
from tests.parity.tiny_models import save_random, tiny_configs

ARCHITECTURES = (
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "GptOssForCausalLM",
    "MixtralForCausalLM",
    "Glm4MoeForCausalLM",
)
PROMPTS = [[5, 17, 3, 88, 41, 9], [7] * 30, [12, 150], [60, 61, 62, 63]]
TOKENS = [10, 4, 16, 7]
LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64}


def on_all(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls give, each in a thread of its own; what one raises is raised."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        torch.set_num_threads(1)
        try:
            results[number] = calls[number]()
        except BaseException as error:  # noqa: BLE001 - raised below
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def peer_groups(size: int) -> list[GlooGroup]:
    """Joined."""
    store = HashStore()
    groups = [GlooGroup(store, rank, size) for rank in range(size)]
    on_all([lambda group=group: group.join(0) for group in groups])
    return groups


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=2, max_size=3).filter(any), st.integers(1, 5))
def test_every_token_gets_the_sum_over_all_workers_in_chunks_of_any_size(counts: list[int], chunk_tokens: int) -> None:
    """Expert e adds (e + 1) * x; each worker has two experts, a token chooses two of all, padding none."""
    groups = peer_groups(len(counts))
    generator = torch.Generator().manual_seed(sum(counts))
    num_experts = 2 * len(counts)
    tokens = [torch.randint(-8, 8, (count, 3), generator=generator).float() for count in counts]
    ids = [
        torch.stack([torch.randperm(num_experts, generator=generator)[:2] for _ in range(count)] or [torch.zeros(2)])[
            :count
        ].long()
        for count in counts
    ]
    weights = [torch.randint(1, 4, (count, 2), generator=generator).float() for count in counts]

    def exchange(rank: int) -> Tensor:
        def compute(x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
            assert len(x) <= chunk_tokens * len(counts)
            is_mine = (chosen >= 2 * rank) & (chosen < 2 * rank + 2)
            return x * ((chosen + 1) * weight * is_mine).sum(dim=1, keepdim=True)

        return over_peers(groups[rank], tokens[rank], ids[rank], weights[rank], compute)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "CHUNK_TOKENS", chunk_tokens)
        sums = on_all([lambda rank=rank: exchange(rank) for rank in range(len(counts))])
    for x, chosen, weight, found in zip(tokens, ids, weights, sums, strict=True):
        assert torch.equal(found, x * ((chosen + 1) * weight).sum(dim=1, keepdim=True))


class LockstepPair:
    """One scheduler with two workers in lockstep, each with half of the experts. With `num_drafts` each has the layers that draft whole."""

    def __init__(self, source: ModelSource, num_drafts: int = 0) -> None:
        self.groups = peer_groups(2)
        self.kernels = [TorchKernels(peers=group) for group in self.groups]
        parts = [load_model(source, kernels) for kernels in self.kernels]
        models: list[CausalLM] = [LockstepModel(*pair) for pair in zip(parts, self.groups, strict=True)]
        config = Config(lockstep=True, worker_choice="round_robin", num_speculative_tokens=num_drafts, **LIMITS)
        self.scheduler = Scheduler(config, Epoch(1, new_instance_id()))
        self.engines: dict[str, Engine] = {}
        for name, part, model in zip("ab", parts, models, strict=True):
            loaded = LoadedModel(part, source.info, source, TorchKernels(), TorchKernels())
            speculation = SpeculationConfig(num_drafts, "mtp") if num_drafts else SpeculationConfig()
            drafter = load_drafter(speculation, config.max_num_seqs, loaded)
            kv = KVPool.of_shape(model.config.kv_shape, 60, 4, paired=drafter.kv_shape if drafter else None)
            limits = WorkerLimits(config.max_num_seqs, config.max_num_batched_tokens, num_speculative_tokens=num_drafts)
            description = WorkerDescription(new_instance_id(), source.info, kv.geometry, limits)
            self.engines[name] = Engine(model, kv, description, drafter.proposer(kv) if drafter else None)
            self.scheduler.attach_worker(name, self.engines[name].report(1), 0)
        self.now_us = 0
        self.num_dummies = 0

    def tick(self) -> int:
        self.now_us += 1000
        return self.now_us

    def submit(self, number: int) -> bytes:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, seed=number, max_tokens=TOKENS[number])
        submission = Submission(new_request_id(), np.array(PROMPTS[number], np.int32), sampling)
        assert isinstance(self.scheduler.submit(submission, 0, (), self.tick()), Admitted)
        return submission.request_id

    def run_round(self) -> None:
        batches: dict[str, ScheduledBatch] = {}
        for name in self.engines:
            batch = self.scheduler.schedule(name, self.tick())
            if batch is not None:
                batches[name] = batch
                self.num_dummies += batch.is_dummy_run
        outputs = on_all([lambda name=name: self.engines[name].execute(batches[name]) for name in batches])
        for name, output in zip(batches, outputs, strict=True):
            if isinstance(output, BaseException):
                raise output
            assert isinstance(output, ScheduledBatchOutput) and output.row_errors == ()
            self.scheduler.postprocess(name, output, self.tick())

    def outputs(self) -> list[list[int]]:
        ids = [self.submit(number) for number in range(len(PROMPTS))]
        while self.scheduler.load().num_running + self.scheduler.load().num_waiting:
            self.run_round()
        return [list(self.scheduler.request(request_id).output_token_ids()) for request_id in ids]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_workers_that_share_experts_give_the_tokens_of_one(architecture: str, tmp_path: Path) -> None:
    """Prompts of unlike lengths end at unlike times, so that chunks are padded and each worker runs dummies for the other."""
    save_random(tiny_configs()[architecture][0], tmp_path)
    source = open_model(str(tmp_path))
    pair = LockstepPair(source)
    whole = InProcess(load_model(source, TorchKernels()), source.info, Config(**LIMITS), 4, 60)
    assert pair.outputs() == whole.generate(PROMPTS, TOKENS)
    assert pair.num_dummies > 0


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_workers_that_share_experts_draft_each_for_itself(architecture: str, tmp_path: Path) -> None:
    save_layers([MtpReference(save_random(tiny_configs()[architecture][0], tmp_path))], tmp_path)
    source = open_model(str(tmp_path))
    pair = LockstepPair(source, num_drafts=2)
    whole = InProcess(load_model(source, TorchKernels()), source.info, Config(**LIMITS), 4, 60)
    assert pair.outputs() == whole.generate(PROMPTS, TOKENS)
    assert pair.scheduler.spec_stats.num_drafts > 10


def test_ranks_and_workers_share_experts_at_once(tmp_path: Path) -> None:
    """Two workers of two ranks each: the experts are spread over four processes, and the logits are those of one."""
    save_random(tiny_configs()["DeepseekV3ForCausalLM"][0], tmp_path)
    source = open_model(str(tmp_path))
    peers = [peer_groups(2), peer_groups(2)]  # by rank, then worker

    def logits(threads: RankThreads) -> Tensor:
        with threads.held(4, 8) as held:
            batch = build_dummy_batch(np.array([7]), np.array([7]), 0, held.kv)
            batch.input_ids.copy_(torch.arange(7) * 3)
            return held.model.forward(batch, held.kv)

    def worker(number: int) -> Tensor:
        def kernels(group: Any) -> TorchKernels:
            return TorchKernels(group, peers[group.rank][number])

        return logits(RankThreads(2, lambda each: load_model(source, each), kernels))

    expected = logits(RankThreads(1, lambda each: load_model(source, each)))
    for found in on_all([lambda: worker(0), lambda: worker(1)]):
        assert torch.allclose(found, expected, atol=1e-4)


def test_a_pass_that_fails_ends_every_worker_of_the_group(tmp_path: Path) -> None:
    save_random(tiny_configs()["Qwen3MoeForCausalLM"][0], tmp_path)
    pair = LockstepPair(open_model(str(tmp_path)))
    for number in range(4):
        pair.submit(number)
    pair.run_round()

    def broken(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise MemoryError("no room")

    pair.kernels[1].linear = broken  # type: ignore[method-assign]
    batches = {name: pair.scheduler.schedule(name, pair.tick()) for name in pair.engines}
    first, second = on_all([lambda name=name: pair.engines[name].execute(batches[name]) for name in batches])
    assert isinstance(second, RankLost) and "worker 1 of 2 in a lockstep group failed in a pass: MemoryError: no room" in str(
        second
    )
    assert isinstance(first, RankLost) and "worker 0 of 2" in str(first)
