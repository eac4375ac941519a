"""Turns output token ids into text one token at a time.

A text is the tokens' bytes in a row, read as UTF-8; what is no UTF-8 becomes U+FFFD, one per maximal broken piece, exactly as a
`ByteLevel` decoder of the `tokenizers` library has it. So the pieces of a text always add up to the text of all its tokens, however they
were cut, and no token can make it fail. (`DecodeStream` re-decodes a window and can end in "invalid prefix".) One difference: in a run of
byte-fallback tokens that is not UTF-8 as a whole, `tokenizers` turns every byte into U+FFFD, after the fact; here valid characters stay.
"""

import codecs
from collections.abc import Iterable

from gateway.vocabulary import Vocabulary

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one request as it grows. To start again at token 0, build a new one and feed it the same ids."""

    __slots__ = ("_bytes_of", "_leading_spaces_left", "_utf8")

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._bytes_of = vocabulary.plain_bytes_of if skip_special_tokens else vocabulary.bytes_of
        self._leading_spaces_left = vocabulary.leading_spaces_dropped
        self._utf8 = _Utf8Decoder("replace")

    def step(self, token_id: int) -> str:
        """The text that this token completes: empty while a character is incomplete, or for a token that stands for nothing."""
        known = 0 <= token_id < len(self._bytes_of)
        text = self._utf8.decode(self._bytes_of[token_id] if known else b"")
        return self._without_leading_spaces(text) if self._leading_spaces_left and text else text

    def finish(self) -> str:
        """The text of a character that stayed incomplete: U+FFFD, or nothing. No step may follow."""
        return self._utf8.decode(b"", final=True)

    def _without_leading_spaces(self, text: str) -> str:
        kept = text.lstrip(" ")
        dropped = min(len(text) - len(kept), self._leading_spaces_left)
        self._leading_spaces_left = 0 if kept else self._leading_spaces_left - dropped
        return text[dropped:]


def decode(vocabulary: Vocabulary, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
    """The text of all `token_ids` at once: what their pieces add up to."""
    detokenizer = Detokenizer(vocabulary, skip_special_tokens)
    return "".join(map(detokenizer.step, token_ids)) + detokenizer.finish()
