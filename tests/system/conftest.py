"""One running system with the real model, shared by the tests that do not kill anything."""

from collections.abc import Iterator

import pytest
from near_ties import Judge
from process_stack import CALM, MODEL, Stack

from tessera.client import Client


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack"), CALM) as running:
        yield running


@pytest.fixture(scope="session")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.address) as opened:
        yield opened


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge(MODEL)
