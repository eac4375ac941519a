"""Tokenizers built from GGUF metadata: where each known pre-tokenizer splits, BOS, special tokens, and what is refused."""

import unicodedata
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from gateway.errors import TokenizerError
from gateway.gguf_tokenizer import build_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def metadata(pre_tokenizer: str, **changes: Any) -> dict[str, Any]:
    tokens = [*ALPHABET, "ab", "abc", "bc", "<s>", "<tool>", "[PAD5]"]
    types = [1] * (len(tokens) - 3) + [3, 4, 5]
    found = {
        "model": "gpt2",
        "pre": pre_tokenizer,
        "tokens": tokens,
        "token_type": types,
        "merges": ["b c", "a b"],
        "bos_token_id": tokens.index("<s>"),
    }
    found |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def splits(pre: str, text: str) -> list[str]:
    """`text` cut where the pre-tokenizer cuts it."""
    tokenizer = build_tokenizer(metadata(pre))
    assert tokenizer.pre_tokenizer is not None
    return [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def encoded(tokens: list[str], text: str, pre: str, **changes: Any) -> bool:
    return build_tokenizer(metadata(pre, **changes)).encode(text).tokens == tokens


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'ll", " pay", " ", " 1234", "\n", "\n", "5", "x", "!", " DON", "'", "T", "  "]),
        ("smollm", ["I", "'ll", " pay", "  ", "1", "2", "3", "4", "\n\n", "5", "x", "!", " DON", "'", "T", "  "]),
        ("llama-bpe", ["I", "'ll", " pay", " ", " ", "123", "4", "\n\n", "5", "x", "!", " DON", "'T", "  "]),
        ("qwen2", ["I", "'ll", " pay", " ", " ", "1", "2", "3", "4", "\n\n", "5", "x", "!", " DON", "'T", "  "]),
    ],
)
def test_each_pre_tokenizer_splits_as_its_models_do(pre: str, pieces: list[str]) -> None:
    assert splits(pre, "I'll pay  1234\n\n5x! DON'T  ") == pieces


def test_only_llama_takes_whole_words_before_merges() -> None:
    """`b c` merges first, which leaves no way to `abc`; Llama 3 takes the word as it is."""
    assert encoded(["abc"], "abc", "llama-bpe", bos_token_id=None)
    assert encoded(["a", "bc"], "abc", "gpt-2")


def test_only_qwen_normalizes() -> None:
    decomposed = unicodedata.normalize("NFD", "é")
    tokenizer = build_tokenizer(metadata("qwen2"))
    assert tokenizer.encode(decomposed).ids == tokenizer.encode("é").ids
    tokenizer = build_tokenizer(metadata("gpt-2"))
    assert tokenizer.encode(decomposed).ids != tokenizer.encode("é").ids


@pytest.mark.parametrize(
    ("pre", "flag", "tokens"),
    [
        ("llama-bpe", None, ["<s>", "a"]),
        ("llama-bpe", False, ["a"]),
        ("gpt-2", None, ["a"]),
        ("gpt-2", True, ["<s>", "a"]),
    ],
)
def test_bos_is_added_as_the_file_says_or_its_kind_does(pre: str, flag: bool | None, tokens: list[str]) -> None:
    assert encoded(tokens, "a", pre, add_bos_token=flag)


def test_control_tokens_are_special_user_defined_ones_are_not_unused_ones_are_none() -> None:
    tokenizer = build_tokenizer(metadata("gpt-2"))
    assert tokenizer.encode("a<s>b<tool>").tokens == ["a", "<s>", "b", "<tool>"]
    assert tokenizer.decode(tokenizer.encode("a<s>b<tool>").ids, skip_special_tokens=True) == "ab<tool>"
    assert tokenizer.token_to_id("[PAD5]") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "default"}, r"tokenizer\.ggml\.pre is 'default'; known are .*smollm.*Hugging Face directory"),
        ({"pre": None}, r"tokenizer\.ggml\.pre is None"),
        ({"model": "llama"}, r"tokenizer\.ggml\.model is 'llama'"),
        ({"model": None}, r"tokenizer\.ggml\.model is None"),
        ({"tokens": None}, "0 tokens, 2 merges"),
        ({"merges": []}, "0 merges"),
        ({"token_type": [1]}, "1 token types"),
        ({"merges": ["x nowhere"]}, "merges do not fit"),
        ({"merges": ["noseparator"]}, "merges do not fit"),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(metadata("gpt-2", **changes))
