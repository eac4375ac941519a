"""What was there when a process began to serve is not looked at again; what comes later is, as ever."""

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
