"""Outcomes for tests, from what matters in each."""

from array import array
from collections.abc import Sequence

from services.bench.outcome import INTERRUPTED, OK, Outcome, Served


def answered(
    index: int, sent_s: float, piece_s: Sequence[float], arrival_s: float | None = None, queue_ms: float = 1.0
) -> Outcome:
    """A whole answer, a token a piece, that ends with its last piece. Its prompt has 100 tokens, 25 of them cached."""
    served = Served(100, 25, len(piece_s), queue_ms, 2.0, 0)
    return Outcome(index, sent_s, piece_s[-1], OK, arrival_s=arrival_s, piece_s=array("d", piece_s), served=served)


def failed(index: int, sent_s: float, end_s: float, status: str, message: str = "") -> Outcome:
    """One that has no answer."""
    return Outcome(index, sent_s, end_s, status, message)


def interrupted(index: int, sent_s: float, end_s: float) -> Outcome:
    """One that the benchmark did not wait for."""
    return Outcome(index, sent_s, end_s, INTERRUPTED)
