"""Text to token ids and back, for one model, with what the model's files say about its special tokens and chat template.

Special tokens written out in a text (`<|im_end|>`) are read as those tokens, in plain prompts as in chat messages, as `transformers`
does by default. Who puts untrusted text into a prompt and minds must strip them first, or send token ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tokenizers import Tokenizer as Backend

from gateway.chat_template import ChatTemplate
from gateway.detokenizer import Detokenizer, decode
from gateway.vocabulary import Vocabulary, read_vocabulary

NORMALIZED_BYTES_RATIO_MAX = 3
"""Most bytes of text that a normalizer turns into one (NFC: three conjoining jamo, 9 bytes, into one syllable, 3 bytes)."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """What a model's files say of its special tokens: the texts that chat templates use (`bos_token`, ...) and the ids that matter."""

    texts: Mapping[str, str] = field(default_factory=dict)
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()


class Tokenizer:
    """One model's tokenizer. Immutable and safe to use from several threads; encoding releases the GIL."""

    __slots__ = ("_backend", "bytes_per_token_max", "chat_template", "digest", "special", "vocabulary")

    def __init__(self, backend: Backend, special: SpecialTokens, chat_template: ChatTemplate | None, digest: str) -> None:
        """`backend` is owned from now on. Raises TokenizerError for a decoder that cannot be streamed."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.vocabulary: Vocabulary = read_vocabulary(backend)
        self.special = special
        self.chat_template = chat_template
        self.digest = digest
        ratio = 1 if backend.normalizer is None else NORMALIZED_BYTES_RATIO_MAX
        self.bytes_per_token_max = ratio * self.vocabulary.longest_token_bytes()

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return self.vocabulary.size

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, BOS where this tokenizer adds one. Raises UnicodeError for lone surrogates."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of `token_ids`; ids that name no token add nothing."""
        return decode(self.vocabulary, token_ids, skip_special_tokens)

    def to_json(self) -> str:
        """What a tokenizer.json of this tokenizer holds, whatever it was loaded from."""
        text: str = self._backend.to_str()
        return text

    def detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        """A fresh incremental decoder for one request."""
        return Detokenizer(self.vocabulary, skip_special_tokens)
