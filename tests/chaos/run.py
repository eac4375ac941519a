"""`make chaos`: real processes, real kills. Tells how each scenario went on stderr, prints one JSON line on stdout."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

from tests.chaos.campaign import Campaign
from tests.chaos.outcome import TITLE, Outcome, summary
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.setups import SETUPS, Setup, deterministic

QUICK_STREAMS = 48
QUICK_TOKENS = 70
COMPLAINT_CHARS_MAX = 2000
"""The end of a log is what says most; the rest is in the folder that the run names."""


def main() -> int:
    """Exit status 0 where nothing was lost, repeated, wrong or left, and no pause was over its budget."""
    options = _parser().parse_args()
    if options.list:
        for scenario in SCENARIOS.values():
            print(f"{scenario.name:<30}{scenario.about}")
        return 0
    plan = quick_plan() if options.quick else full_plan(options.setup, options.scenario, options.streams)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:7.1f}] {text}", file=sys.stderr, flush=True)

    outcomes = play(plan, say, options.seed, options.kills)
    print(f"\n{TITLE}", file=sys.stderr)
    for outcome in outcomes:
        print(outcome.line(), file=sys.stderr)
    found = summary(outcomes)
    print(json.dumps({**found, "seed": options.seed, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if found["failed"] or (found["over_budget"] and not options.any_pause) else 0


Plan = Sequence[tuple[Setup, Sequence[Scenario]]]


def quick_plan() -> Plan:
    """One kill of each role, under the deterministic model."""
    return [(deterministic(QUICK_STREAMS, QUICK_TOKENS), [scenario for scenario in SCENARIOS.values() if scenario.in_quick])]


def full_plan(setups: Sequence[str] = (), scenarios: Sequence[str] = (), streams: int | None = None) -> Plan:
    """The named scenarios on the named setups. No names mean all setups, each with the scenarios that it is there for."""
    makers = [SETUPS[name] for name in setups or SETUPS]
    chosen = [make(streams) if streams else make() for make in makers]
    return [(setup, [SCENARIOS[name] for name in scenarios or setup.scenarios or SCENARIOS]) for setup in chosen]


def play(plan: Plan, say: Callable[[str], None], seed: int = 1, kills: int = 100) -> list[Outcome]:
    """All of a plan, one setup after the other."""
    outcomes = []
    for setup, scenarios in plan:
        with Campaign(setup, say, seed, kills) as campaign:
            for scenario in scenarios:
                outcome = campaign.play(scenario)
                outcomes.append(outcome)
                say(outcome.line())
                for complaint in outcome.complaints:
                    say(f"  {complaint[-COMPLAINT_CHARS_MAX:]}")
    return outcomes


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []], metavar="SCENARIO", help="names; all by default")
    parser.add_argument(
        "--setup", action="append", choices=SETUPS, default=[], help="may be given several times; all by default"
    )
    parser.add_argument("--seed", type=int, default=1, help="of everything random [1]")
    parser.add_argument("--kills", type=int, default=100, metavar="COUNT", help="of the scenario random-kills [100]")
    parser.add_argument("--streams", type=int, metavar="COUNT", help="at a time; the setup's own number by default")
    parser.add_argument("--any-pause", action="store_true", help="do not fail because of a pause over its budget")
    parser.add_argument("--quick", action="store_true", help="one kill of each role, in under a minute")
    parser.add_argument("--list", action="store_true", help="list the scenarios and end")
    return parser


if __name__ == "__main__":
    sys.exit(main())
