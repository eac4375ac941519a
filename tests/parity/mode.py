"""The ways of doing the same work: with and without prefix caching, prompts in chunks or whole, requests alone or together, speculating."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from model_worker.sampler import Sampler
from model_worker.speculation.draft_draws import DraftDraws
from services.worker.config import SpeculationConfig
from services.worker.drafter import Drafter, LoadedModel, head_drafter, load_drafter
from tessera.values.config import Config
from tests.parity.in_process import InProcess
from tests.parity.rank_threads import Held

CHUNK_TOKENS = 24  # no multiple of the block size: chunks begin and end inside blocks
BLOCK_SIZE, NUM_BLOCKS = 16, 700


@dataclass(frozen=True)
class Mode:
    """One way of doing the same work; with `num_drafts` it speculates, with drafts of `proposer`; with more `ranks` than one each holds a part
    of the model."""

    prefix_caching: bool
    chunked: bool
    alone: bool
    num_drafts: int = 0
    proposer: str = "ngram"
    ranks: int = 1
    draft_model: str | None = None

    @property
    def label(self) -> str:
        """For people and for the JSON line, e.g. cached/chunked/batch."""
        parts = (
            "cached" if self.prefix_caching else "uncached",
            "chunked" if self.chunked else "whole",
            "alone" if self.alone else "batch",
            *[self.proposer] * bool(self.num_drafts),
            *[f"{self.ranks} ranks"] * (self.ranks > 1),
        )
        return "/".join(parts)

    @property
    def config(self) -> Config:
        """The scheduler's configuration for this mode."""
        return Config(
            max_num_seqs=64,
            max_num_batched_tokens=16384,
            enable_prefix_caching=self.prefix_caching,
            enable_chunked_prefill=self.chunked,
            long_prefill_token_threshold=CHUNK_TOKENS if self.chunked else 0,
            num_speculative_tokens=self.num_drafts,
        )

    @property
    def speculation(self) -> SpeculationConfig:
        """The worker's configuration for this mode. Prompt lookup is eager, so that many drafts are wrong."""
        if not self.num_drafts:
            return SpeculationConfig()
        return SpeculationConfig(self.num_drafts, self.proposer, self.draft_model, ngram_min=1, ngram_max=3)

    def system(self, loaded: LoadedModel, held: Held | None = None) -> InProcess:
        """A scheduler and an engine with a pool of its own, or with the one that is there already."""
        max_num_seqs = self.config.max_num_seqs
        if held is not None and held.head is not None:
            drafter: Drafter | None = head_drafter(held.head, max_num_seqs, DraftDraws(Sampler(loaded.info.eos_token_ids)))
        else:
            drafter = load_drafter(self.speculation, max_num_seqs, loaded)
        pool = None if held is None else (held.kv, held.blocks)
        return InProcess(loaded.model, loaded.info, self.config, BLOCK_SIZE, NUM_BLOCKS, drafter, pool, loaded.store)

    def generator(self, system: InProcess, prompts: list[list[int]]) -> Callable[[list[list[int]], list[int]], list[list[int]]]:
        """`generate` for `compare`. With prefix caching every prompt is prefilled once before, so that all hit."""
        if self.prefix_caching:
            system.generate(prompts, [1] * len(prompts))
            system.num_cached_tokens = 0

        def alone(starts: list[list[int]], counts: list[int]) -> list[list[int]]:
            return [system.generate([start], [count])[0] for start, count in zip(starts, counts, strict=True)]

        return alone if self.alone else system.generate


PLAIN = tuple(Mode(*flags) for flags in product((False, True), repeat=3))
SPECULATIVE = Mode(True, True, False, 4)
MODES = (*PLAIN, SPECULATIVE, Mode(False, False, True, 4))
MTP_MODES = (Mode(True, True, False, 3, "mtp"), Mode(False, False, True, 1, "mtp"), Mode(True, True, False, 3, "mtp", ranks=2))
SPREAD = (Mode(False, False, False, ranks=2), Mode(True, True, False, 4, ranks=2), Mode(True, True, False, ranks=4))
"""For the small models, beside MODES."""


def drafter_modes(model: str, head: str) -> tuple[Mode, ...]:
    """With drafts of `model` itself, nearly all of them right, and of the EAGLE head in the directory `head`, which knows nothing."""
    return Mode(True, True, False, 3, "draft_model", draft_model=model), Mode(True, False, False, 3, "eagle", draft_model=head)
