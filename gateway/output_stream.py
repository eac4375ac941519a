"""One request's output on its way to the client: tokens in, numbered pieces of text out.

The text is a function of the token ids, the options and the finish alone: however the outputs were cut, and whichever gateway looks, it
is the same, and so is the token at which a stop string ends it. A stream that goes on elsewhere detokenizes again from token 0, and shows
only what lies beyond what its client has.

What ends up in the text: everything but the stop. A stop token (EOS or a stop token id) leaves no text, and its text is not searched for
stop strings; a stop string is cut with all after it. `include_stop_in_output` shows either (a special token's text only if those are shown).
Token ids always include those of the stop. A stop string wins over an end that comes at its own token or later, save a stop token.
"""

from dataclasses import dataclass

from gateway.delta import Delta
from gateway.errors import InvalidField, InvalidRequest, OutputGap
from gateway.stop_strings import StopMatch, StopMatcher, StopStrings
from gateway.tokenizer import Tokenizer
from tessera.values.finish import CUT_SHORT, Finish, FinishReason
from tessera.values.logprobs import Logprobs
from tessera.values.request import DetokenizeOptions, RequestOutput

_STOP_TOKEN_REASONS = (FinishReason.EOS, FinishReason.STOP_TOKEN)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a resuming client has been shown already: so many output tokens from the first on, and so many bytes (UTF-8) of text.

    `token_ids` are these tokens, or empty where the client has not kept them: then they have to come again.
    """

    num_tokens: int = 0
    text_bytes: int = 0
    token_ids: tuple[int, ...] = ()


class OutputStream:
    """State of one request at a gateway.

    `token_ids` are all output ids held, those shown before a resume included; `finish` is the end, once there is one.
    `subscriber` is the client's resume number; outputs for another one are not for this stream. What the client says it was shown is
    checked as soon as its tokens are held, by the constructor or by `feed`, which then raise InvalidRequest.
    """

    __slots__ = (
        "_absorbed",
        "_detokenizer",
        "_matcher",
        "_options",
        "_text_bytes",
        "finish",
        "shown",
        "subscriber",
        "token_ids",
        "tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, options: DetokenizeOptions, subscriber: int = 0, shown: Shown = Shown()) -> None:
        self.subscriber = subscriber
        self.token_ids = list(shown.token_ids)
        self.finish: Finish | None = None
        self.shown = shown
        self.tokenizer = tokenizer
        self._options = options
        self._detokenizer = tokenizer.detokenizer(options.skip_special_tokens)
        self._matcher = StopMatcher(StopStrings(options.stop_strings))
        self._absorbed = 0  # tokens detokenized
        self._text_bytes = 0  # text that came of them, shown or not
        if len(self.token_ids) == shown.num_tokens:
            self._check_shown_text()

    @property
    def token_offset(self) -> int:
        """Offset of the next token that the client is to be shown."""
        return max(len(self.token_ids), self.shown.num_tokens)

    def feed(self, output: RequestOutput) -> Delta | None:
        """Take what the scheduler sent; returns what is new to the client, None for nothing (duplicates, another subscriber's, after the end).

        A stop token must come in the same output as its finish. Raises OutputGap, and InvalidRequest where the answer is not the one
        of which a resuming client says that it was shown so much; both end this request only.
        """
        if self.finish is not None or output.subscriber != self.subscriber:
            return None
        self._check_dense(output)
        held, token_offset = len(self.token_ids), self.token_offset
        self.token_ids.extend(output.token_ids[held - output.token_offset :])
        if held < self.shown.num_tokens <= len(self.token_ids):
            self._check_shown_text()
        text_offset, text = self._beyond_shown(self._absorb(output.finish))
        if self.finish is not None and self.finish.reason not in CUT_SHORT:
            self._check_shown_ends()
        found_here = self.finish != output.finish
        token_ids = tuple(self.token_ids[token_offset:])
        delta = Delta(
            token_offset=token_offset,
            token_ids=token_ids,
            text_offset=text_offset,
            text=text,
            num_cached_tokens=output.num_cached_tokens,
            finish=self.finish,
            timings=None if found_here else output.timings,
            found_here=found_here,
            logprobs=_logprobs_of(output, token_offset, len(token_ids)),
            prompt_logprobs=output.prompt_logprobs if token_ids and not token_offset else None,
        )
        return delta if delta.token_ids or delta.text or delta.finish else None

    def _check_dense(self, output: RequestOutput) -> None:
        held, end = len(self.token_ids), output.token_offset + len(output.token_ids)
        if output.finish is not None and end < held <= self.shown.num_tokens and output.finish.output_len == end:
            raise _refused("token_offset", f"is {self.shown.num_tokens}; the answer has {end} tokens")
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
        stop_token_ids = self.token_ids[self._absorbed :] if self._options.include_stop_in_output else []
        stop_text = "".join(map(self._detokenizer.step, stop_token_ids)) + self._detokenizer.finish()
        return piece + self._matcher.flush() + stop_text

    def _stop_at(self, match: StopMatch) -> str:
        del self.token_ids[self._absorbed :]
        self.finish = Finish(FinishReason.STOP_STRING, self._absorbed, stop_string=match.stop_string)
        return match.text + match.stop_string if self._options.include_stop_in_output else match.text

    def _check_shown_text(self) -> None:
        """Refuse a text that cannot have come of the tokens shown with it, text held back until the end included."""
        shown, decode = self.shown, self.tokenizer.decode
        ids, skip = self.token_ids[: shown.num_tokens], self._options.skip_special_tokens
        text = decode(ids, skip).encode()
        if not _is_boundary(text, shown.text_bytes):
            text = (
                decode(ids[:-1], skip) + decode(ids[-1:], skip)
            ).encode()  # a stop token's bytes complete no character before it
        if shown.text_bytes > len(text):
            raise _refused("text_offset", f"is {shown.text_bytes}; the first {shown.num_tokens} tokens have {len(text)} bytes")
        if not _is_boundary(text, shown.text_bytes):
            raise _within_a_character(shown.text_bytes)

    def _check_shown_ends(self) -> None:
        """Refuse what lies beyond the end."""
        shown = self.shown
        if shown.num_tokens > len(self.token_ids):
            raise _refused("token_offset", f"is {shown.num_tokens}; the answer has {len(self.token_ids)} tokens")
        if shown.text_bytes > self._text_bytes:
            raise _refused("text_offset", f"is {shown.text_bytes}; the answer has {self._text_bytes} bytes")

    def _beyond_shown(self, text: str) -> tuple[int, str]:
        """Offset and text of what of this next piece the client has not been shown."""
        text_offset, shown_bytes = self._text_bytes, self.shown.text_bytes
        data = text.encode()
        self._text_bytes += len(data)
        if text_offset >= shown_bytes:
            return text_offset, text
        missing = shown_bytes - text_offset
        if missing < len(data) and not _is_boundary(data, missing):
            raise _within_a_character(shown_bytes)
        return shown_bytes, data[missing:].decode()


def _logprobs_of(output: RequestOutput, token_offset: int, count: int) -> Logprobs | None:
    """Those of so many tokens of an output, from an offset in the whole answer on."""
    if output.logprobs is None or not count:
        return None
    first = token_offset - output.token_offset
    return output.logprobs.between(first, first + count)


def _is_boundary(data: bytes, offset: int) -> bool:
    """Whether a character of `data` begins at `offset`, or `data` ends there."""
    return offset == len(data) or (offset < len(data) and data[offset] & 0xC0 != 0x80)


def _refused(field: str, description: str) -> InvalidRequest:
    return InvalidRequest([InvalidField(f"resume.{field}", description)])


def _within_a_character(text_bytes: int) -> InvalidRequest:
    return _refused("text_offset", f"is {text_bytes}, which is within a character of the answer")
