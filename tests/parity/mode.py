"""The ways of doing the same work: with and without prefix caching, prompts in chunks or whole, requests alone or together, speculating."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from model_worker.models.causal_lm import CausalLM
from model_worker.speculation.ngram import NgramProposer
from tessera.values.config import Config
from tessera.values.model import ModelInfo
from tests.parity.in_process import InProcess

CHUNK_TOKENS = 24  # no multiple of the block size: chunks begin and end inside blocks
BLOCK_SIZE, NUM_BLOCKS = 16, 700


@dataclass(frozen=True)
class Mode:
    """One way of doing the same work; with `num_drafts` it speculates."""

    prefix_caching: bool
    chunked: bool
    alone: bool
    num_drafts: int = 0

    @property
    def label(self) -> str:
        """For people and for the JSON line, e.g. cached/chunked/batch."""
        parts = (
            "cached" if self.prefix_caching else "uncached",
            "chunked" if self.chunked else "whole",
            "alone" if self.alone else "batch",
            *["ngram"] * bool(self.num_drafts),
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

    def system(self, model: CausalLM, info: ModelInfo, block_size: int = BLOCK_SIZE, num_blocks: int = NUM_BLOCKS) -> InProcess:
        """A scheduler and an engine with a pool of its own."""
        proposer = NgramProposer(1, 3) if self.num_drafts else None  # eager, so that many drafts are wrong
        return InProcess(model, info, self.config, block_size, num_blocks, proposer)

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
