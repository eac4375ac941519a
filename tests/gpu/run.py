"""Everything there is to try on a GPU, in one go and some minutes: `make check-gpu`.

- models of every architecture on each backend, against the torch backend in float32 on the CPU;
- decode batches replayed from graphs, against the same without;
- tokens per second of decodes, for random weights in the shapes of Llama 1B and 8B, against what the memory's bandwidth allows.

On an NVIDIA GPU the backends are torch and, where AITER is installed, its Triton kernels; on an AMD GPU also its compiled ones. Without a GPU the
same code runs at tiny sizes on the CPU, and says so. Prints tables, then one JSON line; both are kept in `--report FILE`, on a GPU in
docs/gpu-report.md. Exits 1 where something that was tried is not equal.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from tests.gpu.backends import Backend, Machine, this_machine
from tests.gpu.decode_speed import Speed, bandwidth, speeds
from tests.gpu.equalities import Equality, graph_equalities, model_equalities
from tests.gpu.llamas import SHAPES, TINY

T = TypeVar("T")

REPORT = Path(__file__).parents[2] / "docs" / "gpu-report.md"

BATCHES, CONTEXT = (1, 32, 256), 512
TINY_BATCHES, TINY_CONTEXT = (1, 4), 64


class Tried:
    """What was found, and what broke on the way: one backend's failure leaves the others to be tried."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.equalities: list[Equality] = []
        self.speeds: list[Speed] = []
        self.broken: list[str] = []
        self.rate = 0.0  # bytes per second
        self.started = time.monotonic()

    def run(self) -> None:
        """All of it."""
        machine = self.machine
        self.rate = bandwidth(machine)
        for backend in machine.backends:
            self.equalities += self._tried(backend, "models", lambda backend=backend: model_equalities(backend))
            for name, shape in self._shapes().items():
                what = f"graphs, {name}"
                self.equalities += self._tried(
                    backend,
                    what,
                    lambda backend=backend, shape=shape, what=what: [graph_equalities(machine, backend, shape, what)],
                )
        rows, context = (BATCHES, CONTEXT) if machine.is_gpu else (TINY_BATCHES, TINY_CONTEXT)
        for name, shape in self._shapes().items():
            for backend in machine.backends:
                self.speeds += self._tried(
                    backend,
                    f"speed, {name}",
                    lambda backend=backend, name=name, shape=shape: speeds(
                        machine, backend, name, shape, rows, context, self.rate
                    ),
                )

    def _shapes(self) -> dict[str, object]:
        return SHAPES if self.machine.is_gpu else {"tiny": TINY}

    def _tried(self, backend: Backend, what: str, run: Callable[[], list[T]]) -> list[T]:
        print(f"{time.monotonic() - self.started:5.0f} s  {backend.name}: {what}", file=sys.stderr, flush=True)
        try:
            return run()
        except Exception as error:  # noqa: BLE001 - said in the report, and the exit status
            traceback.print_exc()
            self.broken.append(f"{backend.name}, {what}: {type(error).__name__}: {error}")
            return []
        finally:
            if self.machine.is_gpu:
                torch.cuda.empty_cache()

    @property
    def is_good(self) -> bool:
        """Nothing that was tried is wrong."""
        return not self.broken and not any(each.fails for each in self.equalities)


def report(tried: Tried) -> str:
    """As markdown."""
    machine = tried.machine
    lines = [
        f"# Report of `make check-gpu`: {machine.name}",
        "",
        f"torch {torch.__version__}; {time.monotonic() - tried.started:.0f} s; memory read at {tried.rate / 1e9:.0f} GB/s.",
        *(f"\n**{each}.**" for each in machine.missing),
        *(f"\n**Broken: {each}.**" for each in tried.broken),
        "",
        "Largest difference of a logit, in standard deviations of the logits: models against the torch backend in float32 on the CPU, graphs",
        "against the same decodes without." + ("" if machine.is_gpu else " Here a graph is a second run of what was recorded."),
        "",
        "| backend | what | difference | bound | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in tried.equalities:
        error = "not served" if each.error is None else f"{each.error:.4f}"
        verdict = each.reason or ("equal" if each.holds else "**DIFFERENT**")
        lines.append(f"| {each.backend} | {each.what} | {error} | {each.bound:g} | {verdict} |")
    if not machine.is_gpu:
        return "\n".join([*lines, "", "Speeds on a CPU say nothing about a GPU and are left out."])
    lines += [
        "",
        f"Decodes with contexts of {CONTEXT} tokens, random weights in bfloat16, the forward pass alone. The floor: every weight and the KV of every",
        "context read once, at the bandwidth above.",
        "",
        "| backend | shape | batch | eager ms | graph ms | floor ms | tokens/s | of the floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for speed in tried.speeds:
        graph = "-" if speed.graph_ms is None else f"{speed.graph_ms:.2f}"
        lines.append(
            f"| {speed.backend} | {speed.shape} | {speed.rows} | {speed.eager_ms:.2f} | {graph} | {speed.floor_ms:.2f} "
            f"| {speed.tokens_per_s:.0f} | {speed.of_floor:.0%} |"
        )
    return "\n".join(lines)


def json_line(tried: Tried) -> str:
    """The same for machines."""
    return json.dumps(
        {
            "check": "gpu",
            "device": tried.machine.name,
            "is_gpu": tried.machine.is_gpu,
            "good": tried.is_good,
            "missing": tried.machine.missing,
            "broken": tried.broken,
            "bandwidth_gb_s": round(tried.rate / 1e9, 1),
            "equalities": [asdict(each) for each in tried.equalities],
            "speeds": [asdict(each) | {"tokens_per_s": round(each.tokens_per_s, 1)} for each in tried.speeds],
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="keep the tables and the JSON line in this file")
    options = parser.parse_args(arguments)
    tried = Tried(this_machine())
    tried.run()
    text, line = report(tried), json_line(tried)
    path = options.report or (REPORT if tried.machine.is_gpu else None)
    if path is not None:
        path.write_text(f"{text}\n\n```json\n{line}\n```\n")
    print(text)
    print(line)
    return 0 if tried.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
