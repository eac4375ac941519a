"""A journal together with its store, as a leader has them, for tests against real servers."""

import numpy as np

from services.scheduler.core.changes import Changes
from services.scheduler.core.journal import Journal
from services.scheduler.core.journal_call import Applied, Failed, JournalReply
from services.scheduler.core.record import Arrival, RequestDelta
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.store.port import EpochTaken, StoredJournal
from services.scheduler.store.redis_store import RedisStore
from tessera.values.config import Config
from tessera.values.identity import NO_EPOCH, Epoch
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

EPOCH = Epoch(1, b"\xff\x00" * 8)
LEASE_MS = 60_000


def request(number: int, prompt_len: int = 4) -> RequestDelta:
    request_id = number.to_bytes(16, "big")
    submission = Submission(request_id, np.arange(prompt_len, dtype=np.int32), SamplingParams(seed=1))
    return RequestDelta(
        request_id, SequenceStatus.WAITING, 0, 0, "", 0, (), 0, (), submission=submission, arrival=Arrival(1, number)
    )


class Leader:
    """A journal and its store; `drive` makes calls until there is nothing to do or one of them fails."""

    def __init__(self, url: str, timeout_s: float = 5.0, epoch: Epoch = EPOCH) -> None:
        self.epoch = epoch
        self.store = RedisStore(url, "group", timeout_s)
        self.journal = Journal(Config(), 1, 0)

    async def begin(self) -> None:
        assert await self.store.take_epoch(NO_EPOCH, EPOCH, LEASE_MS) == EpochTaken()
        assert await self.write(Changes((request(1),))) == Applied(1)

    async def write(self, changes: Changes) -> JournalReply | None:
        self.journal.add(changes, 0)
        return await self.drive()

    async def drive(self) -> JournalReply | None:
        reply: JournalReply | None = None
        while (call := self.journal.next_call(2**60)) is not None:
            reply = await self.store.call(self.epoch, call)
            self.journal.on_reply(reply, 0)
            if isinstance(reply, Failed):
                break
        return reply

    async def requests(self) -> set[int]:
        stored = await self.store.read(self.epoch)
        assert isinstance(stored, StoredJournal), stored
        return {int.from_bytes(request_id, "big") for request_id in stored.state.requests}
