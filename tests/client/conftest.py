"""Both clients, one after the other."""

import pytest
from blocking_client import BlockingClient

from tessera.client import AsyncClient


@pytest.fixture(params=[AsyncClient, BlockingClient], ids=["async", "sync"])
def client_kind(request):
    return request.param
