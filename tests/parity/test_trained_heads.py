"""Heads that were trained for seconds on a random model's own output draft far better than chance, and change no token."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.worker.drafter import load_drafter
from tessera.values.config import Config
from tests.parity.in_process import InProcess
from tests.parity.trained_heads import TRAINED, VOCAB_SIZE, random_prompts

PROMPTS = random_prompts(16)
TOKENS, DRAFTS = 24, 3
TIMES_CHANCE = 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", list(TRAINED))
def test_a_trained_head_is_right_far_more_often_than_chance(name: str, tmp_path: Path) -> None:
    head = TRAINED[name](tmp_path)
    assert sum(head.losses[-5:]) < 0.7 * sum(head.losses[:5])
    loaded = head.load()
    outputs, systems = [], []
    for num_drafts in (0, DRAFTS):
        config = Config(max_num_seqs=16, max_num_batched_tokens=256, num_speculative_tokens=num_drafts)
        drafter = load_drafter(head.speculation(num_drafts), config.max_num_seqs, loaded)
        systems.append(InProcess(loaded.model, loaded.info, config, 4, 300, drafter))
        counts = [TOKENS] * len(PROMPTS)
        outputs.append([systems[-1].generate(PROMPTS, counts, temperature=heat) for heat in (0.0, 1.0)])
    assert outputs[0] == outputs[1], "greedy and drawn"
    stats = systems[1].spec_stats
    by_position = [round(count / stats.num_steps, 3) for count in stats.accepted_by_position]
    print(
        f"{name}: {stats.acceptance_rate:.1%} of {stats.num_drafts} drafts accepted, chance {1 / VOCAB_SIZE:.1%}; {by_position}"
    )
    assert by_position[0] > TIMES_CHANCE / VOCAB_SIZE, "the first draft of a row; further ones stand only behind right ones"
