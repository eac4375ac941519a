"""Tokenizers that the gateway's tests share: the real SmolLM2, and two small ones."""

import pytest
from small_tokenizers import ROLE_TEMPLATE, SMOLLM2, byte_fallback_backend, byte_level_backend, model_info

from gateway.chat_template import ChatTemplate
from gateway.served_model import ServedModel
from gateway.tokenizer import SpecialTokens, Tokenizer
from gateway.tokenizer_source import load_tokenizer
from tessera.values.known_models import locate


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer(locate(SMOLLM2))


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    return Tokenizer(byte_fallback_backend(), SpecialTokens({"bos_token": "<s>"}, 1, (2,)), None, "d1")


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    template = ChatTemplate(ROLE_TEMPLATE, {})
    return Tokenizer(byte_level_backend(), SpecialTokens({"eos_token": "<end>"}, None, (256,)), template, "d2")


@pytest.fixture(scope="session")
def byte_level_model(byte_level: Tokenizer) -> ServedModel:
    """`max_model_len` 64, no BOS."""
    return ServedModel(model_info(byte_level), byte_level)


@pytest.fixture(scope="session")
def byte_fallback_model(byte_fallback: Tokenizer) -> ServedModel:
    """`max_model_len` 64, BOS, no chat template."""
    return ServedModel(model_info(byte_fallback), byte_fallback)
