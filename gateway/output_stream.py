"""One request's output on its way to the client: tokens in, numbered pieces of text out.

The text is a function of the token ids, the options and the finish alone: however the outputs were cut, and whichever gateway looks, it
is the same, and so is the token at which a stop string ends it. A stream that goes on elsewhere detokenizes again from token 0.

What ends up in the text: everything but the stop. A stop token (EOS or a stop token id) leaves no text, and its text is not searched for
stop strings; a stop string is cut with all after it. `include_stop_in_output` shows either (a special token's text only if those are shown).
Token ids always include those of the stop. A stop string wins over an end that comes at its own token or later, save a stop token.
"""

from dataclasses import dataclass

from gateway.delta import Delta
from gateway.errors import InvalidField, InvalidRequest, OutputGap
from gateway.stop_strings import StopMatch, StopMatcher, StopStrings
from gateway.tokenizer import Tokenizer
from tessera.values.finish import Finish, FinishReason
from tessera.values.request import DetokenizeOptions, RequestOutput

_STOP_TOKEN_REASONS = (FinishReason.EOS, FinishReason.STOP_TOKEN)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a resuming client has been shown already: output ids from the first on, and bytes (UTF-8) of text."""

    token_ids: tuple[int, ...] = ()
    text_bytes: int = 0


class OutputStream:
    """State of one request at a gateway.

    `token_ids` are all output ids held, those shown before a resume included; `finish` is the end, once there is one.
    `subscriber` is the client's resume number; outputs for another one are not for this stream.
    """

    __slots__ = (
        "_absorbed",
        "_detokenizer",
        "_include_stop",
        "_matcher",
        "_shown_bytes",
        "_text_bytes",
        "finish",
        "subscriber",
        "token_ids",
    )

    def __init__(self, tokenizer: Tokenizer, options: DetokenizeOptions, subscriber: int = 0, shown: Shown = Shown()) -> None:
        self.subscriber = subscriber
        self.token_ids = list(shown.token_ids)
        self.finish: Finish | None = None
        self._shown_bytes = shown.text_bytes
        self._include_stop = options.include_stop_in_output
        self._detokenizer = tokenizer.detokenizer(options.skip_special_tokens)
        self._matcher = StopMatcher(StopStrings(options.stop_strings))
        self._absorbed = 0  # tokens detokenized
        self._text_bytes = 0  # text that came of them, shown or not

    def feed(self, output: RequestOutput) -> Delta | None:
        """Take what the scheduler sent; returns what is new to the client, None for nothing (duplicates, another subscriber's, after the end).

        A stop token must come in the same output as its finish. Raises OutputGap, and InvalidRequest on the first output after a resume
        where the client's text does not fit its tokens; both end this request only.
        """
        if self.finish is not None or output.subscriber != self.subscriber:
            return None
        self._check_dense(output)
        token_offset = len(self.token_ids)
        self.token_ids.extend(output.token_ids[token_offset - output.token_offset :])
        text = self._absorb(output.finish)
        text_offset = self._text_bytes
        self._text_bytes += len(text.encode())
        if text_offset < self._shown_bytes:
            text_offset, text = self._shown_bytes, self._unshown(text)
        found_here = self.finish != output.finish
        delta = Delta(
            token_offset=token_offset,
            token_ids=tuple(self.token_ids[token_offset:]),
            text_offset=text_offset,
            text=text,
            num_cached_tokens=output.num_cached_tokens,
            finish=self.finish,
            timings=None if found_here else output.timings,
            found_here=found_here,
        )
        return delta if delta.token_ids or delta.text or delta.finish else None

    def _check_dense(self, output: RequestOutput) -> None:
        held, end = len(self.token_ids), output.token_offset + len(output.token_ids)
        if output.token_offset > held:
            raise OutputGap(f"tokens {held} to {output.token_offset} never arrived")
        if output.finish is not None and (end < held or output.finish.output_len != end):
            raise OutputGap(f"the end says {output.finish.output_len} tokens; {max(held, end)} arrived")

    def _absorb(self, finish: Finish | None) -> str:
        """Detokenize what has not been yet, up to the end; returns its text and sets `finish`."""
        stop_token = finish is not None and finish.reason in _STOP_TOKEN_REASONS
        step, search = self._detokenizer.step, self._matcher.feed
        pieces: list[str] = []
        for token_id in self.token_ids[self._absorbed : len(self.token_ids) - stop_token]:
            self._absorbed += 1
            piece = search(step(token_id))
            if isinstance(piece, StopMatch):
                return "".join(pieces) + self._stop_at(piece)
            pieces.append(piece)
        if finish is not None:
            pieces.append(self._end_with(finish))
        return "".join(pieces)

    def _end_with(self, finish: Finish) -> str:
        """The last text: a character cut short, what was held back, and the stop token's own if it is wanted."""
        piece = self._matcher.feed(self._detokenizer.finish())
        if isinstance(piece, StopMatch):
            return self._stop_at(piece)
        self.finish = finish
        stop_token_ids = self.token_ids[self._absorbed :] if self._include_stop else []
        stop_text = "".join(map(self._detokenizer.step, stop_token_ids)) + self._detokenizer.finish()
        return piece + self._matcher.flush() + stop_text

    def _stop_at(self, match: StopMatch) -> str:
        del self.token_ids[self._absorbed :]
        self.finish = Finish(FinishReason.STOP_STRING, self._absorbed, stop_string=match.stop_string)
        return match.text + match.stop_string if self._include_stop else match.text

    def _unshown(self, text: str) -> str:
        """What of the first text after a resume lies beyond what the client has."""
        try:
            rest = text.encode()[self._shown_bytes :].decode()
        except UnicodeDecodeError:
            rest = ""
        if len(rest.encode()) != self._text_bytes - self._shown_bytes:
            problem = f"{self._shown_bytes} is no character's start within the {self._text_bytes} bytes of these tokens"
            raise InvalidRequest([InvalidField("text_offset", problem)])
        return rest
