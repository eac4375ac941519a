"""What sampling costs per step: run `python tests/benchmarks/sampling.py`, or `make bench-sampling`.

256 rows of 128,000 logits, by what the rows ask for. The logits are normal with a standard deviation of 2; `peaked` ones have eight likely
tokens on top, as a language model mostly has, `flat` ones none, so that top_p keeps a tenth of the vocabulary. Prompts are 1,000 tokens long,
outputs 500. Printed in milliseconds per step, with the median and the least; then one JSON line with the medians.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from model_worker.sample_rows import SampleRows
from model_worker.sampler import Sampler
from model_worker.sampling_table import SamplingTable
from tessera.values.sampling import SamplingParams

PROMPT, OUTPUT = 1000, 500
GREEDY = {"temperature": 0.0}
FILTERS = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}


def rules(row: int, vocab_size: int) -> dict[str, object]:
    """Every rule that changes logits, but for allowed_token_ids, which would leave few."""
    ids = [(row * 997 + i * 131) % vocab_size for i in range(120)]
    return {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": tuple((token, 1.5) for token in dict.fromkeys(ids[:100])),
        "bad_words_ids": tuple(tuple(ids[i : i + 3]) for i in range(100, 117)),
        "min_tokens": OUTPUT + 1,
        "stop_token_ids": (7, 8),
    }


def mixes(vocab_size: int) -> dict[str, Callable[[int], SamplingParams]]:
    """By name, the parameters of each row."""

    def mixed(row: int) -> SamplingParams:
        kinds = (
            GREEDY,
            {},
            {"top_p": 0.9},
            FILTERS,
            {**FILTERS, **rules(row, vocab_size)},
            {"logprobs": 5, **GREEDY},
            {"min_p": 0.05},
            {"top_k": 40},
        )
        return SamplingParams(seed=row, **kinds[row % len(kinds)])

    return {
        "all greedy": lambda row: SamplingParams(seed=row, **GREEDY),
        "all sampled": lambda row: SamplingParams(seed=row),
        "top_k 50": lambda row: SamplingParams(seed=row, top_k=50),
        "top_p 0.9": lambda row: SamplingParams(seed=row, top_p=0.9),
        "min_p 0.05": lambda row: SamplingParams(seed=row, min_p=0.05),
        "all filters": lambda row: SamplingParams(seed=row, **FILTERS),
        "greedy, all rules": lambda row: SamplingParams(seed=row, **GREEDY, **rules(row, vocab_size)),
        "greedy, allowed ids": lambda row: SamplingParams(seed=row, **GREEDY, allowed_token_ids=tuple(range(row, row + 100))),
        "greedy, 5 logprobs": lambda row: SamplingParams(seed=row, **GREEDY, logprobs=5),
        "everything on": lambda row: SamplingParams(seed=row, logprobs=5, **FILTERS, **rules(row, vocab_size)),
        "mixed, eight kinds": mixed,
    }


def rows_of(params: Callable[[int], SamplingParams], num_rows: int, vocab_size: int) -> SampleRows:
    """Rows with random histories."""
    table = SamplingTable(num_rows, vocab_size)
    for row in range(num_rows):
        table.set(row, params(row))
    # Mostly the same few ids, as in text.
    ids = np.random.default_rng(1).zipf(1.3, (num_rows, PROMPT + OUTPUT)) % vocab_size
    lens = np.full(num_rows, PROMPT)
    return SampleRows(table, ids.astype(np.int32), np.arange(num_rows), lens, lens + OUTPUT, np.ones(num_rows, np.bool_))


def logits_of(kind: str, num_rows: int, vocab_size: int) -> np.ndarray:
    """float32 `[num_rows, vocab_size]`."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((num_rows, vocab_size), np.float32) * np.float32(2)
    if kind == "peaked":
        likely = random.integers(0, vocab_size, (num_rows, 8))
        np.put_along_axis(logits, likely, np.linspace(12, 20, 8, dtype=np.float32)[None], axis=1)
    return logits


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=7, help="measured, after one that is not")
    options = parser.parse_args()
    sampler = Sampler((0, 2), options.threads)
    result: dict[str, object] = {
        "rows": options.rows,
        "vocabulary": options.vocabulary,
        "threads": options.threads,
        "load": os.getloadavg()[0],
    }
    print(f"{options.rows} rows x {options.vocabulary} ids, {options.threads} threads, ms per step: median (least)")
    for kind in ("peaked", "flat"):
        logits = logits_of(kind, options.rows, options.vocabulary)
        for name, params in mixes(options.vocabulary).items():
            rows = rows_of(params, options.rows, options.vocabulary)
            times = []
            for _ in range(options.steps + 1):
                started = time.perf_counter()
                sampled = sampler.sample(logits, rows)
                times.append((time.perf_counter() - started) * 1e3)
                assert not sampled.failures
            print(f"  {kind:8}{name:24}{statistics.median(times[1:]):8.1f} ({min(times[1:]):.1f})")
            result[f"{kind}, {name}"] = round(statistics.median(times[1:]), 2)
    print(json.dumps({"ms_per_step": result}))


if __name__ == "__main__":
    main()
