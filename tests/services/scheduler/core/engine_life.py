"""A random life of the scheduler over a real engine: requests of a few prefixes and tenants come, fork, leave and make room."""

import random

from engine_worker import EngineWorker, KnowingProposer, greedy_output
from scheduler_rig import Rig

from tessera.values.config import POLICIES, PREEMPTION_POLICIES, QUEUE_ORDERS, Config
from tessera.values.finish import FinishReason
from tessera.values.model import WorkerLimits

PREFIXES = ([], [10, 11, 12, 13], [10, 11, 12, 13, 14, 15, 16, 17], [20, 21, 22, 23])
SALTS = ("", "", "tenant")


def random_config(rng: random.Random, mode: str, num_drafts: int) -> Config:
    max_num_seqs = rng.randint(2, 6)
    return Config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(rng.randint(6, 24), max_num_seqs * (1 + num_drafts)),
        num_speculative_tokens=num_drafts,
        enable_prefix_caching=rng.random() < 0.8,
        enable_chunked_prefill=rng.random() < 0.8,
        policy=rng.choice(POLICIES),
        queue_order=rng.choice(QUEUE_ORDERS),
        preemption_mode=mode,
        preemption_policy=rng.choice(PREEMPTION_POLICIES),
        secure_zero=rng.random() < 0.5,
        max_batches_in_flight=rng.choice((1, 2, 2)),
    )


class Life:
    """Requests of a few prefixes and tenants, some of them forks, in a pool that never holds all of them. A subclass may have another
    engine, other parameters, and other interruptions. With `num_drafts` a row verifies up to so many, right and wrong ones."""

    worker_class = EngineWorker

    def __init__(self, seed: int, mode: str, num_drafts: int = 0) -> None:
        self.rng = random.Random(seed)
        block_size = self.rng.choice((1, 2, 4))
        limits = WorkerLimits(max_num_seqs=6, max_num_batched_tokens=24, num_speculative_tokens=num_drafts)
        host_blocks = self.rng.choice((8, 64)) // block_size
        proposer = KnowingProposer(seed, self.rng.choice((0.3, 0.7, 1.0))) if num_drafts else None
        self.worker = self.worker_class(self.rng.randint(32, 56) // block_size, block_size, limits, host_blocks, proposer)
        self.rig = Rig(random_config(self.rng, mode, num_drafts), self.worker)
        self.rig.take_every = 4
        self.prompts: dict[int, list[int]] = {}

    def submit(self) -> None:
        rng, number = self.rng, len(self.prompts) + 1
        prompt = [*rng.choice(PREFIXES), *(rng.randint(30, 33) for _ in range(rng.randint(1, 6)))]
        prompt = prompt[: min(self.rig.config.max_num_batched_tokens, 24)]
        own = {"max_tokens": rng.randint(4, 20), "priority": rng.randint(-1, 1), "cache_salt": rng.choice(SALTS)}
        for child in range(rng.choice((1, 1, 3))):
            fork_of = number.to_bytes(16, "big") if child else b""
            self.prompts[number + child] = prompt
            self.rig.submit(number + child, prompt, fork_of=fork_of, ignore_eos=True, **own, **self.sampling())

    def sampling(self) -> dict[str, object]:
        """Sampling parameters of the next request, beside its `max_tokens`."""
        return {}

    def interrupt(self) -> None:
        """What happens to the worker now and then."""
        self.rig.attach()

    def alone(self, number: int, length: int) -> list[int]:
        """The first `length` tokens that request `number` has when nothing runs beside it."""
        return greedy_output(self.prompts[number], length)

    def live(self) -> None:
        for _ in range(self.rng.randint(3, 6)):
            self.submit()
        for _ in range(self.rng.randint(30, 60)):
            event = self.rng.random()
            if event < 0.08 and len(self.prompts) < 30:
                self.submit()
            elif event < 0.11:
                self.rig.scheduler.abort(self.rng.randint(1, len(self.prompts)).to_bytes(16, "big"), self.rig.now_us)
            elif event < 0.14:
                self.interrupt()
            else:
                self.rig.step(
                    self.rng.randint(1, self.rig.config.max_batches_in_flight + 1)
                )  # one more of prompts that come late
        self.rig.finish_all(self.rig.config.max_batches_in_flight)

    def check(self) -> None:
        """Every request has its own tokens, as many as it asked for unless something else has ended it; nobody holds anything."""
        for number in self.prompts:
            output, reason = self.rig.output(number), self.rig.reason(number)
            assert output == self.alone(number, len(output)), f"request {number}"
            sampling = self.rig.sequence(number).submission.sampling
            stops = [at for at, token in enumerate(output, 1) if token in sampling.stop_token_ids and at >= sampling.min_tokens]
            assert stops in ([], [len(output)]) and bool(stops) == (reason is FinishReason.STOP_TOKEN), f"request {number}"
            if not stops:
                assert reason in (FinishReason.MAX_TOKENS, FinishReason.MAX_MODEL_LEN, FinishReason.ABORTED)
                assert (reason is FinishReason.MAX_TOKENS) == (len(output) == sampling.max_tokens), f"request {number}"
        assert self.rig.free_blocks == self.rig.worker.geometry.num_blocks
        assert self.worker.engine.num_slots_held == 0
