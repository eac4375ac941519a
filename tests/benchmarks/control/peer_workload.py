"""The same work for a peer's scheduler, driven without a model: standard library only, because it runs in the peer's environment.

A peer's step is its own `schedule` and `postprocess` with tokens made beforehand: no record, no frame, and what it does not do is not counted.
"""

import gc
import json
import random
import statistics
from typing import Protocol

CONTEXT, SEQS, STEPS, WARM_STEPS = 1024, 256, 96, 16
PROMPTS, SHARED = 1000, 512
BLOCK_SIZE, TOKENS_MAX = 16, 16_384


class Peer(Protocol):
    """A peer's scheduler with its block manager."""

    def add(self, prompt: list[int], max_tokens: int) -> float:
        """Take in a request; CPU seconds."""

    def step(self) -> tuple[float, int]:
        """Schedule a step, and commit one token a row; CPU seconds, and rows."""

    def num_waiting(self) -> int:
        """Requests that were not scheduled yet."""


class MakePeer(Protocol):
    """Makes a peer with a pool of `num_blocks`, for at most `seqs_max` rows in a step."""

    def __call__(self, num_blocks: int, seqs_max: int) -> Peer: ...


def measure(make: MakePeer, rounds: int = 2) -> None:
    """Print a line of JSON: microseconds per sequence and decode step, and per prompt token admitted."""
    decode = min(_decode(make) for _ in range(rounds))
    admit = min(_admit(make) for _ in range(rounds))
    print(json.dumps({"decode_us_per_seq_256": round(decode, 3), "admit_us_per_token_list": round(admit, 4)}))


def _decode(make: MakePeer) -> float:
    peer = make(SEQS * (CONTEXT // BLOCK_SIZE + 32), SEQS)
    for number, prompt in enumerate(_prompts(SEQS, CONTEXT, 0)):
        peer.add(prompt[: CONTEXT - number % BLOCK_SIZE], 2048)
    while peer.num_waiting():
        peer.step()
    for _ in range(WARM_STEPS):
        _, rows = peer.step()
    assert rows == SEQS, f"{rows} rows decode"
    gc.collect()
    return statistics.fmean(peer.step()[0] for _ in range(STEPS)) / SEQS * 1e6


def _admit(make: MakePeer) -> float:
    peer = make(PROMPTS * (CONTEXT // BLOCK_SIZE + 4), PROMPTS)
    prompts = _prompts(PROMPTS, CONTEXT, SHARED)
    gc.collect()
    spent = sum(peer.add(prompt, 512) for prompt in prompts)
    while peer.num_waiting():
        spent += peer.step()[0]
    return spent / (PROMPTS * CONTEXT) * 1e6


def _prompts(count: int, length: int, shared: int) -> list[list[int]]:
    rng = random.Random(1)
    begin = [rng.randrange(3, 49_000) for _ in range(shared)]
    return [begin + [rng.randrange(3, 49_000) for _ in range(length - shared)] for _ in range(count)]
