"""What was there when a process began to serve is not looked at again, and what was freed is no longer its memory; what comes later is as ever."""

import subprocess
import sys

PROGRAM = """
import gc
import weakref
from services.settled_heap import settle_heap

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

kept = [[] for _ in range(10_000)]
before = cycle()
settle_heap()
assert before() is None, "garbage is not kept for ever"
assert gc.get_freeze_count() > len(kept)
assert len(gc.get_objects()) < 1000, "there is little to look at"
after = cycle()
gc.collect()
assert after() is None, "what comes later is collected"
"""


def test_what_is_there_is_out_of_the_collectors_sight():
    """In a process of its own: it is for good."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


FREED = """
import resource
from services.settled_heap import settle_heap

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20

before = resident_mib()
blocks = [bytearray(b"x" * 100_000) for _ in range(1000)]
last = blocks[-1]
del blocks
settle_heap()
assert resident_mib() < before + 30, f"{before} MiB before, {resident_mib()} now"
"""


def test_what_was_freed_below_a_block_in_use_goes_back():
    subprocess.run([sys.executable, "-c", FREED], check=True, timeout=60)
