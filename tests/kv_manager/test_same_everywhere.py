"""One history gives one state, whatever the process that lives it."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

LIFE = """
import random
from block_pool import Pool, random_moves
pool = Pool(12, 2, num_host_blocks=4, secure_zero=True)
random_moves(random.Random(5), pool, 800)
manager = pool.manager
print(list(manager._free), manager.published(), manager.stats, manager.take_changes(), pool.counts)
"""


def test_other_hash_seeds_give_the_same_blocks_entries_and_evictions() -> None:
    printed = {
        subprocess.run(
            [sys.executable, "-c", LIFE],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1 and "PublishedBlock" in next(iter(printed))
