"""The parts of a gateway under test: the real SmolLM2 tokenizer, and a house to run it in."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from gateway_house import MAX_MODEL_LEN, MODEL, House, ScriptedScheduler

from gateway.tokenizer import Tokenizer
from gateway.tokenizer_source import load_tokenizer
from services.gateway.config import GatewayConfig
from services.gateway.main import serving
from services.rpc.channel import open_channel
from tessera.values.known_models import locate
from tessera.values.model import ModelInfo


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate(MODEL))


@pytest.fixture(scope="session")
def model_info(tokenizer: Tokenizer) -> ModelInfo:
    return ModelInfo(MODEL, "LlamaForCausalLM", tokenizer.vocab_size, MAX_MODEL_LEN, (2, 0), 1, tokenizer.digest, "w" * 64)


BuildHouse = Callable[..., AbstractAsyncContextManager[House]]


@pytest.fixture
def house(model_info: ModelInfo, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> BuildHouse:
    """`async with house(scheduler_wait_ms=...) as h:` `more` are addresses of other schedulers. Heartbeats are slow unless asked for, so nothing depends on the machine's pace."""
    monkeypatch.setattr("services.gateway.main.load_tokenizer", lambda path: tokenizer)  # once is enough

    @asynccontextmanager
    async def build(model: ModelInfo = model_info, more: tuple[str, ...] = (), **options: Any) -> AsyncIterator[House]:
        settings: dict[str, Any] = {"listen": "127.0.0.1:0", "heartbeat_ms": 20_000, "drain_grace_s": 0.0}
        async with ScriptedScheduler(model) as scheduler, AsyncExitStack() as clients:
            config = GatewayConfig(**{"scheduler": (scheduler.address, *more), "model": MODEL, **settings, **options})
            async with serving(config) as gateway:
                channel = await clients.enter_async_context(open_channel(gateway.address))  # clients outlive their gateway
                yield House(scheduler, gateway, channel)

    return build
