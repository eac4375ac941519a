"""The blocking client with the shape of the other one, so that one suite drives both."""

import asyncio

from tessera.client import Client


class BlockingClient:
    """Every call in a thread."""

    def __init__(self, addresses, **options):
        self._client = Client(addresses, **options)

    async def __aenter__(self):
        self._client.__enter__()
        return self

    async def __aexit__(self, *error):
        await asyncio.to_thread(self._client.__exit__, *error)

    async def stream(self, prompt, **options):
        pieces = self._client.stream(prompt, **options)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            pieces.close()

    def __getattr__(self, name):
        method = getattr(self._client, name)
        return lambda *args, **kwargs: asyncio.to_thread(method, *args, **kwargs)
