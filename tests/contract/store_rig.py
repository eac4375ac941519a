"""A store together with what the world may do to it, in the same words for every adapter."""

from typing import Protocol

from services.scheduler.store.memory import MemoryStore
from services.scheduler.store.port import LeaseView, Store
from services.scheduler.store.redis_store import RedisStore
from tessera.values.identity import NO_EPOCH


class StoreRig(Protocol):
    """What a contract test does behind the store's back."""

    @property
    def store(self) -> Store:
        """The store under test."""

    async def set_full(self, is_full: bool) -> None:
        """Let the store run out of memory, or not any more."""

    async def empty(self) -> None:
        """Lose everything."""

    async def set_format(self, number: str) -> None:
        """Let what is stored be of another format."""

    async def contents(self) -> object:
        """Everything that is kept, lease included, to compare with later."""


class MemoryRig:
    """`StoreRig` over a `MemoryStore`."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    async def set_full(self, is_full: bool) -> None:
        """See `StoreRig`."""
        self.store.is_full = is_full

    async def empty(self) -> None:
        """See `StoreRig`."""
        self.store.epoch = NO_EPOCH
        self.store._held_until_ms = 0
        self.store._complete = self.store._begun = None

    async def set_format(self, number: str) -> None:
        """See `StoreRig`."""
        self.store.format = number

    async def contents(self) -> object:
        """See `StoreRig`."""
        return self.store.epoch, self.store._held_until_ms, self.store._complete, self.store._begun


class RedisRig:
    """`StoreRig` over a `RedisStore`, whose group nobody else uses. Fullness is that of the whole server."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store

    async def set_full(self, is_full: bool) -> None:
        """See `StoreRig`."""
        await self.store._journal.command("CONFIG", "SET", "maxmemory", 1 if is_full else 0)

    async def empty(self) -> None:
        """See `StoreRig`."""
        if keys := await self._keys():
            await self.store._journal.command("DEL", *keys)

    async def set_format(self, number: str) -> None:
        """See `StoreRig`."""
        await self.store._journal.command("HSET", self.store._lease.keys[0], "format", number)

    async def contents(self) -> object:
        """See `StoreRig`."""
        keys = await self._keys()
        return {key: await self.store._journal.command("DUMP", key) for key in keys}

    async def _keys(self) -> list[bytes]:
        pattern = self.store._lease.keys[0][: -len(b"meta")] + b"*"
        return sorted(await self.store._journal.command("KEYS", pattern))


async def view_of(store: Store) -> LeaseView:
    """What `look` says of a store that can be looked at."""
    view = await store.look()
    assert isinstance(view, LeaseView), view
    return view
