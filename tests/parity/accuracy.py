"""What each way of computing on a CPU costs in accuracy: `make accuracy`.

The perplexity of the repository's decision records; how often the likeliest next token there is that of torch in float32; and how far greedy
answers go along with its answers. Prints a table, then one JSON line; exits 1 where 8-bit weights raise the perplexity by more than EIGHT_BITS_MAX.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gateway.tokenizer_source import load_tokenizer
from model_worker.kernels.cpu.backend import CpuKernels
from model_worker.kernels.cpu.library import CpuLibrary, cpu_library, multiplies_bfloat16
from model_worker.kernels.interface import Kernels
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.weights.model_source import ModelSource
from model_worker.weights.open_model import load_model, open_model
from tessera.values.config import Config
from tessera.values.known_models import locate
from tests.model_worker.paged_driver import PagedDriver
from tests.parity.in_process import InProcess
from tests.parity.prompts import TEXTS

RECORDS = Path(__file__).parents[2] / "docs" / "adr"
BLOCK_SIZE = 16
EIGHT_BITS_MAX = 0.01

REFERENCE = "torch f32"
MODES: dict[str, Callable[[CpuLibrary], Kernels]] = {
    REFERENCE: lambda library: TorchKernels(),
    "f32": lambda library: CpuKernels(library, torch.float32),
    "f16": lambda library: CpuKernels(library, torch.float16),
    "bf16": lambda library: CpuKernels(library, torch.bfloat16),
    "int8": lambda library: CpuKernels(library, torch.bfloat16 if multiplies_bfloat16() else torch.float16, in_8_bits=True),
}


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Of one mode: `likeliest` are the token ids it finds likeliest at each place of the text, `answers` what it says greedily."""

    perplexity: float
    likeliest: Tensor
    answers: list[list[int]]

    def likeliest_as(self, other: "Measured") -> float:
        """Share of the places where both find the same token likeliest."""
        return float((self.likeliest == other.likeliest).float().mean())

    def answers_as(self, other: "Measured") -> float:
        """Share of the answers' tokens that come before the first difference."""
        alike = sum(common_prefix(*pair) for pair in zip(self.answers, other.answers, strict=True))
        return alike / sum(map(len, other.answers))


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), len(one))


def prose(text: str) -> str:
    """Without tables and code."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(("|", "    ")))


def records() -> str:
    """The decision records, one after the other: new ones come at the end, so that figures stay comparable."""
    return "\n\n".join(prose(path.read_text()) for path in sorted(RECORDS.glob("*.md")))


def surprise(logits: Tensor, targets: Tensor) -> float:
    """The sum of -log probability of `targets` int64 `[n]` under `logits` float32 `[n, vocab]`."""
    return float((logits.logsumexp(1) - logits.gather(1, targets.unsqueeze(1)).squeeze(1)).double().sum())


def read_text(model: CausalLM, kernels: Kernels, pieces: Sequence[Sequence[int]]) -> tuple[float, Tensor]:
    """Perplexity of `pieces`, each read by itself, and the likeliest tokens."""
    total, count, likeliest = 0.0, 0, []
    for piece in pieces:
        pool = KVPool.of_shape(model.config.kv_shape, -(-len(piece) // BLOCK_SIZE), BLOCK_SIZE, kernels.kv_store())
        driver = PagedDriver(model, pool)
        logits = driver.step([(driver.start(list(piece)), len(piece))], every_logit=True)[:-1]
        total += surprise(logits, torch.tensor(piece[1:]))
        count += len(logits)
        likeliest.append(logits.argmax(1))
    return math.exp(total / count), torch.cat(likeliest)


def measure(
    source: ModelSource, kernels: Kernels, pieces: Sequence[Sequence[int]], prompts: list[list[int]], tokens: int
) -> Measured:
    """One mode."""
    model = load_model(source, kernels)
    perplexity, likeliest = read_text(model, kernels, pieces)
    config = Config(max_num_seqs=len(prompts), max_num_batched_tokens=2048)
    system = InProcess(model, source.info, config, BLOCK_SIZE, 700, store=kernels.kv_store())
    return Measured(perplexity, likeliest, system.generate(prompts, [tokens] * len(prompts)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="known name, directory or GGUF file (default: %(default)s)"
    )
    parser.add_argument("--pieces", type=int, default=16, help="of the text (default: %(default)s)")
    parser.add_argument("--piece-tokens", type=int, default=512, help="tokens of each (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (default: %(default)s)")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of torch and of the kernels (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer, source, library = load_tokenizer(locate(args.model)), open_model(args.model), cpu_library(args.threads)
    ids = tokenizer.encode(records(), False)
    pieces = [ids[start : start + args.piece_tokens] for start in range(0, args.pieces * args.piece_tokens, args.piece_tokens)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    prompts = [tokenizer.encode(text, False) for text in TEXTS]
    found: dict[str, Measured] = {}
    for name, make in MODES.items():
        started = time.monotonic()
        found[name] = measure(source, make(library), pieces, prompts, args.tokens)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    rows = {name: row(mode, found[REFERENCE]) for name, mode in found.items()}
    print(
        f"{source.info.name}, {library.isa}: {sum(map(len, pieces))} tokens of text, {len(prompts)} answers of {args.tokens} tokens\n"
    )
    print(f"{'':>10}{'perplexity':>12}{'against f32':>13}{'same likeliest':>16}{'same answer':>13}")
    for name, of in rows.items():
        print(
            f"{name:>10}{of['perplexity']:>12.4f}{of['perplexity_change']:>+12.3%}{of['same_likeliest']:>15.2%}{of['same_answer']:>12.1%}"
        )
    print(json.dumps({"accuracy": rows, "model": source.info.name, "isa": library.isa}))
    return 0 if rows["int8"]["perplexity_change"] <= EIGHT_BITS_MAX else 1


def row(mode: Measured, reference: Measured) -> dict[str, float]:
    """What is told of a mode."""
    return {
        "perplexity": round(mode.perplexity, 4),
        "perplexity_change": round(mode.perplexity / reference.perplexity - 1, 6),
        "same_likeliest": round(mode.likeliest_as(reference), 5),
        "same_answer": round(mode.answers_as(reference), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
