"""Loads a model's tokenizer from where the model lies: a Hugging Face directory or a GGUF file.

Of a directory these are read: tokenizer.json (needed), tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from gateway.chat_template import ChatTemplate
from gateway.errors import TokenizerError
from gateway.gguf_tokenizer import build_tokenizer
from gateway.tokenizer import SpecialTokens, Tokenizer
from tessera.values.gguf_header import GGUFFormatError, read_gguf_header
from tessera.values.tokenizer_digest import gguf_tokenizer_digest, tokenizer_json_digest

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the model at `path`, a directory or a `.gguf` file (see `known_models.locate`).

    Raises TokenizerError naming the file and what is wrong with it.
    """
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    try:
        metadata = read_gguf_header(path).metadata
    except (GGUFFormatError, OSError) as error:
        raise TokenizerError(f"the tokenizer cannot be read from {path}: {error}") from error
    backend = build_tokenizer(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIAL_KEYS.items()}
    texts = {name: tokens[i] for name, i in ids.items() if i is not None}
    eos_ids = dict.fromkeys(i for i in (ids["eos_token"], metadata.get("tokenizer.ggml.eot_token_id")) if i is not None)
    digest = gguf_tokenizer_digest(
        tokens,
        metadata["tokenizer.ggml.merges"],
        metadata.get("tokenizer.ggml.token_type", []),
        metadata["tokenizer.ggml.pre"],
    )
    special = SpecialTokens(texts, ids["bos_token"], tuple(eos_ids))
    return Tokenizer(backend, special, _chat_template(metadata.get("tokenizer.chat_template"), texts), digest)


def _from_directory(directory: Path) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(f"{directory} has no tokenizer.json; save one with transformers' `save_pretrained`")
    raw = file.read_bytes()
    try:
        backend = Backend.from_buffer(raw)
    except Exception as error:  # the library raises bare Exception
        raise TokenizerError(f"{file} cannot be read: {error}") from error
    config = _read_json(directory / "tokenizer_config.json")
    texts = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
    bos_text = texts.get("bos_token")
    special = SpecialTokens(
        texts, backend.token_to_id(bos_text) if bos_text is not None else None, _eos_ids(directory, backend, texts)
    )
    return Tokenizer(backend, special, _chat_template(_template_source(directory, config), texts), tokenizer_json_digest(raw))


def _eos_ids(directory: Path, backend: Backend, texts: dict[str, str]) -> tuple[int, ...]:
    """From generation_config.json, else config.json (one id or a list), else the tokenizer's eos_token."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    eos_id = backend.token_to_id(texts["eos_token"]) if "eos_token" in texts else None
    return () if eos_id is None else (eos_id,)


def _template_source(directory: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins; tokenizer_config.json has one text, or a list of named ones of which `default` counts."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        return {item["name"]: item["template"] for item in source}.get("default")
    return source


def _chat_template(source: str | None, special_texts: dict[str, str]) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, special_texts)


def _token_text(value: str | dict[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty where the file is absent."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds no JSON object")
    return value
