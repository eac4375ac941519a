"""How fast other engines are on this machine, and how much faster the product: run `make bench-peers`; a table, then one JSON line.

vLLM, llama.cpp, OpenVINO GenAI and transformers are installed below one folder (PEERS_HOME; some 5 GB, half an hour of compiling the first
time); one that cannot be is named and left out. All load the weights of the same GGUF file and answer the very prompts of `make bench`. The
others run in the form that is fastest: as an engine within a process, llama.cpp as its server. The product runs whole.

Everyone is started once. Then, workload by workload, they take turns in so many rounds, in another order every round, while the rest does
nothing. What is told are medians over the rounds. A ratio compares the product with the best peer whose weights have at least as many bits.
"""

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.tokenizer_source import load_tokenizer
from tessera.values.known_models import locate
from tessera.values.model import ModelInfo
from tests.benchmarks.load.stage import machine
from tests.benchmarks.peers.contender import Contender, Run
from tests.benchmarks.peers.field import Entry
from tests.benchmarks.peers.field import field as field_of
from tests.benchmarks.peers.install import Home, InstallFailed
from tests.benchmarks.peers.ratios import Rate, ratios
from tests.benchmarks.workloads import Workload, chosen

MODEL = "SmolLM2-135M-Instruct"
HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera-peers"
WARM_UP = Workload("warm_up", 8, 128, 8)
NO_SEED = 1 << 20
"""Of the warm-up, whose prompts are nobody else's."""


def say(text: str) -> None:
    """To whoever waits: standard output is for the results."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Contest:
    """Those who are compared, by name, and what they reached; `failed` says why somebody is left out."""

    entries: dict[str, Entry] = field(default_factory=dict)
    contenders: dict[str, Contender] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rates: dict[str, dict[str, Rate]] = field(default_factory=dict)

    def enter(self, entry: Entry, stack: ExitStack) -> None:
        """Install, start and warm one up; `stack` ends it."""
        say(f"{entry.name} ...")
        began_s = time.monotonic()
        try:
            contender = stack.enter_context(entry.prepare()())
            contender.run(WARM_UP, NO_SEED)
        except (InstallFailed, OSError, RuntimeError) as error:
            self._leave_out(entry.name, error)
            return
        self.entries[entry.name], self.contenders[entry.name] = entry, contender
        say(f"  ready after {time.monotonic() - began_s:.0f} s")

    def measure(self, workload: Workload, rounds: int) -> None:
        """All of them in turn, `rounds` times; prints a row for each."""
        runs: dict[str, list[Run]] = {name: [] for name in self.contenders}
        for number in range(rounds):
            first = number * len(runs) // rounds
            for name in [*runs][first:] + [*runs][:first]:
                if name in self.contenders:
                    try:
                        runs[name].append(self.contenders[name].run(workload, number))
                    except (OSError, RuntimeError) as error:
                        self._leave_out(name, error)
        of_all = {name: self._rate(name, workload, runs[name]) for name in self.contenders}
        self.rates[workload.name] = of_all
        for name, rate in sorted(of_all.items(), key=lambda item: -item[1].median):
            print(_row(workload, rate, runs[name]), flush=True)

    def ratios(self) -> dict[str, dict[str, Any]]:
        """By workload, see `ratios.ratios`."""
        told = {}
        for workload, rates in self.rates.items():
            ours = {self.entries[name].precision: rate for name, rate in rates.items() if self.entries[name].precision}
            told[workload] = ratios(ours, [rate for name, rate in rates.items() if not self.entries[name].precision])
        return told

    def told(self) -> dict[str, dict[str, dict[str, float]]]:
        """Output tokens per second for JSON, by contender and workload."""
        told: dict[str, dict[str, dict[str, float]]] = {}
        for workload, rates in self.rates.items():
            for name, rate in rates.items():
                figures = {"median": rate.median, "lowest": min(rate.rounds), "highest": max(rate.rounds)}
                told.setdefault(name, {})[workload] = {key: round(figure, 1) for key, figure in figures.items()}
        return told

    def _rate(self, name: str, workload: Workload, runs: list[Run]) -> Rate:
        return Rate(name, self.entries[name].bits, tuple(workload.tokens_out / run.seconds for run in runs))

    def _leave_out(self, name: str, error: Exception) -> None:
        self.contenders.pop(name, None)
        self.failed[name] = str(error)
        say(f"  left out: {error}")


def _row(workload: Workload, rate: Rate, runs: list[Run]) -> str:
    spread = f"{rate.median:.1f} ({min(rate.rounds):.1f} to {max(rate.rounds):.1f})"
    ttft_ms, tpot_ms = (statistics.median(getattr(run, name) for run in runs) for name in ("ttft_ms", "tpot_ms"))
    return f"{workload.name:<8}{workload.words:<36}{rate.name:<24}{spread:>26}{ttft_ms:>10.0f}{tpot_ms:>10.1f}"


def main() -> int:
    """Print a table, and the ratios as one JSON line. The exit status is 1 where there is nothing to compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(os.environ.get("PEERS_HOME") or HOME)
    parser.add_argument(
        "--home", type=Path, default=home, help="where they are installed; default: PEERS_HOME, else %(default)s"
    )
    parser.add_argument(
        "--only", default="", help="names of those who run, or how they begin, separated by commas: vLLM,tessera f16"
    )
    parser.add_argument("--workloads", default="", help="some of w1c1,w1c8,w1c32,w2,w3,w3warm; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--install-only", action="store_true", help="measure nothing")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs as torch beside vLLM; default: %(default)s")
    arguments = parser.parse_args()
    workloads, wanted = chosen(arguments.workloads), tuple(arguments.only.split(","))
    at, tokenizer = Home(arguments.home.absolute(), locate(MODEL), arguments.torch, say), load_tokenizer(locate(MODEL))
    special = tokenizer.special
    model = ModelInfo(MODEL, "", tokenizer.vocab_size, 0, special.eos_ids, special.bos_id, tokenizer.digest, "")
    entries = [entry for entry in field_of(at, MODEL, model) if entry.name.startswith(wanted)]
    contest = Contest()
    with ExitStack() as stack:
        for entry in entries:
            if arguments.install_only:
                _install(entry, contest)
            else:
                contest.enter(entry, stack)
        if not arguments.install_only:
            heads = f"{'':<8}{'requests':<36}{'':<24}{'output tokens/s':>26}{'TTFT ms':>10}{'TPOT ms':>10}"
            print(
                f"{heads}   (medians of {arguments.rounds} rounds, the rate with its spread; load before: {os.getloadavg()[0]:.1f})"
            )
        for workload in () if arguments.install_only else workloads:
            contest.measure(workload, arguments.rounds)
    compared = contest.ratios()
    print(
        json.dumps(
            {"benchmark": "peers", "ratios": compared, "tokens_per_s": contest.told(), "failed": contest.failed, **machine()}
        )
    )
    return 0 if arguments.install_only or any(compared.values()) else 1


def _install(entry: Entry, contest: Contest) -> None:
    say(f"{entry.name} ...")
    try:
        entry.prepare()
    except InstallFailed as error:
        contest.failed[entry.name] = str(error)
        say(f"  left out: {error}")


if __name__ == "__main__":
    raise SystemExit(main())
