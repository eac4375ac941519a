"""Whoever drafts, under the real scheduler and engine: lives mix policies, forks, prefix hits, chunks, both ways of preemption, new leaders and
workers that start again. Every request has the tokens that it has alone and without drafts, and every set of logits the same bits.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from remembering_life import SHAPE, LlamaLife, LlamaWorker, Memory, randomized

from model_worker.kernels.interface import Kernels
from model_worker.kernels.invariant_backend import InvariantKernels, ask_mkl_for_invariance
from model_worker.layers.decoder import Decoder
from model_worker.models.causal_lm import CausalLM
from model_worker.models.eagle_head import Eagle3Head, EagleShape
from model_worker.models.experts_config import ExpertsConfig
from model_worker.models.mtp_head import MtpHead
from model_worker.models.registry import build_model
from model_worker.sampler import Sampler
from model_worker.speculation.draft_draws import DraftDraws, FreeDraws
from model_worker.speculation.draft_head import DraftHead
from services.worker.drafter import Drafter, head_drafter, model_drafter

GLM = replace(
    SHAPE,
    architecture="Glm4MoeForCausalLM",
    rotary_dim=8,
    qk_norm=True,
    num_mtp_layers=2,
    experts=ExpertsConfig(4, 2, 16, frozenset((1,)), True, num_shared=1),
)
LIVES = 2

ask_mkl_for_invariance()  # before the first test multiplies


def of_head(head: DraftHead, draws: type[DraftDraws] = DraftDraws) -> Drafter:
    randomized(head.slots(), 12)
    return head_drafter(head, 6, draws(Sampler(())))


def mtp(model: CausalLM, kernels: Kernels) -> Drafter:
    return of_head(MtpHead(GLM, kernels, model, ()))


class MtpWorker(LlamaWorker):
    shape = GLM
    make_drafter = staticmethod(mtp)


def eagle(model: CausalLM, kernels: Kernels) -> Drafter:
    assert isinstance(model, Decoder)
    shape = EagleShape(replace(SHAPE, num_layers=1), (0, 1, 1), torch.arange(0, 64, 2))
    return of_head(Eagle3Head(shape, kernels, model, ("lm_head.weight",), SHAPE.hidden_size))


def itself(model: CausalLM, kernels: Kernels) -> Drafter:
    return model_drafter(model, 6, DraftDraws(Sampler(())))


def smaller(model: CausalLM, kernels: Kernels) -> Drafter:
    draft = build_model(replace(SHAPE, hidden_size=32, num_layers=1, num_heads=2), kernels)
    randomized(draft.slots(), 13)
    return model_drafter(draft, 6, DraftDraws(Sampler(())))


class EagleWorker(LlamaWorker):
    """EAGLE-3, whose head knows half of the ids."""

    make_drafter = staticmethod(eagle)


class SmallerWorker(LlamaWorker):
    make_drafter = staticmethod(smaller)


class ItselfWorker(LlamaWorker):
    """The model drafts for itself, on KV of its own: whatever of that is wrong gives a draft that is not accepted."""

    make_drafter = staticmethod(itself)


class RejectingWorker(MtpWorker):
    make_drafter = staticmethod(lambda model, kernels: of_head(MtpHead(GLM, kernels, model, ()), FreeDraws))
    rejects = True


class RejectingLife(LlamaLife):
    """Of the drawn requests only the lengths are what they are without drafts."""

    base = RejectingWorker

    def alone(self, number: int, length: int) -> list[int]:
        is_drawn = self.rig.sequence(number).submission.sampling.temperature > 0
        return self.rig.output(number) if is_drawn else super().alone(number, length)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("worker", "mode"),
    [
        (MtpWorker, "swap"),
        (MtpWorker, "recompute"),
        (ItselfWorker, "swap"),
        (ItselfWorker, "recompute"),
        (EagleWorker, "swap"),
        (SmallerWorker, "recompute"),
    ],
)
def test_every_request_has_the_tokens_it_has_alone_whoever_drafts(worker: type[LlamaWorker], mode: str) -> None:
    memory, kernels, seen = Memory(), InvariantKernels(), Counter[str]()
    life_class = type("OneLife", (LlamaLife,), {"base": worker})
    for seed in range(LIVES):
        life = life_class(seed, mode, kernels, memory, num_drafts=2 + seed)
        try:
            life.live()
            life.check()
        except BaseException as error:
            error.add_note(f"seed {seed}, mode {mode}")
            raise
        stats = life.rig.scheduler.spec_stats
        seen += Counter(drafts=stats.num_drafts, accepted=stats.num_accepted, restarts=life.restarts)
        seen["preemptions"] += life.rig.scheduler.load().num_preemptions
        seen["swaps"] += sum(len(batch.swap_ins) for batch in life.rig.batches)
        seen["hits"] += sum(life.rig.sequence(number).num_cached_tokens > 0 for number in life.prompts)
    assert memory.contradictions == 0
    assert seen["drafts"] > 100 and min(seen["accepted"], seen["preemptions"], seen["hits"]) > 0, seen
    assert (seen["accepted"] == seen["drafts"]) == (worker is ItselfWorker), seen
    assert (seen["swaps"] > 0) == (mode == "swap")


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_rejection_sampling_goes_through_the_same_lives(mode: str) -> None:
    memory = Memory()
    life = RejectingLife(1, mode, InvariantKernels(), memory, num_drafts=2)
    life.live()
    life.check()
    stats = life.rig.scheduler.spec_stats
    assert memory.contradictions == 0
    assert 0 < stats.num_accepted < stats.num_drafts
