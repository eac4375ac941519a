"""A pool that is too small for what runs in it, with host memory beside: nobody can tell by the tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
from near_ties import Judge
from process_stack import CALM, MODEL, Stack, StackOptions, last_idle
from stream_reader import Reader, wait_until

from model_worker.models.deterministic import next_tokens
from tessera.client import Client

SENTENCE = "The quick brown fox jumps over the lazy dog while seven wizards brew potions by the river. "
PROMPTS = [f"{number}. {SENTENCE[4 * number :]}" for number in range(8)]

BLOCK_TOKENS = 16


def tight(options: StackOptions, token_bytes: int, num_blocks: int, num_host_blocks: int) -> StackOptions:
    """The same with so small a pool, and preemption by swap."""
    block_bytes = BLOCK_TOKENS * token_bytes
    pools = ["--kv-cache-bytes", str(num_blocks * block_bytes), "--swap-bytes", str(num_host_blocks * block_bytes)]
    scheduler = [*options.scheduler, "--preemption-mode", "swap", "--preemption-policy", "shortest_remaining"]
    return replace(options, scheduler=scheduler, worker=pools)


def all_swapped(stack: Stack) -> None:
    """Some were swapped out, and everything is given back."""
    wait_until(lambda: bool(last_idle(stack)), "the scheduler is idle")
    idle = last_idle(stack)
    assert idle["num_swap_outs"] > 0, idle
    assert idle["num_free_blocks"] == idle["num_blocks"]


def test_every_token_is_right_though_its_kv_was_swapped(tmp_path: Path) -> None:
    """The model's tokens depend on every KV number that it reads: a block in the wrong place, or a lost one, gives another."""
    plain = StackOptions(MODEL, f"deterministic:{MODEL}", scheduler=CALM.scheduler)
    with Stack(tmp_path, tight(plain, 8, num_blocks=20, num_host_blocks=64)) as stack, Client(stack.address) as client:
        readers = [Reader(client, prompt, temperature=0.0, max_tokens=60, ignore_eos=True) for prompt in PROMPTS]
        vocab_size = client.model().vocab_size
        for prompt, reader in zip(PROMPTS, readers, strict=True):
            token_ids = list(client.tokenize(prompt))
            for token_id in reader.result().token_ids:
                assert token_id == next_tokens(token_ids, vocab_size)[0]
                token_ids.append(token_id)
            assert len(reader.token_ids) == 60
        all_swapped(stack)


@pytest.mark.slow
def test_a_tight_pool_with_swap_gives_the_tokens_of_a_large_one(client: Client, judge: Judge, tmp_path: Path) -> None:
    """The real model: the large pool is that of the system which the other tests use."""
    options = tight(CALM, 2 * 30 * 3 * 64 * 2, num_blocks=6, num_host_blocks=16)
    with Stack(tmp_path, options) as stack, Client(stack.address) as tight_client:
        given = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
        readers = [Reader(tight_client, prompt, **given) for prompt in PROMPTS[:3]]
        together = [reader.result() for reader in readers]
        near_ties = 0
        for prompt, reader in zip(PROMPTS, together, strict=False):
            large = client.generate(prompt, **given)
            near_ties += not judge.assert_same(client.tokenize(prompt), large.token_ids, reader.token_ids)
        assert near_ties <= 1
        all_swapped(stack)
