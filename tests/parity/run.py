"""Greedy outputs of the real scheduler and worker against transformers on the same weights, in every mode: `make parity`.

Some modes speculate; drawn with a seed each, the prompts' outputs are the same with speculation as without. Prints what it does on stderr and
one JSON line on stdout; exits 0 when no token differs but for near ties, of which a few are allowed.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from gateway.chat_template import ChatMessage
from gateway.tokenizer import Tokenizer
from gateway.tokenizer_source import load_tokenizer
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.models.causal_lm import CausalLM
from model_worker.speculation.ngram import NgramProposer
from model_worker.weights.open_model import load_model, open_model
from tessera.values.config import Config
from tessera.values.known_models import locate
from tessera.values.model import ModelInfo
from tests.parity.compare import Differences, compare
from tests.parity.in_process import InProcess
from tests.parity.prompts import CHATS, TEXTS
from tests.parity.reference import Expected, Reference

NEAR_TIES_MAX = 4
NEAR_DRAWS_MAX = 1  # drawn outputs that may differ with speculation: rounding decides once in some 100,000 draws
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

    def system(self, model: CausalLM, info: ModelInfo) -> InProcess:
        """A scheduler and an engine with a pool of its own."""
        proposer = NgramProposer(1, 3) if self.num_drafts else None  # eager, so that many drafts are wrong
        return InProcess(model, info, self.config, BLOCK_SIZE, NUM_BLOCKS, proposer)


PLAIN = tuple(Mode(*flags) for flags in product((False, True), repeat=3))
SPECULATIVE = Mode(True, True, False, 4)
MODES = (*PLAIN, SPECULATIVE, Mode(False, False, True, 4))


@dataclass(frozen=True)
class ModeResult:
    """What one mode gave; `cached_tokens` are prompt tokens that were not computed."""

    differences: Differences
    cached_tokens: int
    steps: int
    seconds: float


def run_mode(mode: Mode, model: CausalLM, info: ModelInfo, prompts: list[list[int]], expected: list[Expected]) -> ModeResult:
    """All prompts in one mode, on a pool of its own. With prefix caching every prompt is prefilled once before, so that all hit."""
    system = mode.system(model, info)
    if mode.prefix_caching:
        system.generate(prompts, [1] * len(prompts))
        system.num_cached_tokens = 0

    def generate(starts: list[list[int]], counts: list[int]) -> list[list[int]]:
        if not mode.alone:
            return system.generate(starts, counts)
        return [system.generate([start], [count])[0] for start, count in zip(starts, counts, strict=True)]

    begin = time.monotonic()
    differences = compare(prompts, expected, generate)
    assert mode.prefix_caching == (system.num_cached_tokens > 0), "prefixes are reused with caching on, and only then"
    return ModeResult(differences, system.num_cached_tokens, system.num_steps, time.monotonic() - begin)


def drawn_differences(model: CausalLM, info: ModelInfo, prompts: list[list[int]], tokens: int) -> int:
    """How many of the prompts' outputs at temperature 0.8 are others with speculation than without."""
    outputs = [
        mode.system(model, info).generate(prompts, [tokens] * len(prompts), temperature=0.8) for mode in (PLAIN[0], SPECULATIVE)
    ]
    return sum(plain != drafted for plain, drafted in zip(*outputs, strict=True))


def tokenized_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """The 32 prompts as token ids, chats first."""
    assert tokenizer.chat_template is not None
    chats = [tokenizer.chat_template.render([ChatMessage("user", text)], 1 << 20) for text in CHATS]
    return [tokenizer.encode(text, False) for text in (*chats, *TEXTS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="known name, directory or GGUF file (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts", type=int, default=len(CHATS) + len(TEXTS), help="how many of the prompts (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens per prompt (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    begin = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begin:6.1f} s  {text}", file=sys.stderr, flush=True)

    path = locate(args.model)
    prompts = tokenized_prompts(load_tokenizer(path))[: args.prompts]
    lengths = [len(prompt) for prompt in prompts]
    tell(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens; transformers generates {args.tokens} tokens each")
    expected = expected_outputs(path, prompts, args.tokens)
    source = open_model(args.model)
    model = load_model(source, TorchKernels())
    results = {}
    for mode in MODES:
        result = results[mode.label] = run_mode(mode, model, source.info, prompts, expected)
        differences = result.differences
        tell(
            f"{mode.label}: {len(differences.mismatches)} mismatches, {len(differences.near_ties)} near ties, "
            f"{result.cached_tokens} cached tokens, {result.steps} steps in {result.seconds:.1f} s"
        )
    num_drawn = drawn_differences(model, source.info, prompts, args.tokens)
    tell(f"drawn with a seed each: {num_drawn} outputs differ with speculation")
    return report(results, len(prompts), args.tokens, num_drawn)


def expected_outputs(path: Path, prompts: list[list[int]], tokens: int) -> list[Expected]:
    """transformers' outputs; its model is freed before ours is loaded."""
    reference = Reference(path)
    return [reference.greedy(prompt, tokens) for prompt in prompts]


def report(results: dict[str, ModeResult], num_prompts: int, num_tokens: int, num_drawn: int) -> int:
    """Print the JSON line; returns the exit status. Places that differ in several modes count once."""
    near_ties = set().union(*(result.differences.near_ties for result in results.values()))
    mismatches = set().union(*(result.differences.mismatches for result in results.values()))
    line = {
        "prompts": num_prompts,
        "tokens": num_prompts * num_tokens,
        "mismatches": len(mismatches),
        "near_ties": len(near_ties),
        "mismatch_places": sorted(mismatches),
        "drawn_differences": num_drawn,
        "modes": {
            label: {
                "mismatches": len(result.differences.mismatches),
                "near_ties": len(result.differences.near_ties),
                "cached_tokens": result.cached_tokens,
                "steps": result.steps,
            }
            for label, result in results.items()
        },
    }
    print(json.dumps(line))
    return 0 if not mismatches and len(near_ties) <= NEAR_TIES_MAX and num_drawn <= NEAR_DRAWS_MAX else 1


if __name__ == "__main__":
    sys.exit(main())
