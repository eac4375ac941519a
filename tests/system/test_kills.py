"""kill -9 in the middle of streams: every stream finishes with the tokens of an undisturbed run."""

from pathlib import Path

import pytest
from near_ties import Judge
from process_stack import CALM, Stack, last_idle
from stream_reader import Reader, wait_until

from tessera.client import Client

PROMPTS = [
    f"Chapter {number}. {text}"
    for number, text in enumerate(("The sea was", "In the year", "A good cook", "The first rule") * 2)
]

TOKENS = 40

OPTIONS = [
    {"temperature": 0.0} if index % 2 == 0 else {"temperature": 0.8, "top_p": 0.95, "seed": 1000 + index}
    for index in range(len(PROMPTS))
]
"""Half greedy, half sampled with a seed."""


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, client: Client) -> list[Reader]:
    """The same requests, all at once, with nothing killed."""
    return [reader.result() for reader in start_all(client)]


def start_all(client: Client) -> list[Reader]:
    return [
        Reader(client, prompt, max_tokens=TOKENS, ignore_eos=True, **options)
        for prompt, options in zip(PROMPTS, OPTIONS, strict=True)
    ]


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
def test_a_killed_process_loses_nothing(victim: str, undisturbed: list[Reader], judge: Judge, tmp_path: Path) -> None:
    with Stack(tmp_path, CALM) as stack, Client(stack.address) as client:
        prompts = [client.tokenize(prompt) for prompt in PROMPTS]
        readers = start_all(client)
        for reader in readers:
            reader.wait_tokens(4)
        role = getattr(stack, victim)
        role.kill()
        assert all(reader.finish is None for reader in readers), "the kill came too late to disturb anything"
        role.start()
        for prompt, options, reader, expected in zip(prompts, OPTIONS, readers, undisturbed, strict=True):
            reader.result()
            if judge.assert_same(prompt, expected.token_ids, reader.token_ids, options["temperature"], options.get("seed", 0)):
                assert reader.text == expected.text
        wait_until(lambda: bool(last_idle(stack)), "the scheduler is idle")
        idle = last_idle(stack)
        assert idle["num_free_blocks"] == idle["num_blocks"]
        if victim == "scheduler":
            assert idle["recomputed_positions"] == 0
