"""Takes what a process holds once it serves out of the garbage collector's sight."""

import gc


def settle_heap() -> None:
    """Call it once, when everything is loaded: modules, tokenizer, model. All that stays to the end, and full collections, which come every few
    seconds under load, would look at every part of it again: some 50,000 objects of a gateway, for 10 ms of a core that has nothing else
    to do, in which no stream goes on. What was garbage before is collected first; what becomes garbage of the rest later stays."""
    gc.collect()
    gc.freeze()
