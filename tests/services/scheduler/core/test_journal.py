"""The journal's decisions, one by one; against a faulty store they are tested in tests/contract."""

import numpy as np
import pytest

from kv_manager.published_block import PublishedBlock
from services.scheduler.core.block_map import PAGE_BLOCKS, BlockPage
from services.scheduler.core.changes import Changes
from services.scheduler.core.folded_log import FOLD_CYCLE, KEY_CYCLE, RUN_LEN_MAX
from services.scheduler.core.journal import (
    BLOCKS_PER_RECORD_MAX,
    CHUNK_PAGES_MAX,
    RECORDS_PER_CALL_MAX,
    RETRY_US_MAX,
    RETRY_US_MIN,
    Journal,
    WorkerStep,
)
from services.scheduler.core.journal_call import (
    Append,
    Applied,
    BeginRewrite,
    EndRewrite,
    Failed,
    Gap,
    Generation,
    JournalCall,
    OlderEpoch,
    RewriteChunk,
)
from services.scheduler.core.record import Arrival, BlockDelta, DecodeColumns, RequestDelta
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason
from tessera.values.identity import Epoch
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16
WAIT_US = 200_000
NONE = np.zeros(0, np.int32)


def begin(request_id: bytes, is_new: bool = True, finish: Finish | None = None) -> RequestDelta:
    submission = Submission(request_id, np.arange(5, dtype=np.int32), SamplingParams(seed=1))
    status = SequenceStatus.FINISHED if finish else SequenceStatus.RUNNING
    return RequestDelta(
        request_id, status, 0, 1, "w", 0, (), 0, (), 0, finish, submission=submission if is_new else None, arrival=Arrival(1, 1)
    )


def decode(offset: int, *ids: bytes) -> Changes:
    rows = np.full(len(ids), offset, np.int32)
    return Changes(decoded=DecodeColumns(ids, rows, rows, NONE, NONE, NONE))


def opened(*first: RequestDelta, backlog_max: int = 100) -> Journal:
    """A journal whose first rewrite is written."""
    journal = Journal(Config(journal_wait_ms=200, journal_backlog_max=backlog_max), 3, 40)
    journal.add(Changes(first), 0)
    while (call := journal.next_call(0)) is not None:
        journal.on_reply(Applied(41), 0)
        assert not isinstance(call, Append)
    assert journal.acked == journal.last_record == 41
    return journal


def take(journal: Journal, now_us: int = 0) -> JournalCall:
    call = journal.next_call(now_us)
    assert call is not None
    return call


def take_append(journal: Journal, now_us: int = 0) -> Append:
    call = take(journal, now_us)
    assert isinstance(call, Append)
    return call


def test_nothing_is_written_before_the_first_record() -> None:
    """It would wipe what the new leader has read."""
    journal = Journal(Config(), 3, 40)
    assert journal.next_call(0) is None
    assert journal.wake_us(0) is None and journal.is_durable(10**12)


def test_a_term_begins_with_a_rewrite_as_of_its_first_records() -> None:
    journal = Journal(Config(), 3, 40)
    assert journal.add(Changes((begin(A),)), 0).number == 41
    assert journal.add(Changes((begin(B),)), 0).number == 42
    generation = Generation(3, 1)
    assert take(journal) == BeginRewrite(generation)
    assert journal.next_call(0) is None, "one call at a time"
    journal.on_reply(Applied(17), 0)
    assert journal.acked == 40
    journal.add(decode(0, A), 0)
    chunk = take(journal)
    assert isinstance(chunk, RewriteChunk)
    assert [(folded.request_id, folded.as_of) for folded in chunk.requests] == [(A, 42), (B, 42)]
    assert all(not folded.request.output_token_ids for folded in chunk.requests), "not frozen"
    journal.on_reply(Applied(17), 0)
    assert take(journal) == EndRewrite(generation, 42)
    journal.on_reply(Applied(42), 0)
    assert journal.acked == 42
    append = take_append(journal)
    assert (append.generation, append.first, append.last) == (generation, 43, 43)


def test_a_failed_rewrite_is_begun_again_under_a_new_generation_and_a_newer_record() -> None:
    journal = Journal(Config(), 3, 40)
    journal.add(Changes((begin(A),)), 0)
    for counter, record in ((1, 41), (2, 42)):
        assert take(journal, 10**6 * counter) == BeginRewrite(Generation(3, counter))
        journal.on_reply(Applied(0), 0)
        chunk = take(journal, 10**6 * counter)
        assert isinstance(chunk, RewriteChunk) and chunk.requests[0].as_of == record
        journal.add(Changes((begin(B),)), 0)
        journal.on_reply(Failed("no"), 10**6 * counter)
        assert journal.next_call(10**6 * counter) is None


def test_records_in_waiting_go_in_one_call() -> None:
    journal = opened(begin(A), begin(B))
    for offset in range(3):
        journal.add(decode(offset, A, B), 0)
    append = take_append(journal)
    assert (append.first, append.last, len(append.log)) == (42, 44, 3)
    for _ in range(RECORDS_PER_CALL_MAX + 5):
        journal.add(Changes(), 0)
    journal.on_reply(Applied(44), 0)
    append = take_append(journal)
    assert (append.first, append.last) == (45, 44 + RECORDS_PER_CALL_MAX)


def test_a_request_that_changes_is_written_whole_and_its_submission_once() -> None:
    journal = opened(begin(A))
    journal.add(decode(0, A), 0)
    journal.add(Changes((begin(B),)), 0)
    append = take_append(journal)
    assert [submission.request_id for submission in append.submissions] == [B]
    assert {folded.request_id for folded in append.requests} == {A, B}, "B is new, A's turn has come"
    journal.on_reply(Applied(43), 0)
    journal.add(Changes((begin(B, is_new=False),)), 0)
    append = take_append(journal)
    assert not append.submissions and {folded.request_id for folded in append.requests} >= {B}


def test_the_log_is_empty_when_everything_has_ended() -> None:
    journal = opened(begin(A), begin(B))
    for offset in range(3):
        journal.add(decode(offset, A, B), 0)
        append = take_append(journal)
        journal.on_reply(Applied(append.last), 0)
    journal.add(Changes((begin(A, False, Finish(FinishReason.EOS, 0)), begin(B, False, Finish(FinishReason.EOS, 0)))), 0)
    append = take_append(journal)
    assert append.log_from == append.last + 1
    journal.on_reply(Applied(append.last), 0)
    journal.add(Changes(forgotten=(A, B)), 0)
    append = take_append(journal)
    assert append.forgotten == (A, B) and not append.requests and append.log_from == append.last + 1


def test_the_log_stays_bounded_with_many_running_requests() -> None:
    ids = tuple(bytes([i // 256, i % 256]) * 8 for i in range(600))
    journal = opened(*map(begin, ids))
    for offset in range(2 * FOLD_CYCLE):
        journal.add(decode(offset, *ids), 0)
        append = take_append(journal)
        assert append.last - append.log_from < FOLD_CYCLE + RUN_LEN_MAX
        assert len(append.requests) <= -(-len(ids) * RUN_LEN_MAX // FOLD_CYCLE)
        journal.on_reply(Applied(append.last), 0)


def test_the_log_stays_bounded_when_the_running_requests_get_fewer() -> None:
    ids = tuple(bytes([i // 256, i % 256]) * 8 for i in range(512))
    journal = opened(*map(begin, ids))
    longest = 0
    for offset in range(3 * FOLD_CYCLE):
        journal.add(decode(offset, *ids[: max(3, 512 - 4 * offset)]), 0)
        append = take_append(journal)
        longest = max(longest, append.last - append.log_from + 1)
        journal.on_reply(Applied(append.last), 0)
    assert longest <= 3 * FOLD_CYCLE


def test_a_gap_makes_it_owe_a_rewrite() -> None:
    journal = opened(begin(A))
    journal.add(decode(0, A), 0)
    take(journal)
    journal.on_reply(Gap(41), 0)
    assert journal.is_durable(0), "nothing acknowledged was lost"
    assert take(journal) == BeginRewrite(Generation(3, 2))


def test_an_acknowledgement_of_less_than_was_sent_is_a_gap() -> None:
    journal = opened(begin(A))
    journal.add(decode(0, A), 0)
    take(journal)
    journal.on_reply(Applied(41), 0)
    assert journal.acked == 41 and isinstance(take(journal), BeginRewrite)


def test_a_failed_append_is_not_made_again_after_a_rewrite() -> None:
    journal = opened(begin(A), backlog_max=2)
    journal.add(decode(0, A), 0)
    take(journal)
    journal.on_reply(Failed("no"), 0)
    for offset in range(1, 4):
        journal.add(decode(offset, A), 0)
    now_us = RETRY_US_MAX
    while (call := journal.next_call(now_us)) is not None:
        assert not isinstance(call, Append)
        journal.on_reply(Applied(45), now_us)
    assert journal.acked == journal.last_record == 45


def test_a_store_that_lost_acknowledged_records_is_not_durable_until_rewritten() -> None:
    journal = opened(begin(A))
    journal.add(decode(0, A), 0)
    take(journal)
    journal.on_reply(Gap(12), 0)
    assert not journal.is_durable(0)
    while (call := journal.next_call(0)) is not None:
        journal.on_reply(Applied(42), 0)
    assert call is None and journal.is_durable(0) and journal.acked == 42


def test_failures_are_retried_with_growing_pauses() -> None:
    journal = opened(begin(A))
    journal.add(decode(0, A), 0)
    take(journal)
    now_us, pauses = 0, []
    for _ in range(10):
        journal.on_reply(Failed("no"), now_us)
        retry_us: int | None = now_us
        while retry_us is not None and journal.next_call(retry_us) is None:
            retry_us = journal.wake_us(retry_us)
        assert retry_us is not None
        pauses.append(retry_us - now_us)
        now_us = retry_us
    assert pauses[0] >= RETRY_US_MIN and pauses == sorted(pauses) and pauses[-1] == RETRY_US_MAX
    journal.on_reply(Applied(42), now_us)
    journal.add(decode(1, A), now_us)
    take(journal, now_us)
    journal.on_reply(Failed("no"), now_us)
    assert journal.next_call(now_us + RETRY_US_MIN) is not None, "the pause did not start small again"


def test_it_is_durable_while_acknowledgements_come_in_time() -> None:
    journal = opened(begin(A))
    journal.add(decode(0, A), 1000)
    assert journal.wake_us(1000) == 1000 + WAIT_US
    assert journal.is_durable(1000 + WAIT_US - 1)
    assert not journal.is_durable(1000 + WAIT_US)
    take(journal, 1000)
    journal.on_reply(Applied(42), 1000 + 2 * WAIT_US)
    assert journal.is_durable(1000 + 2 * WAIT_US)


def test_more_records_than_may_wait_are_given_up_for_a_rewrite() -> None:
    journal = opened(begin(A), backlog_max=3)
    for offset in range(4):
        journal.add(decode(offset, A), 1000 * offset)
    assert journal.backlog_len == 0
    assert not journal.is_durable(WAIT_US), "the oldest record still counts"
    for offset in range(4, 10_000):
        journal.add(decode(offset, A), WAIT_US)
    assert journal.backlog_len == 0 and len(journal._unacknowledged) == 1, "memory grows while the store is away"
    assert take(journal) == BeginRewrite(Generation(3, 2))
    journal.on_reply(Applied(41), 0)
    chunk = take(journal)
    assert isinstance(chunk, RewriteChunk) and len(chunk.requests[0].request.output_token_ids) == 10_000


def test_too_many_records_during_a_rewrite_begin_it_again() -> None:
    journal = Journal(Config(journal_backlog_max=3), 3, 40)
    journal.add(Changes((begin(A),)), 0)
    take(journal)
    for offset in range(4):
        journal.add(decode(offset, A), 0)
    journal.on_reply(Applied(0), 0)
    assert take(journal) == BeginRewrite(Generation(3, 2))


def test_an_older_epoch_ends_it() -> None:
    journal = opened(begin(A))
    journal.add(decode(0, A), 0)
    take(journal)
    epoch = Epoch(4, b"x" * 16)
    journal.on_reply(OlderEpoch(epoch), 0)
    assert journal.superseded == epoch
    assert journal.next_call(10**12) is None and not journal.is_durable(10**12)


def test_steps_are_durable_with_the_record_that_holds_their_output() -> None:
    journal = opened(begin(A))
    boot, other = b"1" * 16, b"2" * 16
    journal.add(decode(0, A), 0, WorkerStep("w", boot, 7))
    call = take_append(journal)
    journal.add(decode(1, A), 0, WorkerStep("w", boot, 8))
    assert journal.durable_step("w", boot) == 0
    journal.on_reply(Applied(call.last), 0)
    assert (journal.durable_step("w", boot), journal.durable_step("w", other), journal.durable_step("v", boot)) == (7, 0, 0)


def test_steps_are_durable_after_a_rewrite_that_took_their_records_in() -> None:
    journal = opened(begin(A), backlog_max=1)
    for offset in range(5):
        journal.add(decode(offset, A), 0, WorkerStep("w", b"1" * 16, offset + 1))
    while (call := journal.next_call(0)) is not None:
        journal.on_reply(Applied(46), 0)
    assert call is None and journal.durable_step("w", b"1" * 16) == 5


def test_of_each_worker_only_the_last_boot_is_remembered() -> None:
    journal = opened(begin(A))
    for number in range(1000):
        boot = number.to_bytes(16, "big")
        journal.add(decode(number, A), 0, WorkerStep("w", boot, 5))
        journal.on_reply(Applied(take_append(journal).last), 0)
        assert journal.durable_step("w", boot) == 5
    assert journal.durable_step("w", (998).to_bytes(16, "big")) == 0
    assert len(journal._durable_steps) == 1, "memory grows with every restart of a worker"


def test_of_a_removed_worker_nothing_is_remembered() -> None:
    journal = opened(begin(A))
    for number in range(1000):
        worker, boot = f"w{number}", number.to_bytes(16, "big")
        block = PublishedBlock(1, number, None, (1, 2), 3)
        journal.add(Changes(blocks=(BlockDelta(worker, boot, (block,), ()),)), 0, WorkerStep(worker, boot, 5))
        journal.add(decode(2 * number, A), 0, WorkerStep(worker, boot, 6))
        journal.on_reply(Applied(take_append(journal).last), 0)
        journal.add(decode(2 * number + 1, A), 0, WorkerStep(worker, boot, 7))
        journal.add(Changes(removed_workers=(worker,)), 0)
        while (call := journal.next_call(0)) is not None:
            assert not (isinstance(call, RewriteChunk) and call.pages), "its blocks are written again"
            journal.on_reply(Applied(journal.last_record), 0)
        assert journal.durable_step(worker, boot) == 0
    assert not journal._durable_steps and not journal._boots and not journal._folder.state().blocks


def test_the_end_of_a_worker_without_blocks_costs_no_rewrite() -> None:
    journal = opened(begin(A))
    journal.add(Changes(removed_workers=("w",)), 0)
    assert isinstance(take(journal), Append)


def test_a_removed_worker_may_come_back() -> None:
    journal = opened(begin(A))
    block, boot = PublishedBlock(1, 2, None, (1, 2), 3), b"1" * 16
    journal.add(Changes(blocks=(BlockDelta("w", boot, (block,), ()),)), 0)
    journal.add(Changes(removed_workers=("w",), blocks=(BlockDelta("w", boot, (), ()),)), 0)
    journal.add(Changes(blocks=(BlockDelta("w", boot, (block,), ()),)), 0)
    while (call := journal.next_call(0)) is not None:
        journal.on_reply(Applied(journal.last_record), 0)
    assert call is None and journal._folder.state().blocks == {("w", boot): {1: block}}


@pytest.mark.parametrize("is_known", [False, True])
def test_a_new_boot_of_a_worker_makes_it_owe_a_rewrite(is_known: bool) -> None:
    """Dropping the old boot's entries one by one would be unbounded."""
    journal = opened(begin(A))
    block = PublishedBlock(1, 2, None, (1, 2), 3)
    if is_known:
        journal.add(Changes(blocks=(BlockDelta("w", b"1" * 16, (block,), ()),)), 0)
        journal.on_reply(Applied(take_append(journal).last), 0)
    journal.add(Changes(blocks=(BlockDelta("w", b"2" * 16, (block,), ()),)), 0)
    assert isinstance(take(journal), BeginRewrite if is_known else Append)


def test_a_whole_cache_is_told_by_a_rewrite() -> None:
    """One record of that size would hold up the store, and every record behind it."""
    journal = opened(begin(A))
    few = tuple(PublishedBlock(i, i, None, (1, 2), 3) for i in range(BLOCKS_PER_RECORD_MAX))
    many = (*few, PublishedBlock(len(few), 5, None, (1, 2), 3))
    journal.add(Changes(blocks=(BlockDelta("w", b"1" * 16, few, ()),)), 0)
    journal.on_reply(Applied(take_append(journal).last), 0)
    journal.add(Changes(blocks=(BlockDelta("v", b"2" * 16, many, ()),)), 0)
    assert isinstance(take(journal), BeginRewrite)
    journal.on_reply(Applied(0), 0)
    largest = 0
    while (call := journal.next_call(0)) is not None:
        if isinstance(call, RewriteChunk):
            largest = max(largest, len(call.pages))
        journal.on_reply(Applied(journal.last_record), 0)
    assert call is None and largest == CHUNK_PAGES_MAX


def test_changed_pages_are_written_whole_once_per_cycle() -> None:
    journal = opened(begin(A))
    boot = b"1" * 16
    written: list[BlockPage] = []
    for offset in range(2 * FOLD_CYCLE):
        block = PublishedBlock(offset % (4 * PAGE_BLOCKS), offset, None, (1, 2), offset)
        changes = decode(offset, A)
        journal.add(Changes(blocks=(BlockDelta("w", boot, (block,), ()),), decoded=changes.decoded), 0)
        append = take_append(journal)
        journal.on_reply(Applied(append.last), 0)
        assert append.log[0].blocks[0].published == (block,)
        assert append.last - append.log_from < FOLD_CYCLE + RUN_LEN_MAX + KEY_CYCLE
        written += append.pages
    assert 4 <= len(written) <= 12
    for page in written:
        steps = [entry.published_step for entry in page.entries]
        assert max(steps, default=0) <= page.as_of - 42 and all(
            entry.block_id // PAGE_BLOCKS == page.index for entry in page.entries
        )


def test_a_page_without_entries_is_written_as_such() -> None:
    """The log may still tell of the entries that it had."""
    journal = opened(begin(A))
    block, boot = PublishedBlock(1, 2, None, (1, 2), 3), b"1" * 16
    journal.add(Changes(blocks=(BlockDelta("w", boot, (block,), ()),)), 0)
    journal.on_reply(Applied(take_append(journal).last), 0)
    journal.add(Changes(blocks=(BlockDelta("w", boot, (), (1,)),), forgotten=(A,)), 0)
    (page,) = take_append(journal).pages
    assert (page.index, page.as_of, len(page.entries)) == (0, 43, 0)


def test_when_nobody_runs_no_log_is_left() -> None:
    journal = opened(begin(A))
    block = PublishedBlock(1, 2, None, (1, 2), 3)
    for offset in range(5):
        changes = decode(offset, A)
        journal.add(Changes(blocks=(BlockDelta("w", b"1" * 16, (block,), ()),), decoded=changes.decoded), 0)
        journal.on_reply(Applied(take_append(journal).last), 0)
    journal.add(Changes(forgotten=(A,)), 0)
    append = take_append(journal)
    assert append.log_from == append.last + 1 and [page.index for page in append.pages] == [0]


def test_steady_columns_name_their_requests_once_in_a_while() -> None:
    journal = opened(begin(A), begin(B))
    keys = []
    for offset in range(3 * KEY_CYCLE):
        journal.add(decode(offset, A, B), 0)
        append = take_append(journal)
        journal.on_reply(Applied(append.last), 0)
        keys += [append.last] * append.log[0].is_key
        assert any(key <= append.log_from for key in keys), "what follows in the log cannot be read"
    assert keys == [42, *(number for number in range(43, 42 + 3 * KEY_CYCLE) if number % KEY_CYCLE == 0)]


@pytest.mark.parametrize(
    ("between", "then"),
    [
        ((), decode(1, A)),
        ((), decode(2, A, B)),
        ((), decode(1, B, A)),
        ((Changes((begin(C),)),), decode(1, A, B)),
        ((Changes(forgotten=(C,)),), decode(1, A, B)),
    ],
    ids=["other requests", "another offset", "another order", "a request changed between", "one was forgotten between"],
)
def test_columns_that_do_not_just_follow_are_a_key(between: tuple[Changes, ...], then: Changes) -> None:
    journal = opened(begin(A), begin(B), begin(C))
    for changes in (decode(0, A, B), *between, then):
        journal.add(changes, 0)
    log = take_append(journal).log
    assert [entry.is_key for entry in log if entry.decoded is not None] == [True, True]


def test_columns_after_a_rewrite_are_a_key() -> None:
    journal = opened(begin(A))
    journal.add(decode(0, A), 0)
    assert take_append(journal).log[0].is_key
    journal.on_reply(Gap(0), 0)
    journal.add(decode(1, A), 0)
    while not isinstance(take(journal), EndRewrite):
        journal.on_reply(Applied(0), 0)
    journal.on_reply(Applied(43), 0)
    journal.add(decode(2, A), 0)
    assert take_append(journal).log[0].is_key
