"""What speculation brings on this machine: run `make bench-speculation`.

The real scheduler and engine in one process decode the same prompts, plain and with speculation, in turns; prompts are cached before, so what is
timed is decoding. Greedy, up to 64 tokens an answer or its end. The tokens of both must be the same but where two logits lie so close that
rounding decides (a step of several positions adds up in another order); how many answers are is printed too.

Prompt lookup, and the model as its own draft model (all drafts right, none cheaper: what is left is the price of drafting), with a whole
model; heads with tiny random models, on whose output they have been trained for some seconds: their shares say that they have learned, the
times what a layer more costs beside two.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gateway.conversation import ChatMessage, Conversation
from gateway.tokenizer_source import load_tokenizer
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.weights.open_model import load_model, open_model
from services.worker.config import SpeculationConfig
from services.worker.drafter import LoadedModel, load_drafter
from tessera.values.config import Config
from tessera.values.known_models import locate
from tests.parity.in_process import InProcess
from tests.parity.trained_heads import TRAINED, random_prompts

MODEL = "SmolLM2-135M-Instruct"
OUTPUT_MAX = 64
BLOCK_SIZE, NUM_BLOCKS = 16, 300

SUMMARISE = (
    "Summarise in two sentences, in the words of the text: The committee met on Tuesday to discuss the budget for the coming year. After a "
    "long debate about the cost of repairing the old bridge, which has been closed since March, the members agreed to postpone the "
    "decision until an independent engineer has examined the foundations. In the meantime the ferry will run twice an hour, and the "
    "town will pay half of each fare for residents who can show proof of address.",
    "Give the main points of this text: A hive is best placed where the morning sun reaches it early, with its back to the wind and its "
    "entrance towards the south or the east. The grass before it should be kept short, so that those who return heavily laden do not "
    "fall into it and are lost. Water must be near; where there is none, a shallow dish with a few flat stones will do, provided that "
    "it is filled every day. In spring the keeper looks for three things: whether the queen is laying, whether there are stores enough "
    "to last until the fruit trees flower, and whether the comb is dry and free of moths.",
)
EDIT_CODE = (
    "Rename the variable `total` to `result` and write the whole function again:\n```python\ndef average(values, weights):\n"
    "    total = 0.0\n    weight_sum = 0.0\n    for value, weight in zip(values, weights):\n        total += value * weight\n"
    "        weight_sum += weight\n    if weight_sum == 0:\n        raise ValueError('no weight')\n    return total / weight_sum\n```",
    "Add a docstring to this Python function and write the whole function again:\n```python\ndef merge_sorted(left, right):\n    merged = []\n"
    "    i = j = 0\n    while i < len(left) and j < len(right):\n        if left[i] <= right[j]:\n            merged.append(left[i])\n"
    "            i += 1\n        else:\n            merged.append(right[j])\n            j += 1\n    merged.extend(left[i:])\n"
    "    merged.extend(right[j:])\n    return merged\n```",
)
PROMPTS = {"summarise": SUMMARISE, "edit code": EDIT_CODE}


@dataclass
class Case:
    """One kind of prompts, so many at once, without and with drafts, with figures of each round."""

    kind: str
    at_once: int
    prompts: list[list[int]]
    drafter: str
    systems: dict[bool, InProcess]  # whether it speculates
    rates: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})  # tokens per second
    outputs: dict[bool, list[list[int]]] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    tokens_per_step: float = 0.0

    def run(self, speculates: bool) -> None:
        """One round with one of both systems."""
        system = self.systems[speculates]
        before = deepcopy(system.spec_stats)
        began_s, outputs = time.perf_counter(), []
        for first in range(0, len(self.prompts), self.at_once):
            group = self.prompts[first : first + self.at_once]
            outputs += system.generate(group, [OUTPUT_MAX] * len(group), ignore_eos=False)
        seconds = time.perf_counter() - began_s
        self.rates[speculates].append(sum(map(len, outputs)) / seconds)
        self.outputs[speculates] = outputs
        if speculates:
            stats = system.spec_stats.since(before)
            self.drafted, self.accepted, self.tokens_per_step = stats.num_drafts, stats.num_accepted, stats.tokens_per_step

    @property
    def speed_ups(self) -> list[float]:
        """Of each round."""
        return [fast / slow for fast, slow in zip(self.rates[True], self.rates[False], strict=True)]

    @property
    def num_equal(self) -> int:
        """Answers that are the same."""
        return sum(mine == theirs for mine, theirs in zip(self.outputs[False], self.outputs[True], strict=True))


def system(loaded: LoadedModel, speculation: SpeculationConfig) -> InProcess:
    """A scheduler and an engine with a pool of its own."""
    drafts = speculation.num_speculative_tokens
    config = Config(max_num_seqs=16, max_num_batched_tokens=512, num_speculative_tokens=drafts)
    drafter = load_drafter(speculation, config.max_num_seqs, loaded)
    return InProcess(loaded.model, loaded.info, config, BLOCK_SIZE, NUM_BLOCKS, drafter)


def whole_model_cases(args: argparse.Namespace) -> list[Case]:
    """Prompt lookup and the model's own drafts, on prompts whose answers repeat them."""
    tokenizer, source, kernels = load_tokenizer(locate(MODEL)), open_model(MODEL), TorchKernels()
    loaded, template = LoadedModel(load_model(source, kernels), source.info, source, kernels, kernels), tokenizer.chat_template
    assert template is not None
    speculations = {
        "ngram": SpeculationConfig(args.drafts, ngram_min=args.ngram_min, ngram_max=args.ngram_max),
        "itself": SpeculationConfig(args.drafts, "draft_model", MODEL),
    }
    plain, cases = system(loaded, SpeculationConfig()), []
    for name in sorted(speculations.keys() & set(args.drafters), reverse=True):
        systems = {False: plain, True: system(loaded, speculations[name])}
        for kind, texts in PROMPTS.items():
            rendered = (template.render(Conversation((ChatMessage("user", text),)), 1 << 20) for text in texts)
            prompts = [tokenizer.encode(text, False) for text in rendered]
            cases += [Case(kind, count, prompts, name, systems) for count in (1, len(prompts))]
    return cases


def trained_cases(args: argparse.Namespace, directory: Path) -> list[Case]:
    """Tiny models with heads, which are trained here."""
    cases = []
    for name, make in TRAINED.items():
        if name in args.drafters:
            head = make(directory / name)
            loaded = head.load()
            systems = {speculates: system(loaded, head.speculation(args.drafts * speculates)) for speculates in (False, True)}
            cases += [Case("tiny", count, random_prompts(16), name, systems) for count in (1, 8)]
    return cases


def main() -> None:
    """Print a table, and the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = SpeculationConfig()
    drafters = ("ngram", "itself", *TRAINED)
    parser.add_argument("--drafters", nargs="+", choices=drafters, default=drafters, help="(default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--drafts", type=int, default=4, help="most drafts of a step (default: %(default)s)")
    parser.add_argument("--ngram-min", type=int, default=defaults.ngram_min, help="(default: %(default)s)")
    parser.add_argument("--ngram-max", type=int, default=defaults.ngram_max, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as directory:
        cases = [*whole_model_cases(args), *trained_cases(args, Path(directory))]
    for case in cases:
        for each in case.systems.values():
            each.generate(case.prompts, [1] * len(case.prompts))
    for number in range(args.rounds):
        for case in cases:
            for speculates in (False, True) if number % 2 == 0 else (True, False):
                case.run(speculates)
        print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    report(cases, args)


def report(cases: list[Case], args: argparse.Namespace) -> None:
    """The table and the JSON line."""
    print(f"tokens/s of decoding, {args.drafts} drafts, median (spread) of {args.rounds} rounds")
    print(
        f"{'drafts by':>9} {'prompts':>10} {'at once':>8} {'plain':>20} {'with drafts':>20} {'speed-up':>20} {'accepted':>14} "
        f"{'tokens/row':>11} {'equal':>6}"
    )
    figures = {}
    for case in cases:
        plain, drafted = case.rates[False], case.rates[True]
        accepted = f"{case.accepted}/{case.drafted}"
        print(
            f"{case.drafter:>9} {case.kind:>10} {case.at_once:>8} {_spread(plain):>20} {_spread(drafted):>20} "
            f"{_spread(case.speed_ups, 2):>20} {accepted:>14} {case.tokens_per_step:>11.2f} {case.num_equal}/{len(case.prompts)}"
        )
        figures[f"{case.drafter}, {case.kind}, {case.at_once} at once"] = {
            "plain_tokens_per_s": round(statistics.median(plain), 1),
            "drafted_tokens_per_s": round(statistics.median(drafted), 1),
            "speed_up": round(statistics.median(case.speed_ups), 2),
            "drafted": case.drafted,
            "accepted": case.accepted,
            "answers_equal": case.num_equal,
        }
    line = {
        "benchmark": "speculation",
        "drafts": args.drafts,
        "ngram": [args.ngram_min, args.ngram_max],
        "threads": args.threads,
    }
    print(json.dumps(line | figures))


def _spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
