"""A head that drafts over several ranks gives the drafts of one that one rank holds, and its failures cost drafts alone."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.sampler import Sampler
from model_worker.speculation.draft_draws import DraftDraws
from model_worker.speculation.head_proposer import HeadProposer
from model_worker.speculation.proposer import Drafts
from model_worker.weights.model_source import ModelSource
from model_worker.weights.open_model import load_eagle_head, load_model, open_model
from services.worker.drafter import Drafter
from tessera.values.config import Config
from tests.parity.eagle_reference import EagleReference
from tests.parity.in_process import InProcess
from tests.parity.rank_threads import Held, RankThreads
from tests.parity.tiny_models import VOCAB_SIZE, save_random, tiny_configs

PROMPTS = [[5, 17, 3, 88, 41, 9, 120], [7, 7, 9, 13], [*range(30, 60)]]
SOME_IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(2))[:51].sort().values
HEADS: tuple[dict[str, Any], ...] = ({}, {"taps": (0, 2, 1), "token_ids": SOME_IDS, "own_embedding": True})


class FailingKernels(TorchKernels):
    """Raises in the next product where `fails` is set."""

    fails = False

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.fails:
            self.fails = False
            raise MemoryError("no room for a product")
        return super().linear(x, weight, bias)


class Recording(HeadProposer):
    """Remembers its drafts, and makes the kernels `failing` fail once, before the round number `fails_at`."""

    failing: Sequence[FailingKernels] = ()
    fails_at = -1

    def propose(self, *arguments: Any) -> Drafts:
        if len(self.rounds) == self.fails_at:
            self.fails_at = -1
            for kernels in self.failing:
                kernels.fails = True
        drafts = super().propose(*arguments)
        self.rounds.append(drafts.token_ids.tolist())
        return drafts

    rounds: list[list[list[int]]]


def served(held: Held, source: ModelSource, made: list[Recording]) -> InProcess:
    assert held.head is not None
    head = held.head

    def make(kv: Any) -> Recording:
        made.append(Recording(head, kv, 16, DraftDraws(Sampler(source.info.eos_token_ids))))
        made[-1].rounds = []
        return made[-1]

    limits = Config(max_num_seqs=8, max_num_batched_tokens=64, num_speculative_tokens=3)
    drafter = Drafter(head.kv_shape, make, is_spread=True)
    return InProcess(held.model, source.info, limits, 4, held.kv.num_blocks, drafter, (held.kv, held.blocks))


@pytest.fixture(params=HEADS, ids=["EAGLE", "EAGLE-3"])
def source_and_head(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelSource, Path]:
    model = save_random(tiny_configs()["LlamaForCausalLM"][0], tmp_path / "model")
    EagleReference(model, **request.param).save(tmp_path / "head")
    return open_model(str(tmp_path / "model")), tmp_path / "head"


def ranks_of(size: int, source: ModelSource, head: Path, kernels: list[FailingKernels]) -> RankThreads:
    def kernels_of(group: Any) -> FailingKernels:
        kernels.append(FailingKernels(group))
        return kernels[-1]

    build_head = partial(load_eagle_head, str(head))
    return RankThreads(
        size, lambda each: load_model(source, each), kernels_of, lambda each, model: build_head(each, model, "model")
    )


def test_drafts_and_tokens_are_those_of_one_rank(source_and_head: tuple[ModelSource, Path]) -> None:
    found = []
    for size in (1, 2, 4):
        made: list[Recording] = []
        with ranks_of(size, *source_and_head, []).held(4, 64) as held:
            outputs = served(held, source_and_head[0], made).generate(PROMPTS, [12] * 3)
        found.append((outputs, made[0].rounds))
    assert found[0] == found[1] == found[2]
    assert sum(map(len, found[0][1])) > 20, "drafts of so many rows"


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)])
def test_a_draft_that_fails_on_some_ranks_costs_drafts_alone(
    source_and_head: tuple[ModelSource, Path], failing: tuple[int, ...]
) -> None:
    source, head = source_and_head
    kernels: list[FailingKernels] = []
    made: list[Recording] = []
    with ranks_of(2, source, head, kernels).held(4, 64) as held:
        system = served(held, source, made)
        made[0].failing, made[0].fails_at = [kernels[rank] for rank in failing], 2
        outputs = system.generate(PROMPTS, [12] * 3)
    with ranks_of(1, source, head, []).held(4, 64) as held:
        assert served(held, source, []).generate(PROMPTS, [12] * 3) == outputs
    assert made[0].fails_at == -1 and all(len(output) == 12 for output in outputs)
    assert np.sum([len(drafts) for drafts in made[0].rounds]) > 0
