"""Which bytes each token stands for: all that detokenizing needs.

A decoder of the `tokenizers` library maps a list of tokens to text, which cannot be done piecewise in general. The two kinds
that language models use can: a text is the tokens' bytes in a row, read as UTF-8. The bytes are worked out once, at loading.
"""

import json
from typing import Any

from tokenizers import Tokenizer as Backend

from gateway.errors import TokenizerError

_SPACE_MARK = "▁"  # how SentencePiece vocabularies spell a space


class Vocabulary:
    """Token id -> bytes. Immutable; shared by all requests of a model.

    `bytes_of[id]` is what the token adds to the text; `plain_bytes_of[id]` is the same with special tokens empty. Ids that name no
    token (holes, a padded embedding) are empty. `leading_spaces_dropped` spaces at most are cut from the start of a text.
    """

    __slots__ = ("bytes_of", "leading_spaces_dropped", "plain_bytes_of", "size")

    def __init__(self, bytes_of: list[bytes], special_ids: set[int], leading_spaces_dropped: int = 0) -> None:
        self.bytes_of = bytes_of
        self.plain_bytes_of = [b"" if i in special_ids else data for i, data in enumerate(bytes_of)]
        self.leading_spaces_dropped = leading_spaces_dropped
        self.size = len(bytes_of)

    def longest_token_bytes(self) -> int:
        """Length of the longest token, bytes, at least 1."""
        return max(1, max(map(len, self.bytes_of), default=1))


def read_vocabulary(backend: Backend) -> Vocabulary:
    """Work out the bytes of every token of `backend`. Raises TokenizerError for a decoder that does not work piecewise."""
    tokens = backend.get_vocab(with_added_tokens=True)
    special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    bytes_of = [b""] * (max(tokens.values(), default=-1) + 1)
    if kinds == ["ByteLevel"]:
        alphabet = _byte_alphabet()
        spelled, to_latin1 = set(alphabet), str.maketrans(alphabet)
        for token, i in tokens.items():
            # A token with a character outside the alphabet is an added one and stands for its own text.
            bytes_of[i] = token.translate(to_latin1).encode("latin-1") if spelled.issuperset(token) else token.encode()
        return Vocabulary(bytes_of, special_ids)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]) and _replaces_mark(steps[0]):
        for token, i in tokens.items():
            bytes_of[i] = _byte_fallback_bytes(token)
        return Vocabulary(bytes_of, special_ids, _spaces_stripped(steps[3:]))
    raise TokenizerError(
        f"the tokenizer's decoder ({', '.join(kinds) or 'none'}) cannot be streamed; "
        "known are ByteLevel and Replace, ByteFallback, Fuse with or without Strip"
    )


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _replaces_mark(step: dict[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": _SPACE_MARK} and step["content"] == " ")


def _spaces_stripped(steps: list[dict[str, Any]]) -> int:
    return sum(int(step["start"]) for step in steps if step["content"] == " ")


def _byte_alphabet() -> dict[str, str]:
    """GPT-2's spelling of the 256 bytes, character -> byte as a Latin-1 character: printable ones as themselves, the others as U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): chr(byte) for byte in printable} | {chr(256 + i): chr(byte) for i, byte in enumerate(others)}


def _byte_fallback_bytes(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(_SPACE_MARK, " ").encode()
