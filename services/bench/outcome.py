"""What became of one request of a benchmark, as its client saw it."""

from array import array
from dataclasses import dataclass, field
from typing import Any

OK = "OK"
REJECTED = "RESOURCE_EXHAUSTED"
"""The status of a request that the service had no room for, after as many retries as were asked for."""

INTERRUPTED = "INTERRUPTED"
"""The status of a request that was under way when somebody ended the benchmark."""


@dataclass(frozen=True, slots=True)
class Served:
    """What the service says of an answer: tokens, and milliseconds on its own clock from the arrival at the scheduler."""

    input_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float
    ttft_ms: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are seconds on one clock of the client. `arrival_s` is when an open loop meant to send it, None in a closed one; `piece_s` has
    the coming of every piece that had tokens. `status` is OK, INTERRUPTED, the name of a gRPC status, or ANSWER_ERROR or ANSWER_ABORTED for an
    answer that ended so; `message` says more. `served` is None unless an answer came to its end."""

    index: int
    sent_s: float
    end_s: float
    status: str
    message: str = ""
    arrival_s: float | None = None
    piece_s: "array[float]" = field(default_factory=lambda: array("d"))
    served: Served | None = None
    retries: int = 0

    @property
    def is_ok(self) -> bool:
        """Whether there is a whole answer."""
        return self.status == OK and len(self.piece_s) > 0

    @property
    def is_interrupted(self) -> bool:
        """Whether the benchmark ended before it: neither answered nor failed."""
        return self.status == INTERRUPTED

    @property
    def ttft_ms(self) -> float:
        """From sending to the first tokens, waits of retries included."""
        return 1000 * (self.piece_s[0] - self.sent_s)

    @property
    def e2el_ms(self) -> float:
        """From sending to the end."""
        return 1000 * (self.end_s - self.sent_s)

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first; None with fewer than two."""
        if self.served is None or self.served.output_tokens < 2:
            return None
        return 1000 * (self.piece_s[-1] - self.piece_s[0]) / (self.served.output_tokens - 1)

    @property
    def itl_ms(self) -> list[float]:
        """Pauses between pieces: what a reader waits for. Tokens that come together are one piece."""
        return [1000 * (later - earlier) for earlier, later in zip(self.piece_s, self.piece_s[1:], strict=False)]

    @property
    def lag_ms(self) -> float | None:
        """How much later than meant it was sent; None in a closed loop."""
        return None if self.arrival_s is None else 1000 * (self.sent_s - self.arrival_s)

    def as_json(self, began_s: float) -> dict[str, Any]:
        """Everything that was measured; times are seconds after `began_s`."""
        told: dict[str, Any] = {"index": self.index, "status": self.status, "sent_s": round(self.sent_s - began_s, 6)}
        if self.message:
            told["message"] = self.message
        if self.arrival_s is not None:
            told["arrival_s"] = round(self.arrival_s - began_s, 6)
        told["end_s"] = round(self.end_s - began_s, 6)
        told["retries"] = self.retries
        if self.piece_s:
            told |= {"ttft_ms": round(self.ttft_ms, 3), "itl_ms": [round(pause_ms, 3) for pause_ms in self.itl_ms]}
        if self.is_ok and self.served is not None:
            tpot_ms = self.tpot_ms
            told |= {"tpot_ms": None if tpot_ms is None else round(tpot_ms, 3), "e2el_ms": round(self.e2el_ms, 3)}
            told |= {"input_tokens": self.served.input_tokens, "cached_tokens": self.served.cached_tokens}
            told |= {"output_tokens": self.served.output_tokens, "queue_ms": self.served.queue_ms}
            told |= {"server_ttft_ms": self.served.ttft_ms, "num_preemptions": self.served.num_preemptions}
        return told
