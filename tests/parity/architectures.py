"""Every architecture against transformers: the logits of every position and the greedy tokens, in every mode."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from model_worker.kernels.torch_backend import TorchKernels
from model_worker.weights.model_source import ModelSource
from model_worker.weights.open_model import load_model, load_mtp_head, open_model
from services.worker.drafter import LoadedModel
from tests.parity.checked_model import CheckedModel
from tests.parity.compare import Differences, compare
from tests.parity.eagle_reference import EagleReference
from tests.parity.mode import MTP_MODES, Mode, drafter_modes
from tests.parity.mtp_reference import MtpReference, save_layers
from tests.parity.rank_threads import RankThreads
from tests.parity.reference import Reference
from tests.parity.tiny_models import VOCAB_SIZE, save_random

LOGIT_TOLERANCE = 1e-4
OUTPUT_TOKENS = 32
BLOCK_SIZE, NUM_BLOCKS = 4, 160


@dataclass(frozen=True)
class ArchitectureResult:
    """`difference` is the largest one of two logits; `differences` are those of tokens."""

    difference: float
    differences: Differences
    num_drawn_otherwise: int  # outputs drawn with a seed that are others in a mode that speculates
    num_accepted: int  # drafts

    @property
    def is_same(self) -> bool:
        """Whether logits are within LOGIT_TOLERANCE and tokens equal but for near ties."""
        return self.difference <= LOGIT_TOLERANCE and not self.differences.mismatches and not self.num_drawn_otherwise


def tiny_prompts() -> list[list[int]]:
    """Lengths from 1 to 60; three share their first 24 tokens."""
    draw = random.Random(5)
    shared = draw.choices(range(VOCAB_SIZE), k=24)
    tails = [draw.choices(range(VOCAB_SIZE), k=count) for count in (1, 60, 5, 17)]
    return [*tails[:2], shared + tails[2], shared + tails[3], shared]


def check_shape(config: PreTrainedConfig, directory: Path, modes: Sequence[Mode]) -> ArchitectureResult:
    """One shape, saved to `directory`, loaded by transformers and by us; also with drafts of the model's own layers if it has any, and a Llama with
    those of a draft model and of an EAGLE head."""
    model = save_random(config, directory)
    if getattr(config, "num_nextn_predict_layers", 0):
        save_layers([MtpReference(model)], directory)
        modes = [*modes, *MTP_MODES]
    if config.model_type == "llama":
        EagleReference(model, (0, 1, 2), torch.arange(0, VOCAB_SIZE, 2)).save(directory / "head")
        modes = [*modes, *drafter_modes(str(directory), str(directory / "head"))]
    return check_source(open_model(str(directory)), Reference(directory), modes)


def check_source(source: ModelSource, reference: Reference, modes: Sequence[Mode]) -> ArchitectureResult:
    """A model with the vocabulary of the small ones, in each of `modes` on a pool of its own."""
    prompts = tiny_prompts()
    expected = [reference.greedy(prompt, OUTPUT_TOKENS) for prompt in prompts]
    known = {}
    for prompt, outputs in zip(prompts, expected, strict=True):
        ids = prompt + outputs.token_ids[:-1]
        known |= {tuple(ids[: place + 1]): logits for place, logits in enumerate(reference.logits(ids))}
    spread = {key: _ranks(*key, source) for key in {(mode.ranks, mode.proposer) for mode in modes}}
    found, difference = Differences(), 0.0
    drawn, num_accepted = [], 0
    for mode in modes:
        with spread[mode.ranks, mode.proposer].held(BLOCK_SIZE, NUM_BLOCKS) as held:
            kernels = TorchKernels()
            loaded = LoadedModel(held.model, source.info, source, kernels, kernels)
            system = mode.system(loaded, None if mode.draft_model else held)  # what is held has no room for others' KV
            checked = CheckedModel(held.model, known)
            system.watch(checked)
            differences = compare(prompts, expected, mode.generator(system, prompts))
            if mode.num_drafts or not drawn:
                drawn.append(system.generate(prompts, [OUTPUT_TOKENS] * len(prompts), temperature=0.8))
        assert mode.prefix_caching == (system.num_cached_tokens > 0), "prefixes are reused with caching on, and only then"
        assert checked.compared == known.keys(), "every position was computed on the context it should have"
        found.near_ties |= differences.near_ties
        found.mismatches |= differences.mismatches
        difference = max(difference, checked.difference)
        num_accepted += system.spec_stats.num_accepted
    num_otherwise = sum(output != plain for outputs in drawn for output, plain in zip(outputs, drawn[0], strict=True))
    return ArchitectureResult(difference, found, num_otherwise, num_accepted)


def _ranks(size: int, proposer: str, source: ModelSource) -> RankThreads:
    """So many ranks with the model, and with the layers that draft where the proposer has them."""
    head = partial(load_mtp_head, source) if proposer == "mtp" else None
    return RankThreads(size, lambda kernels: load_model(source, kernels), build_head=head)
