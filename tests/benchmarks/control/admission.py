"""What it costs to take in prompts, from the gateway's message to the first token's frame, in process CPU per prompt token."""

import gc
from dataclasses import dataclass
from time import process_time_ns

import numpy as np

from tessera.values.config import Config
from tests.benchmarks.control.desk import WORKER, Desk, prompts, submission

BLOCK_SIZE = 16


@dataclass(frozen=True)
class AdmissionCost:
    """Microseconds per prompt token, and the share of the tokens that was found cached."""

    us_per_token: float
    hit_rate: float


def admission_cost(count: int, length: int, packed: bool, rounds: int) -> AdmissionCost:
    """`count` prompts of `length` tokens, half of them shared, out of packed int32 buffers or lists. The best round's."""
    costs = []
    for _ in range(rounds):
        costs.append(
            _admit([prompt.tobytes() if packed else prompt.tolist() for prompt in prompts(count, length, length // 2, 2)])
        )
        gc.collect()
    return min(costs, key=lambda cost: cost.us_per_token)


def _admit(sources: list[bytes] | list[list[int]]) -> AdmissionCost:
    count = len(sources)
    length = len(sources[0]) // (4 if isinstance(sources[0], bytes) else 1)
    # Prefills first: what running requests decode meanwhile is no cost of admission.
    config = Config(max_num_seqs=count, max_queued_tokens=1 << 30, policy="prefill_first")
    desk = Desk(config, count * (length // BLOCK_SIZE + 4), BLOCK_SIZE, count)
    requests = 0
    desk.spent_ns = 0
    for number, source in enumerate(sources):
        begun = process_time_ns()
        prompt = np.frombuffer(source, np.int32) if isinstance(source, bytes) else np.array(source, np.int32)
        request = submission(number, prompt, 512)
        desk.spent_ns += process_time_ns() - begun
        desk.submit(request)
    while requests < count:
        requests += sum(output.token_offset == 0 for output in desk.step() if output.token_ids)
    replica = desk.leader.scheduler.replica(WORKER)
    assert replica is not None
    stats = replica.manager.stats
    return AdmissionCost(desk.spent_ns / 1000 / (count * length), stats.hit_tokens / stats.query_tokens)
