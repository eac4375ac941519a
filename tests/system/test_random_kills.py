"""Kills at random moments from a seed, under a model whose tokens are a hash of the KV that it really reads: any wrong block shows."""

import random
import threading
from pathlib import Path

import pytest
from process_stack import MODEL, Stack, StackOptions, last_idle
from stream_reader import Reader, wait_until

from tessera.client import Client

STREAMS = 48
TOKENS = 400

HASHING = StackOptions(
    model=MODEL,
    worker_model=f"deterministic:{MODEL}",
    scheduler=["--result-retention-ms", "500", "--log-level", "debug"],
    worker=["--kv-cache-bytes", str(4 * 1024 * 1024)],
)


def prompts(seed: int) -> list[list[int]]:
    """Token ids; every third prompt begins like the one before it."""
    random_ids = random.Random(seed)
    made: list[list[int]] = []
    for number in range(STREAMS):
        shared = made[-1][:48] if number % 3 else []
        made.append([*shared, *(random_ids.randrange(300, 40_000) for _ in range(random_ids.randrange(4, 60)))])
    return made


def start_all(client: Client, seed: int) -> list[Reader]:
    return [
        Reader(client, prompt, max_tokens=TOKENS, ignore_eos=True, seed=number, temperature=0.7 * (number % 2))
        for number, prompt in enumerate(prompts(seed))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_streams_survive_random_kills(seed: int, tmp_path: Path) -> None:
    with Stack(tmp_path, HASHING) as stack, Client(stack.address) as client:
        undisturbed = [reader.result().token_ids for reader in start_all(client, seed)]
        readers = start_all(client, seed)
        moments = random.Random(seed)
        running = STREAMS
        for victim in moments.sample([stack.scheduler, stack.worker] * 2, 4):
            threading.Event().wait(moments.uniform(0.1, 1.0))
            running = sum(reader.finish is None for reader in readers)
            victim.kill()
            victim.start()
            victim.wait_ready()
        assert running > 0, "the last kill came too late to disturb anything"
        for reader, expected in zip(readers, undisturbed, strict=True):
            assert reader.result().token_ids == expected
        wait_until(lambda: bool(last_idle(stack)), "the scheduler is idle")
        assert last_idle(stack)["num_free_blocks"] == last_idle(stack)["num_blocks"]
        wait_until(lambda: not stack.request_keys(), "nothing of any request is left in Redis")
