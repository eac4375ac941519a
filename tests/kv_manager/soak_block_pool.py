"""A million random moves of block pools (`make soak-blocks`), each checked; says the seed of every life before it begins, on stderr.

`--first-seed` and `--lives 1` repeat one that failed.
"""

import argparse
import random
import sys
import time

import pytest
from block_pool import Pool, random_moves
from test_block_manager_model import weak_chain

from kv_manager import prefix_cache

MOVES_PER_LIFE = 10_000


def run_life(seed: int) -> str:
    """Drive one pool, drawn from its seed, to its end. Returns what it was."""
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 3, 4, 16))
    drawn = {
        "num_blocks": rng.randint(2, 40),
        "block_size": block_size,
        "num_host_blocks": rng.choice((0, 3, 12)),
        "secure_zero": rng.random() < 0.3,
        "enable_prefix_caching": rng.random() < 0.9,
        "digests_collide": rng.random() < 0.1,
        "prefix_index": rng.choice(("hash", "hash", "radix")),
    }
    with pytest.MonkeyPatch.context() as patch:
        if drawn["digests_collide"]:
            patch.setattr(prefix_cache, "chain_digests", weak_chain)
        pool = Pool(**drawn)
        random_moves(rng, pool, MOVES_PER_LIFE, restarts=not pool.digests_collide)
        pool.end()
    return f"{drawn}: {pool.step} steps, {pool.counts}"


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lives", type=int, default=100, help=f"of {MOVES_PER_LIFE} moves each")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    began = time.monotonic()
    for number in range(options.lives):
        seed = options.first_seed + number
        print(f"soak: seed {seed}, {number * MOVES_PER_LIFE} moves in {time.monotonic() - began:.0f} s", file=sys.stderr)
        said = run_life(seed)
        print(f"soak: seed {seed} passed, {said}", file=sys.stderr)
    print(f"soak: {options.lives * MOVES_PER_LIFE} moves passed in {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
