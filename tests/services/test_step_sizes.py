"""What one step of many decodes costs beside the forward pass: messages, bytes and journal calls, which do not depend on the machine."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from services.scheduler import convert as session_convert
from services.scheduler.core.journal_call import Append, JournalCall
from services.scheduler.store.redis_store import _encode
from services.worker import convert
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.identity import REQUEST_ID_BYTES
from tessera.values.session import Frame
from tests.benchmarks.control.desk import EPOCH, decoding

ROWS, STEPS = 256, 48
FIXED_BYTES = 96
"""Of a message beside its columns."""

BATCH_ROW_BYTES = 4 * 4  # slot, positions, context length, count of new blocks
BLOCK_BYTES = 4
OUTPUT_ROW_BYTES = 2 * 4  # count, token id
FRAME_ROW_BYTES_MAX = 24  # request id 16, the rest as varints
JOURNAL_TOKEN_BYTES = 4
JOURNAL_BLOCK_BYTES_MAX = 112  # a block's 16 ids, its digest, and the one that follows it in the table


@dataclass
class Watched:
    """What a desk sent and wrote in some steps."""

    batches: list[ScheduledBatch] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    calls: list[JournalCall] = field(default_factory=list)


@pytest.fixture(scope="module")
def watched() -> Watched:
    desk, seen = decoding(ROWS, 64, ROWS * 16), Watched()
    ask = desk.leader.next_journal_call

    def asked() -> JournalCall | None:
        call = ask()
        if call is not None:
            seen.calls.append(call)
        return call

    desk.leader.next_journal_call = asked  # type: ignore[method-assign]
    for _ in range(STEPS):
        before = len(desk._batches)
        frame = desk.step()
        assert len(frame) == ROWS and len(desk._batches) == before, "one batch for each output"
        seen.batches.append(desk._batches[-1])
        seen.frames.append(session_convert.response_to_proto(EPOCH, Frame(frame)).ByteSize())
    return seen


def test_a_batch_of_decodes_is_its_columns(watched: Watched) -> None:
    for batch in watched.batches:
        columns = BATCH_ROW_BYTES * ROWS + BLOCK_BYTES * len(batch.new_block_ids)
        assert columns <= convert.batch_to_proto(batch).ByteSize() <= columns + FIXED_BYTES


def test_an_output_is_its_columns(watched: Watched) -> None:
    batch, ones = watched.batches[-1], np.ones(ROWS, np.int32)
    message = convert.output_to_proto(ScheduledBatchOutput(batch.epoch, batch.nonce, batch.step_id, ones, 49_000 * ones))
    assert OUTPUT_ROW_BYTES * ROWS <= message.ByteSize() <= OUTPUT_ROW_BYTES * ROWS + FIXED_BYTES


def test_a_frame_is_columns_for_all_requests(watched: Watched) -> None:
    assert max(watched.frames) <= FRAME_ROW_BYTES_MAX * ROWS + FIXED_BYTES


def test_a_step_is_one_journal_call_of_a_few_bytes_a_token(watched: Watched) -> None:
    assert len(watched.calls) == STEPS and all(isinstance(call, Append) for call in watched.calls)
    most = JOURNAL_TOKEN_BYTES * ROWS + JOURNAL_BLOCK_BYTES_MAX * ROWS // 16 + FIXED_BYTES  # every sixteenth fills a block
    sizes = sorted(map(_bytes_of, watched.calls))
    assert sizes[len(sizes) * 3 // 4] <= most
    assert sizes[-1] <= most + ROWS * (REQUEST_ID_BYTES + 4), "a key names the requests again"


def _bytes_of(call: JournalCall) -> int:
    return sum(len(argument) if isinstance(argument, bytes) else 8 for argument in _encode(call)[1])
