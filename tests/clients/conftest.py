"""One system with smg in front, and the clients that people use."""

import importlib.util
from collections.abc import Iterator

import anthropic
import openai
import pytest
from smg_front import SmgFront

from tessera.client import Client


@pytest.fixture(scope="session")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmgFront]:
    if importlib.util.find_spec("smg") is None:
        pytest.skip("smg has no wheel for this kind of machine")
    with SmgFront(tmp_path_factory.mktemp("front")) as running:
        yield running


@pytest.fixture(scope="session")
def own(front: SmgFront) -> Iterator[Client]:
    """Our own client at the public port: what it gets, the others have to get too."""
    with Client(front.stack.address) as opened:
        yield opened


@pytest.fixture(scope="session")
def openai_client(front: SmgFront) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="session")
def anthropic_client(front: SmgFront) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as opened:
        yield opened
