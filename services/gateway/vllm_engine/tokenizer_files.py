"""The tokenizer's files as they go out: made once for each model that is served, since anybody who reaches the port may ask for them."""

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.served_model import ServedModel
from gateway.tokenizer_bundle import tokenizer_bundle
from tessera.values.model import ModelInfo

CHUNK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Bundle:
    """A zip, and its sha256 in hex."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[tuple[bytes, str]]:
        """Pieces of at most CHUNK_BYTES, and with the last one the digest."""
        for begin in range(0, len(self.data), CHUNK_BYTES):
            is_last = begin + CHUNK_BYTES >= len(self.data)
            yield self.data[begin : begin + CHUNK_BYTES], self.sha256 if is_last else ""


class TokenizerFiles:
    """Keeps the last bundle. Belongs to one event loop."""

    def __init__(self) -> None:
        self._kept: tuple[ModelInfo, Bundle] | None = None
        self._making = asyncio.Lock()

    async def of(self, model: ServedModel) -> Bundle:
        """Those of `model`; who asks while they are made waits."""
        async with self._making:
            if self._kept is None or self._kept[0] != model.info:
                data = await asyncio.to_thread(tokenizer_bundle, model)
                self._kept = model.info, Bundle(data, hashlib.sha256(data).hexdigest())
            return self._kept[1]
