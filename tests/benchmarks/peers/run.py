"""How fast other engines are on this machine, and how much faster the product: run `make bench-peers`; tables, then one JSON line.

vLLM, llama.cpp, OpenVINO GenAI and transformers are installed below one folder (PEERS_HOME; some 5 GB, half an hour of compiling the first
time); one that cannot be is named and left out. All load the weights of the same GGUF file and answer the very prompts of `make bench`. The
others run in the form that is fastest: as an engine within a process, llama.cpp as its server. The product runs whole.

Everyone is started once. Then, workload by workload, they take turns in so many rounds, in another order every round, while the processes of
the rest are stopped. A peer with less than half of the best rate of its class in the first round has no second one. What is told are medians over the
rounds. A ratio compares the product with the best peer whose weights have at least as many bits. Last, in `open`, requests come by themselves,
at 70 % of what a contender can serve, and the time to the first token counts.
"""

import argparse
import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gateway.tokenizer_source import load_tokenizer
from tessera.values.known_models import locate
from tessera.values.model import ModelInfo
from tests.benchmarks.load.stage import machine
from tests.benchmarks.peers.contest import HEADS, Contest, say
from tests.benchmarks.peers.field import Entry, field
from tests.benchmarks.peers.install import Home, InstallFailed
from tests.benchmarks.peers.open_loop import NAME as OPEN
from tests.benchmarks.peers.open_loop import OpenLoop
from tests.benchmarks.workloads import WORKLOADS, Workload, chosen

MODEL = "SmolLM2-135M-Instruct"
HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera-peers"
NAMES = [*(workload.name for workload in WORKLOADS), OPEN]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = Path(os.environ.get("PEERS_HOME") or HOME)
    parser.add_argument(
        "--home", type=Path, default=home, help="where they are installed; default: PEERS_HOME, else %(default)s"
    )
    parser.add_argument(
        "--only", default="", help="names of those who run, or how they begin, separated by commas: vLLM,tessera f16"
    )
    parser.add_argument("--workloads", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--open-requests", type=int, default=64, help=f"in each run of {OPEN}; default: %(default)s")
    parser.add_argument("--install-only", action="store_true", help="measure nothing")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs as torch beside vLLM; default: %(default)s")
    return parser.parse_args()


def main() -> int:
    """Print tables, and the ratios as one JSON line. The exit status is 1 where there is nothing to compare."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # those that are stopped are ended too
    names = arguments.workloads.split(",")
    workloads = chosen(",".join(name for name in names if name != OPEN)) if names != [OPEN] else ()
    at, tokenizer = Home(arguments.home.absolute(), locate(MODEL), arguments.torch, say), load_tokenizer(locate(MODEL))
    special = tokenizer.special
    model = ModelInfo(MODEL, "", tokenizer.vocab_size, 0, special.eos_ids, special.bos_id, tokenizer.digest, "")
    entries = [entry for entry in field(at, MODEL, model) if entry.name.startswith(tuple(arguments.only.split(",")))]
    contest, told = Contest(), {}
    if arguments.install_only:
        for entry in entries:
            _install(entry, contest)
    else:
        with ExitStack() as stack:
            for entry in entries:
                contest.enter(entry, stack)
            told = _measured(contest, workloads, arguments, is_open=OPEN in names)
    compared = contest.ratios()
    print(json.dumps({"benchmark": "peers", "ratios": compared, **told, "failed": contest.failed, **machine()}))
    return 0 if arguments.install_only or any(compared.values()) else 1


def _measured(
    contest: Contest, workloads: tuple[Workload, ...], arguments: argparse.Namespace, is_open: bool
) -> dict[str, Any]:
    """All workloads; prints them. For JSON."""
    load = os.getloadavg()[0]
    print(f"{HEADS}   (medians of {arguments.rounds} rounds, the rate with its spread; load before: {load:.1f})")
    for workload in workloads:
        contest.measure(workload, arguments.rounds)
    told: dict[str, Any] = {}
    if is_open:
        told["open_loop"] = OpenLoop(contest, arguments.open_requests).measure()
    return told | {"tokens_per_s": contest.told()}


def _install(entry: Entry, contest: Contest) -> None:
    say(f"{entry.name} ...")
    try:
        entry.prepare()
    except InstallFailed as error:
        contest.leave_out(entry.name, error)


if __name__ == "__main__":
    raise SystemExit(main())
