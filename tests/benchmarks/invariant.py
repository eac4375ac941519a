"""What the batch-invariant mode costs on this machine: run `python tests/benchmarks/invariant.py`.

Tokens per second of the forward pass alone, with the mode off and on: c prompts of random ids at once, in batches of at most 512 positions, then c
decodes a step, for c = 1, 8, 32. Each mode has a process of its own, since the mode may change how the whole process multiplies; they take turns.
The model is SmolLM2-135M-Instruct where it is installed, else one of its shape with random weights.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kernels.invariant_backend import InvariantKernels, ask_mkl_for_invariance
from model_worker.kernels.torch_backend import TorchKernels
from model_worker.kv_pool import KVPool
from model_worker.models.causal_lm import CausalLM
from model_worker.models.model_config import ModelConfig
from model_worker.models.registry import build_model
from model_worker.weights.open_model import load_model, open_model
from tessera.values.known_models import ModelNotFound

NAME = "SmolLM2-135M-Instruct"
SHAPE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_model_len=8192,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    tie_word_embeddings=True,
)
CONCURRENCY = (1, 8, 32)
STEP_TOKENS_MAX = 512
BLOCK = 16

Figures = dict[str, float]
"""Tokens per second by "c8 decode" and the like."""


def build(invariant: bool) -> CausalLM:
    """The model with the kernels of one mode."""
    if invariant:
        ask_mkl_for_invariance()
    kernels = InvariantKernels() if invariant else TorchKernels()
    try:
        return load_model(open_model(NAME), kernels)
    except ModelNotFound:
        model = build_model(SHAPE, kernels)
        for slot in model.slots().values():
            slot.view.copy_(torch.randn(slot.shape) * 0.05 + (len(slot.shape) == 1))
        return model


class Streams:
    """`count` sequences of `length` positions each, in blocks of their own."""

    def __init__(self, model: CausalLM, count: int, length: int) -> None:
        shape = model.config
        self.blocks = -(-length // BLOCK)
        self.kv = KVPool(shape.num_layers, count * self.blocks, BLOCK, shape.num_kv_heads, shape.head_dim)
        self.model = model
        self.ids = torch.randint(300, 40_000, (count, length), generator=torch.Generator().manual_seed(1))

    def compute(self, rows: Tensor, first: int, stop: int) -> None:
        """Positions `[first, stop)` of the sequences `rows`."""
        positions = torch.arange(first, stop)
        tables = rows.unsqueeze(1) * self.blocks + torch.arange(self.blocks)
        slots = tables[:, positions // BLOCK] * BLOCK + positions % BLOCK
        ends = torch.arange(len(rows) + 1) * (stop - first)
        batch = Batch(
            input_ids=self.ids[rows, first:stop].flatten(),
            positions=positions.repeat(len(rows)),
            slot_mapping=slots.flatten(),
            cu_seqlens_q=ends.to(torch.int32),
            context_lens=torch.full((len(rows),), stop, dtype=torch.int32),
            block_tables=tables.to(torch.int32),
            num_decodes=len(rows) if stop - first == 1 else 0,
            logits_rows=ends[1:] - 1,
        )
        self.model.forward(batch, self.kv)


def one_round(model: CausalLM, count: int, prompt: int, steps: int) -> Figures:
    """Tokens per second of `count` prompts, and of `steps` decode steps after them."""
    streams = Streams(model, count, prompt + steps)

    def prefill() -> None:
        for first in range(0, prompt, STEP_TOKENS_MAX):
            stop = min(prompt, first + STEP_TOKENS_MAX)
            for rows in torch.arange(count).split(STEP_TOKENS_MAX // (stop - first)):
                streams.compute(rows, first, stop)

    def decode() -> None:
        for position in range(prompt, prompt + steps):
            streams.compute(torch.arange(count), position, position + 1)

    return {
        f"c{count} prefill": count * prompt / _seconds(prefill),
        f"c{count} decode": count * steps / _seconds(decode),
    }


def _seconds(work: Callable[[], None]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s


def serve(pipe: Connection, invariant: bool, threads: int) -> None:
    """A mode's process: a round for every (count, prompt, steps) that comes, until None does."""
    torch.set_num_threads(threads)
    model = build(invariant)
    one_round(model, 2, 32, 2)
    pipe.send(None)
    while (wanted := pipe.recv()) is not None:
        pipe.send(one_round(model, *wanted))


def measure(arguments: argparse.Namespace) -> dict[str, list[Figures]]:
    """By mode, the figures of every round."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for mode in ("off", "on"):
        pipes[mode], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, mode == "on", arguments.threads), daemon=True).start()
        pipes[mode].recv()
    rounds: dict[str, list[Figures]] = {mode: [{} for _ in range(arguments.rounds)] for mode in pipes}
    for number in range(arguments.rounds):
        for count in CONCURRENCY:
            for mode, pipe in pipes.items():
                pipe.send((count, arguments.prompt, arguments.steps))
                rounds[mode][number] |= pipe.recv()
    for pipe in pipes.values():
        pipe.send(None)
    return rounds


def main() -> None:
    """Print a table, and the figures as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    rounds = measure(arguments)
    print(
        f"{'':>12} {'off, tokens/s':>26} {'on, tokens/s':>26} {'on / off':>9}   (medians and spreads of {arguments.rounds} rounds)"
    )
    figures = {}
    for name in rounds["off"][0]:
        medians, cells = {}, []
        for mode in ("off", "on"):
            rates = [figures_of_round[name] for figures_of_round in rounds[mode]]
            medians[mode] = round(statistics.median(rates), 1)
            cells.append(f"{medians[mode]:>8.1f} ({min(rates):.1f} to {max(rates):.1f})")
        print(f"{name:>12} {cells[0]:>26} {cells[1]:>26} {medians['on'] / medians['off']:>9.2f}")
        figures[name.replace(" ", "_")] = medians
    print(json.dumps({"benchmark": "invariant", "precision": "f32", "threads": arguments.threads, **figures}))


if __name__ == "__main__":
    main()
