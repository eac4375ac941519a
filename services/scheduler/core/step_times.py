"""What steps of one worker have taken: how long the last prefill was, and how many prefill positions fit into a given time."""

CHUNK_MIN = 16
"""A step computes so many prefill positions whatever they take, so that every prompt gets on. A slow CPU computes them in some 50 ms."""

GROWTH_MAX = 4
"""A chunk is at most so many times as long as all that the rate is from: it says little about much longer ones, and one short measurement little
at all."""

MEMORY = 0.75
"""What a step's time still counts after the next one: prompts get slower towards their ends, and machines busier."""


class StepTimes:
    """Learns from outputs, in the order in which they come.

    A step takes as long as its decodes would alone, and a fixed time per prefill position on top of that. Where this is wrong the next
    chunk is still better than the last: it is scaled by what that had to take, over what it took.
    """

    __slots__ = ("_decode_us", "_prefill_positions", "_prefill_us", "_untimed", "last_prompt_us")

    def __init__(self) -> None:
        self.last_prompt_us = 0  # the latency of the last step with a prefill; 0: none yet
        self._decode_us = 0.0  # of a step with nothing but decodes; 0: not known
        self._prefill_us = 0.0  # sums over steps, the older ones fading
        self._prefill_positions = 0.0
        self._untimed = (0, 0)  # decodes and prefill positions of the steps before whose time is the next one's

    def restart(self) -> None:
        """Nothing is in flight any more."""
        self._untimed = (0, 0)

    @property
    def has_prefills(self) -> bool:
        """Whether any were timed."""
        return self._prefill_positions > 0

    def answered(self, num_decodes: int, prefill_positions: int, compute_us: int, latency_us: int) -> None:
        """A step's output came, which the worker computed in `compute_us` (0: together with the next, whose time it is); for `latency_us` no other was
        before it."""
        if prefill_positions:
            self.last_prompt_us = latency_us
        num_decodes, prefill_positions = num_decodes + self._untimed[0], prefill_positions + self._untimed[1]
        if compute_us <= 0:
            self._untimed = (num_decodes, prefill_positions)
            return
        self._untimed = (0, 0)
        if not prefill_positions:
            if num_decodes:
                self._decode_us = _faded(self._decode_us, compute_us) if self._decode_us else compute_us
            return
        if num_decodes:
            self._decode_us = min(self._decode_us, compute_us)
            compute_us -= int(self._decode_us)
        self._prefill_us = MEMORY * self._prefill_us + compute_us
        self._prefill_positions = MEMORY * self._prefill_positions + prefill_positions

    def prefill_positions_max(self, target_us: int) -> int:
        """How many prefill positions a step with decodes may have to take about `target_us`; at least `CHUNK_MIN`."""
        most = int(GROWTH_MAX * self._prefill_positions)
        if self._prefill_us:
            most = min(most, int((target_us - self._decode_us) * self._prefill_positions / self._prefill_us))
        return max(CHUNK_MIN, most)


def _faded(old: float, new: float) -> float:
    return MEMORY * old + (1 - MEMORY) * new
