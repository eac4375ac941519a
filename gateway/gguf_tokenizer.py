"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file. Byte-level BPE with a known pre-tokenizer only.

The pre-tokenizer decides where merges may happen; it is only named in the file (`tokenizer.ggml.pre`). A wrong one gives plausible but
different ids, so an unknown name is an error. The splits are those of the models' own tokenizer.json files and of llama.cpp.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gateway.errors import TokenizerError

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type

_LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2_SPLIT = _LLAMA_3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _byte_level(use_regex=False)])


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


_PRE_TOKENIZERS: dict[object, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": partial(_byte_level, use_regex=True),
    "smollm": _digits_then_gpt2,
    "llama-bpe": partial(_split_then_bytes, _LLAMA_3_SPLIT),
    "qwen2": partial(_split_then_bytes, _QWEN_2_SPLIT),
}
_WHOLE_WORDS_FIRST = {"llama-bpe"}  # a word that is in the vocabulary is taken as it is, whatever the merges say
_BOS_BY_DEFAULT = {"llama-bpe"}  # what llama.cpp does where the file has no add_bos_token
_NFC = {"qwen2"}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` (of one GGUF file) describes. Raises TokenizerError naming what is missing or unknown."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise _unsupported("tokenizer.ggml.model", kind, ["gpt2"])
    if pre not in _PRE_TOKENIZERS:
        raise _unsupported("tokenizer.ggml.pre", pre, [*_PRE_TOKENIZERS])
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    merges: list[str] = metadata.get("tokenizer.ggml.merges", [])
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not tokens or not merges or len(types) != len(tokens):
        raise TokenizerError(
            f"the GGUF file's tokenizer is incomplete: {len(tokens)} tokens, {len(merges)} merges, {len(types)} token types; {_ADVICE}"
        )
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != _UNUSED}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    except Exception as error:  # the library raises bare Exception, e.g. for a merge outside the vocabulary
        raise TokenizerError(f"the GGUF file's merges do not fit its tokens ({error}); {_ADVICE}") from error
    if pre in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    _add_bos(tokenizer, metadata, tokens)
    return tokenizer


def _added(tokens: list[str], types: list[int], wanted: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=wanted == _CONTROL)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type == wanted
    ]


def _add_bos(tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    wanted = metadata.get("tokenizer.ggml.add_bos_token", metadata["tokenizer.ggml.pre"] in _BOS_BY_DEFAULT)
    if wanted and bos_id is not None:
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, bos_id)])


_ADVICE = "use the model's Hugging Face directory (with tokenizer.json) instead"


def _unsupported(key: str, value: object, known: list[object]) -> TokenizerError:
    return TokenizerError(f"the GGUF file's {key} is {value!r}; known are {', '.join(map(str, known))}; {_ADVICE}")
