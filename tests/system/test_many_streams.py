"""64 streams at once: the same answers as one at a time, and everything given back."""

import pytest
from near_ties import Judge
from process_stack import Stack, last_idle
from stream_reader import Reader, wait_until

from tessera.client import Client

SENTENCE = "The quick brown fox jumps over the lazy dog while seven wizards brew potions by the river. "

REQUESTS = [(f"{number}. " + SENTENCE[number:] * (1 + number % 5), 2 + 7 * number % 13) for number in range(64)]
"""Prompts of about 20 to 100 tokens, answers of 2 to 14."""


@pytest.mark.slow
def test_64_streams_equal_one_at_a_time(stack: Stack, client: Client, judge: Judge) -> None:
    readers = [Reader(client, prompt, temperature=0.0, max_tokens=count, ignore_eos=True) for prompt, count in REQUESTS]
    together = [reader.result() for reader in readers]
    near_ties = 0
    for (prompt, count), reader in zip(REQUESTS, together, strict=True):
        assert len(reader.token_ids) == count
        alone = client.generate(prompt, temperature=0.0, max_tokens=count, ignore_eos=True)
        if judge.assert_same(client.tokenize(prompt), alone.token_ids, reader.token_ids):
            assert reader.text == alone.text
        else:
            near_ties += 1
    assert near_ties <= 2
    wait_until(lambda: last_idle(stack)["num_finished"] <= 64, "the scheduler is idle")
    assert last_idle(stack)["num_free_blocks"] == last_idle(stack)["num_blocks"]
    wait_until(lambda: not stack.request_keys(), "nothing of any request is left in Redis")
