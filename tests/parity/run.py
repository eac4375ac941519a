"""Greedy outputs of the real scheduler and worker against transformers on the same weights, in every mode: `make parity`.

First a whole model on prompts of many kinds, then a few small random models of every architecture, whose logits are compared too. Some
modes speculate; drawn with a seed each, the prompts' outputs are the same with speculation as without. Prints what it does on stderr and
one JSON line on stdout; exits 0 when no logit of the small models is further away than LOGIT_TOLERANCE and no token differs but for
near ties, of which a few are allowed.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ne
from pathlib import Path
from typing import Any

import torch

from gateway.conversation import ChatMessage, Conversation
from gateway.tokenizer import Tokenizer
from gateway.tokenizer_source import load_tokenizer
from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import cpu_library
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.weights.open_model import load_model, open_model
from services.worker.drafter import LoadedModel
from tessera.values.known_models import locate
from tests.parity.architectures import ArchitectureResult, check_shape
from tests.parity.compare import Differences, compare
from tests.parity.eagle_reference import EagleReference
from tests.parity.mode import MODES, PLAIN, SPECULATIVE, SPREAD, Mode, drafter_modes
from tests.parity.prompts import CHATS, TEXTS
from tests.parity.reference import Expected, Reference
from tests.parity.tiny_models import tiny_configs

NEAR_TIES_MAX = 4
NEAR_DRAWS_MAX = 1  # drawn outputs that may differ in a mode with speculation: rounding decides once in some 100,000 draws


@dataclass(frozen=True)
class ModeResult:
    """What one mode gave; `cached_tokens` are prompt tokens that were not computed."""

    differences: Differences
    cached_tokens: int
    steps: int
    seconds: float


def run_mode(mode: Mode, loaded: LoadedModel, prompts: list[list[int]], expected: list[Expected]) -> ModeResult:
    """All prompts in one mode, on a pool of its own."""
    system = mode.system(loaded)
    generate = mode.generator(system, prompts)
    begin = time.monotonic()
    differences = compare(prompts, expected, generate)
    assert mode.prefix_caching == (system.num_cached_tokens > 0), "prefixes are reused with caching on, and only then"
    return ModeResult(differences, system.num_cached_tokens, system.num_steps, time.monotonic() - begin)


def drawn_differences(loaded: LoadedModel, prompts: list[list[int]], tokens: int, modes: Sequence[Mode]) -> list[int]:
    """How many of the prompts' outputs at temperature 0.8 are others in each of these modes than without speculation."""
    plain, *others = (
        mode.system(loaded).generate(prompts, [tokens] * len(prompts), temperature=0.8) for mode in (PLAIN[0], *modes)
    )
    return [sum(map(ne, plain, outputs)) for outputs in others]


def tokenized_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """The 32 prompts as token ids, chats first."""
    assert tokenizer.chat_template is not None
    chats = [tokenizer.chat_template.render(Conversation((ChatMessage("user", text),)), 1 << 20) for text in CHATS]
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
    parser.add_argument(
        "--architectures",
        nargs="*",
        default=list(tiny_configs()),
        help="of small random models (default: all; none with no name)",
    )
    parser.add_argument(
        "--kernels", choices=("torch", "cpu"), default="torch", help="the model's, in float32 (default: %(default)s)"
    )
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
    results = {}
    with tempfile.TemporaryDirectory() as head:
        expected = expected_outputs(path, prompts, args.tokens, Path(head))
        source = open_model(args.model)
        kernels = CpuKernels(cpu_library(args.threads), torch.float32) if args.kernels == "cpu" else TorchKernels()
        loaded = LoadedModel(load_model(source, kernels), source.info, source, kernels, kernels, kernels.kv_store())
        drafters = drafter_modes(args.model, head)
        for mode in (*MODES, *drafters):
            result = results[mode.label] = run_mode(mode, loaded, prompts, expected)
            differences = result.differences
            tell(
                f"{mode.label}: {len(differences.mismatches)} mismatches, {len(differences.near_ties)} near ties, "
                f"{result.cached_tokens} cached tokens, {result.steps} steps in {result.seconds:.1f} s"
            )
        num_drawn = drawn_differences(loaded, prompts, args.tokens, (SPECULATIVE, *drafters))
    tell(f"drawn with a seed each: {num_drawn} outputs differ with speculation")
    architectures = {name: check_architecture(name, tell) for name in args.architectures}
    is_same = all(shape.is_same for shapes in architectures.values() for shape in shapes)
    differences = {name: max(shape.difference for shape in shapes) for name, shapes in architectures.items()}
    line = summary(results, len(prompts), args.tokens) | {"drawn_differences": sum(num_drawn), "architectures": differences}
    print(json.dumps(line))
    is_same = is_same and not line["mismatches"] and line["near_ties"] <= NEAR_TIES_MAX and max(num_drawn) <= NEAR_DRAWS_MAX
    return 0 if is_same else 1


def check_architecture(name: str, tell: Callable[[str], None]) -> Sequence[ArchitectureResult]:
    """The small random models of one architecture, in every mode."""
    results = []
    for config in tiny_configs()[name]:
        with tempfile.TemporaryDirectory() as directory:
            results.append(check_shape(config, Path(directory), (*MODES, *SPREAD)))
    tell(f"{name}: " + ", ".join(f"{r.difference:.1e} ({len(r.differences.mismatches)} mismatches)" for r in results))
    return results


def expected_outputs(path: Path, prompts: list[list[int]], tokens: int, head: Path) -> list[Expected]:
    """transformers' outputs; its model is freed before ours is loaded. An EAGLE-3 head for it, which knows some ids, is saved to `head`."""
    reference = Reference(path)
    EagleReference(reference.model, (2, 5, 7), torch.arange(0, 2000, 2)).save(head)
    return [reference.greedy(prompt, tokens) for prompt in prompts]


def summary(results: dict[str, ModeResult], num_prompts: int, num_tokens: int) -> dict[str, Any]:
    """What the modes gave, for the JSON line. Places that differ in several modes count once."""
    near_ties = set().union(*(result.differences.near_ties for result in results.values()))
    mismatches = set().union(*(result.differences.mismatches for result in results.values()))
    return {
        "prompts": num_prompts,
        "tokens": num_prompts * num_tokens,
        "mismatches": len(mismatches),
        "near_ties": len(near_ties),
        "mismatch_places": sorted(mismatches),
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


if __name__ == "__main__":
    sys.exit(main())
