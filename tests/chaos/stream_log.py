"""What one client saw of one stream: everything that a verdict needs, and what must hold of any stream counted as it comes."""

from dataclasses import dataclass, field
from itertools import pairwise

from tessera.client import Piece


@dataclass(frozen=True, slots=True)
class Progress:
    """How far all streams are."""

    started: int
    finished: int
    tokens: int  # received, over all streams
    slowest: int  # tokens of the running stream that has the fewest


@dataclass(slots=True)
class StreamLog:
    """One stream. Times are seconds of CLOCK_MONOTONIC, which all processes of a machine share."""

    ask: int  # index of its ask
    began_s: float
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    piece_times_s: list[float] = field(default_factory=list)
    finish: str = ""  # name of the reason; empty while there is none
    stop: str | int | None = None  # what ended it, if a stop string or token did
    error: str = ""  # what the client raised
    repeated: int = 0  # tokens whose offset had come before
    skipped: int = 0  # tokens that a piece jumped over
    text_faults: int = 0  # pieces whose text does not begin where the text before ended
    pieces_after_finish: int = 0
    miscounted: int = 0  # tokens by which the usage of the finish is wrong

    @property
    def is_over(self) -> bool:
        """Whether nothing more can come."""
        return bool(self.finish or self.error)

    def take(self, piece: Piece, now_s: float) -> None:
        """Note a piece. Offsets are absolute; what is not dense is counted, and the stream read on."""
        self.piece_times_s.append(now_s)
        if self.finish:
            self.pieces_after_finish += 1
        offset = piece.token_offset - len(self.token_ids)
        if offset > 0:
            self.skipped += offset
        elif offset < 0:
            self.repeated += min(-offset, len(piece.token_ids))
        self.token_ids.extend(piece.token_ids)
        if piece.text_offset != len(self.text.encode()):
            self.text_faults += 1
        self.text += piece.text
        if piece.finish is not None:
            self.finish = piece.finish.reason.name
            self.stop = piece.finish.stop_string if piece.finish.stop_string is not None else piece.finish.stop_token_id
            self.miscounted = abs(piece.finish.usage.completion_tokens - len(self.token_ids))

    def longest_gap_s(self, after_s: float) -> float | None:
        """The longest time between two of its pieces of which the later one came after `after_s`; None where there are no such two."""
        times = self.piece_times_s
        gaps = [later - earlier for earlier, later in pairwise(times) if later > after_s]
        return max(gaps, default=None)
