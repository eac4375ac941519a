"""Loading tokenizers: the packaged SmolLM2, Hugging Face directories, and files that are missing or broken."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import SMOLLM2, byte_fallback_backend, byte_level_backend
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers

from gateway.conversation import ChatMessage, Conversation
from gateway.errors import TokenizerError
from gateway.tokenizer import Tokenizer
from gateway.tokenizer_source import load_tokenizer
from tessera.values.gguf_header import read_gguf_header
from tessera.values.known_models import locate
from tessera.values.tokenizer_digest import gguf_tokenizer_digest, tokenizer_json_digest

TEXTS = [
    "",
    " ",
    "Hello world! It's 12:34, isn't it? I'LL pay $1,234.50.",
    "def f(x):\n    return x  + 1  # sum\n\n\n\tif x: pass\r\n",
    "naïve café — “quotes” … Ünïcödé ß ﬁ Ω",
    "日本語のテキスト 中文 한국어 עברית العربية हिन्दी ไทย",
    "😀 👩‍👩‍👧 🏳️‍🌈 e\u0301 \u200b\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n <|endoftext|><repo_name>x <not_special>",
    "a" * 300 + " " * 70 + "!?" * 40,
]


def test_smollm2_is_read_from_its_gguf_file(smollm2: Tokenizer) -> None:
    metadata = read_gguf_header(locate(SMOLLM2)).metadata
    names = ("tokens", "merges", "token_type", "pre")
    assert smollm2.digest == gguf_tokenizer_digest(*(metadata[f"tokenizer.ggml.{name}"] for name in names))
    assert smollm2.vocab_size == 49152
    assert (smollm2.special.bos_id, smollm2.special.eos_ids) == (1, (2,))
    assert smollm2.special.texts["eos_token"] == "<|im_end|>"


def test_smollm2_takes_digits_one_by_one_and_leaves_the_space_before_them_whole(smollm2: Tokenizer) -> None:
    """As its own tokenizer.json and llama.cpp do. (transformers' GGUF loader does not know `smollm` and splits as for GPT-2.)"""
    for text in ("a  12", "x\n\n1. item", "\t\t2"):
        tokens = [smollm2.decode([i], False) for i in smollm2.encode(text, True)]
        assert tokens == {"a  12": ["a", "  ", "1", "2"], "x\n\n1. item": ["x", "\n\n", "1", ".", " item"]}.get(
            text, ["\t\t", "2"]
        )


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_text_comes_back_as_it_was(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text, True), skip_special_tokens=False) == text


def test_special_tokens_written_in_a_text_are_read_as_such(smollm2: Tokenizer) -> None:
    assert smollm2.encode("<|im_start|>x<|im_end|>", False)[::2] == [1, 2]


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' tokenizer of the same file (8 s)."""
    from transformers import AutoTokenizer

    path = locate(SMOLLM2)
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_equals_transformers(smollm2: Tokenizer, reference: Any, text: str) -> None:
    ids = smollm2.encode(text, True)
    assert ids == reference(text).input_ids
    assert smollm2.decode(ids, True) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
def test_smollm2_equals_transformers_with_the_right_split_on_any_text(smollm2: Tokenizer, reference: Any) -> None:
    """Same vocabulary, merges and special tokens, loaded by other code; only the split that it does not know is put right."""
    other = Backend.from_str(reference.backend_tokenizer.to_str())
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    part = st.one_of(st.text(max_size=8), st.sampled_from([" ", "\n\n", "1", "42", "'s", "the", "<|im_end|>", "\t", "é", "😀"]))

    @settings(max_examples=1000, deadline=None)
    @given(st.lists(part, max_size=12).map("".join))
    def check(text: str) -> None:
        assert smollm2.encode(text, True) == other.encode(text).ids

    check()


@pytest.mark.slow
def test_smollm2_chat_prompt_equals_transformers(smollm2: Tokenizer, reference: Any) -> None:
    messages = [ChatMessage("user", "What is 2 + 2?"), ChatMessage("assistant", "4"), ChatMessage("user", "Sure?")]
    assert smollm2.chat_template is not None
    text = smollm2.chat_template.render(Conversation(tuple(messages)), 10_000)
    plain = [{"role": message.role, "content": message.content} for message in messages]
    assert text == reference.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)


def write_directory(directory: Path, backend: Backend, **files: Any) -> Path:
    """A Hugging Face directory; `a_json={...}` becomes a.json, `a_jinja="..."` a.jinja."""
    backend.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / ".".join(name.rsplit("_", 1))).write_text(text)
    return directory


def test_a_directory_with_everything(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": "old"}
    directory = write_directory(
        tmp_path,
        byte_fallback_backend(),
        tokenizer_config_json=config,
        chat_template_jinja="{{ bos_token }}{{ messages[0].content }}",
        generation_config_json={"eos_token_id": [2, 9]},
        config_json={"eos_token_id": 7},
    )
    tokenizer = load_tokenizer(directory)
    assert tokenizer.special.texts == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.special.bos_id, tokenizer.special.eos_ids) == (1, (2, 9))
    assert tokenizer.chat_template is not None
    assert tokenizer.chat_template.render(Conversation((ChatMessage("user", "a"),)), 100) == "<s>a"
    assert tokenizer.digest == tokenizer_json_digest((tmp_path / "tokenizer.json").read_bytes())
    a = tokenizer.encode("", False)
    assert a == [] and tokenizer.encode("", True) == [1]
    assert tokenizer.decode(tokenizer.encode("a b é😀", True), True) == "a b é😀"


def test_a_directory_with_only_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_directory(tmp_path, byte_level_backend()))
    assert tokenizer.chat_template is None
    assert (tokenizer.special.bos_id, tokenizer.special.eos_ids) == (None, ())
    assert tokenizer.encode("é", True) == tokenizer.encode("é", False)


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"config_json": {"eos_token_id": 7}, "generation_config_json": {}}, (7,)),
        ({"tokenizer_config_json": {"eos_token": "<end>"}}, (256,)),
        ({"tokenizer_config_json": {"eos_token": "<none>"}}, ()),
    ],
)
def test_where_the_end_of_sequence_ids_come_from(tmp_path: Path, files: dict[str, Any], eos_ids: tuple[int, ...]) -> None:
    assert load_tokenizer(write_directory(tmp_path, byte_level_backend(), **files)).special.eos_ids == eos_ids


def test_the_default_of_several_chat_templates_counts(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    tokenizer = load_tokenizer(write_directory(tmp_path, byte_level_backend(), tokenizer_config_json={"chat_template": named}))
    assert tokenizer.chat_template is not None and tokenizer.chat_template.render(Conversation(()), 10) == "yes"


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert len(load_tokenizer(write_directory(tmp_path, backend)).encode("four", True)) == 4


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    write_directory(tmp_path, byte_level_backend(), tokenizer_config_json="nonsense")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)
    write_directory(tmp_path, byte_level_backend(), tokenizer_config_json="[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json holds no JSON object"):
        load_tokenizer(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"nonsense")
    with pytest.raises(TokenizerError, match=r"x\.gguf"):
        load_tokenizer(tmp_path / "x.gguf")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()])])
def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path, decoder: Any) -> None:
    backend = byte_level_backend()
    backend.decoder = decoder
    with pytest.raises(TokenizerError, match="cannot be streamed"):
        load_tokenizer(write_directory(tmp_path, backend))
