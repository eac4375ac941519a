"""One client stream read in a thread, with everything checked that must hold of any stream."""

import threading
import time

from tessera.client import Answer, Client, Finish, Piece, Prompt, TesseraError
from tessera.client.results import joined

WAIT_S = 180.0


class Reader:
    """Reads one answer to its end. Offsets must be dense and nothing may follow the finish, whatever happens behind the gateway."""

    def __init__(self, client: Client, prompt: Prompt, **options: object) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finish: Finish | None = None
        self.error: Exception | None = None
        self.pieces: list[Piece] = []
        self.pause_s = 0.0  # the longest between two pieces
        self._piece_s: float | None = None
        self._changed = threading.Condition()
        self._stream = client.stream(prompt, **options)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_tokens(self, count: int) -> None:
        """Wait until `count` tokens came, or the end."""
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.token_ids) >= count or self._ended, WAIT_S)
        assert came, f"{len(self.token_ids)} of {count} tokens came"

    def cancel(self) -> None:
        """Cancel the call, as a client does that goes away."""
        self._stream.close()

    def result(self) -> "Reader":
        """Wait for the end; raises what the stream raised."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), f"no end after {len(self.token_ids)} tokens"
        if self.error is not None:
            raise self.error
        assert self.finish is not None, "a stream ended without a finish"
        assert self.finish.usage.completion_tokens == len(self.token_ids)
        return self

    def answer(self) -> Answer:
        """The whole, once it has ended."""
        return joined(self.pieces)

    @property
    def _ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def _read(self) -> None:
        try:
            for piece in self._stream:
                with self._changed:
                    self._take(piece)
                    self._changed.notify_all()
        except (TesseraError, AssertionError, ValueError) as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def _take(self, piece: Piece) -> None:
        now_s = time.monotonic()
        self.pause_s = max(self.pause_s, now_s - (self._piece_s or now_s))
        self._piece_s = now_s
        assert self.finish is None, "a message came after the finish"
        assert piece.token_offset == len(self.token_ids), "token offsets are not dense"
        assert piece.text_offset == len(self.text.encode()), "text offsets are not dense"
        assert len(piece.logprobs) in (0, len(piece.token_ids)), "tokens without log-probabilities"
        self.pieces.append(piece)
        self.token_ids.extend(piece.token_ids)
        self.text += piece.text
        self.finish = piece.finish


def wait_until(condition: object, what: str, timeout_s: float = WAIT_S) -> float:
    """Poll until `condition()` holds; the seconds it took."""
    began = time.monotonic()
    while not condition():  # type: ignore[operator]
        assert time.monotonic() - began < timeout_s, f"still not so after {timeout_s} s: {what}"
        time.sleep(0.02)
    return time.monotonic() - began
