"""When requests arrive in an open loop, whether or not earlier ones are answered."""

import math
from collections.abc import Iterator
from itertools import repeat

from services.bench.draws import Purpose, generator

DRAWN_AT_ONCE = 1024


def arrivals_s(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds after the start, without end, `rate` a second on average; an infinite rate has all of them at 0.

    The gaps follow a gamma distribution of shape `burstiness` (as in `vllm bench serve`): 1 is a Poisson process, less comes in bursts,
    more is more even.
    """
    assert rate > 0 and burstiness > 0, "checked where they were given"
    if math.isinf(rate):
        yield from repeat(0.0)
    rng, now_s = generator(seed, Purpose.ARRIVALS), 0.0
    while True:
        for gap_s in rng.gamma(burstiness, 1 / (rate * burstiness), DRAWN_AT_ONCE):
            now_s += float(gap_s)
            yield now_s
