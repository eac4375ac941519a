"""Steps of several tokens: room for drafts, upper bounds, and what is kept of a row. No token depends on it."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from fake_worker import LIMITS, FakeWorker, reference_output
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_rig import WORKER, Rig, submission

from services.scheduler.core.errors import BadOutput
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.batch import ScheduledBatch, ScheduledBatchOutput
from tessera.values.config import Config, ConfigError
from tessera.values.finish import FinishReason
from tessera.values.model import WorkerLimits
from tessera.values.sampling import SamplingParams


def numbers(count: int, first: int = 10) -> list[int]:
    return list(range(first, first + count))


def rig_of(k: int, num_blocks: int = 16, block_size: int = 4, right: int | None = None, **config: object) -> Rig:
    """A worker that makes as many drafts as there is room for; the first `right` of them are right, None: all."""
    worker = FakeWorker(num_blocks, block_size, replace(LIMITS, num_speculative_tokens=k))
    worker.propose = lambda room: (room, room if right is None else min(right, room))
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_speculative_tokens": k, **config}
    return Rig(Config(**settings), worker)


def issue(rig: Rig) -> ScheduledBatch:
    batch = rig.schedule()
    assert batch is not None
    return batch


def published(rig: Rig) -> list[tuple[int, ...]]:
    """Ids of the blocks in the prefix index."""
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None
    return sorted(tuple(entry.token_ids) for entry in replica.manager.published())


def outputs_with_two_in_flight(rig: Rig) -> Iterator[ScheduledBatchOutput]:
    """What the worker gives until all is done, to be posted before the next is asked for."""
    for _ in range(60):
        while len(rig.worker.queue) < 2 and rig.schedule() is not None:
            pass
        if not rig.worker.queue:
            return
        yield rig.execute()
    raise AssertionError("not done after 60 steps")


def output_of(number: int, prompt: list[int], **sampling: object) -> list[int]:
    """What a request gives that runs alone, without speculation."""
    rig = Rig()
    rig.submit(number, prompt, **sampling)
    rig.finish_all()
    return rig.output(number)


# -- room: blocks, budget, the end of a request


@pytest.mark.parametrize(("block_size", "k", "num_new"), [(4, 3, 1), (4, 5, 2), (1, 3, 3), (16, 8, 0), (16, 9, 1)])
def test_a_row_grows_its_table_by_one_block_for_each_that_its_positions_reach_into(
    block_size: int, k: int, num_new: int
) -> None:
    """Case 39: T=8, positions 7 to 7 + k; position 7 has its block since the admission."""
    rig = rig_of(k, 64 // block_size, block_size)
    rig.submit(1, numbers(7), max_tokens=30)
    rig.step()
    assert rig.sequence(1).ledger.num_tokens == 8
    batch = issue(rig)
    assert (batch.num_scheduled_tokens[0], batch.context_lens[0]) == (1 + k, 8 + k)
    assert batch.new_block_counts[0] == num_new
    rig.finish_all()
    rig.assert_as_alone(1)


def test_with_one_free_block_a_row_has_fewer_drafts() -> None:
    """Case 39: T=8, k=5, one free block: positions 7 to 11, and nobody is preempted."""
    rig = rig_of(5, num_blocks=3)
    rig.submit(1, numbers(7), max_tokens=30)
    rig.step()
    batch = issue(rig)
    assert (batch.num_scheduled_tokens[0], batch.new_block_counts[0]) == (5, 1)
    rig.finish_all()
    rig.assert_as_alone(1)
    assert rig.scheduler.load().num_preemptions == 0


def test_drafts_take_no_block_that_a_neighbour_s_next_token_may_need() -> None:
    rig = rig_of(3, num_blocks=5)
    rig.submit(1, numbers(7), max_tokens=20)
    rig.submit(2, numbers(7, 30), max_tokens=20)
    rig.step()
    assert rig.free_blocks == 1
    batch = issue(rig)
    assert batch.num_scheduled_tokens.tolist() == [1, 1], "drafts have room within the blocks held"
    rig.finish_all()
    rig.assert_as_alone(1, 2)


def test_a_row_waits_for_drafts_in_flight_rather_than_preempt_a_neighbour() -> None:
    """Both tables end at the upper bound of what is in flight. The drafts are rejected, so there is room for the next token after all."""
    rig = rig_of(1, num_blocks=4, right=0)
    rig.submit(1, numbers(6), max_tokens=20)
    rig.submit(2, numbers(6, 30), max_tokens=20)
    rig.step()
    first = issue(rig)
    assert first.num_scheduled_tokens.tolist() == [2, 2] and rig.free_blocks == 0
    assert rig.schedule() is None
    rig.post(rig.execute())
    assert issue(rig).num_scheduled_tokens.tolist() == [1, 1]
    assert rig.scheduler.load().num_preemptions == 0
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1, 2)


def test_a_row_never_reaches_beyond_the_last_token_that_a_request_can_have() -> None:
    """Case 41: max_tokens 2, k=3: after the first token there is room for one more, and for no draft; 2 ids, one end."""
    for in_flight in (1, 2):
        rig = rig_of(3)
        rig.submit(1, numbers(7), max_tokens=2)
        rig.finish_all(in_flight)
        assert (len(rig.output(1)), rig.reason(1)) == (2, FinishReason.MAX_TOKENS)
        assert [batch.num_scheduled_tokens.tolist() for batch in rig.batches if batch.num_decodes] == [[1]]
        rig.assert_as_alone(1)


def test_a_batch_never_exceeds_the_budget_and_every_decode_has_its_drafts() -> None:
    rig = rig_of(3, num_blocks=64, max_num_batched_tokens=16)
    for number in range(1, 5):
        rig.submit(number, numbers(9, 10 * number), max_tokens=12)
    rig.finish_all(in_flight=2)
    assert max(batch.total_tokens for batch in rig.batches) <= 16
    assert any(batch.num_scheduled_tokens.tolist() == [4, 4, 4, 4] for batch in rig.batches)
    for number in range(1, 5):
        rig.assert_as_alone(number)


def test_a_budget_too_small_for_all_decodes_with_their_drafts_is_refused() -> None:
    assert Config(max_num_seqs=4, max_num_batched_tokens=16, num_speculative_tokens=3).num_speculative_tokens == 3
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        Config(max_num_seqs=4, max_num_batched_tokens=15, num_speculative_tokens=3)


def test_a_worker_with_a_smaller_budget_runs_fewer_sequences() -> None:
    limits = WorkerLimits(8, 10, num_speculative_tokens=3)
    rig = Rig(Config(max_num_seqs=4, max_num_batched_tokens=16, num_speculative_tokens=3), FakeWorker(64, 4, limits))
    for number in range(1, 5):
        rig.submit(number, numbers(3, 10 * number), max_tokens=9)
    rig.step()
    assert rig.scheduler.load().num_running == 2
    rig.finish_all(in_flight=2)
    for number in range(1, 5):
        rig.assert_as_alone(number)


def test_a_row_of_a_worker_whose_budget_is_below_one_with_all_drafts_has_fewer() -> None:
    limits = WorkerLimits(8, 3, num_speculative_tokens=5)
    rig = Rig(Config(max_num_seqs=4, max_num_batched_tokens=64, num_speculative_tokens=5), FakeWorker(64, 4, limits))
    rig.submit(1, numbers(3), max_tokens=20)
    rig.step()
    assert issue(rig).num_scheduled_tokens.tolist() == [3]
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)


def test_a_worker_that_makes_no_drafts_gets_no_room_for_any() -> None:
    rig = Rig(Config(max_num_seqs=4, max_num_batched_tokens=64, num_speculative_tokens=3))
    rig.submit(1, numbers(7), max_tokens=6)
    rig.finish_all(in_flight=2)
    assert all(batch.num_scheduled_tokens[: batch.num_decodes].max(initial=1) == 1 for batch in rig.batches)
    rig.assert_as_alone(1)


# -- upper bounds


def test_positions_of_a_second_batch_are_upper_bounds_from_the_last_output_seen() -> None:
    """k=3, one draft accepted of three: the worker lowers what it is told by the two positions that came to nothing."""
    rig = rig_of(3, right=1)
    rig.submit(1, numbers(7), max_tokens=30)
    first, second = issue(rig), issue(rig)
    assert (first.context_lens[0], second.context_lens[0], second.seen_step) == (7, 11, 0)
    rig.post(rig.execute())
    third = issue(rig)
    assert (third.context_lens[0], third.num_scheduled_tokens[0], third.seen_step) == (15, 4, first.step_id)
    rig.post(rig.execute())
    assert rig.sequence(1).ledger.scheduled_len == 13
    fourth = issue(rig)
    assert (fourth.context_lens[0], fourth.seen_step) == (17, second.step_id), "13 is where the third ends at most"
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)


def test_drafts_that_a_worker_does_not_have_count_as_positions_that_came_to_nothing() -> None:
    rig = rig_of(3)
    rig.worker.propose = lambda room: (0, 0)
    rig.submit(1, numbers(7), max_tokens=12)
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)
    assert rig.scheduler.spec_stats.num_steps == 0


# -- what is kept of a row


PROMPT = numbers(6)
REFERENCE = output_of(1, PROMPT, max_tokens=16)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("stop", range(1, 9))
@pytest.mark.parametrize("kind", ["token", "sequence", "minimum"])
def test_a_row_is_cut_at_the_earliest_stop(kind: str, stop: int, in_flight: int) -> None:
    """Case 41: every draft is accepted; what comes behind the stop is not shown, counted, told to the journal or hashed."""
    token = REFERENCE[stop]
    length = 1 + REFERENCE.index(token)
    rules: dict[str, object] = {"stop_token_ids": (token,)}
    if kind == "sequence":
        length = stop + 1
        rules = {"stop_token_sequences": (tuple(REFERENCE[stop - 1 : stop + 1]),)}
    elif kind == "minimum":
        rules = {"stop_token_ids": (token,), "min_tokens": 1}
    rig = rig_of(4, num_blocks=64, block_size=1)
    rig.submit(1, PROMPT, max_tokens=16, **rules)
    while rig.sequence(1).finish is None:
        rig.step(in_flight)
    rig.assert_as_alone(1)
    assert rig.output(1) == REFERENCE[:length]
    ids = PROMPT + REFERENCE
    assert published(rig) == sorted((token_id,) for token_id in ids[: len(PROMPT) + length - 1]), "or the stop itself"
    before = rig.output(1)
    rig.finish_all(in_flight)
    assert rig.output(1) == before and len(published(rig)) == len(PROMPT) + length - 1, "the batch behind changed something"
    assert rig.free_blocks == 64


def test_a_stop_found_late_wastes_one_row_at_most() -> None:
    rig = rig_of(3, num_blocks=64, block_size=1)
    rig.submit(1, PROMPT, max_tokens=16, stop_token_ids=(REFERENCE[2],))
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)
    decodes = [batch for batch in rig.batches if batch.num_decodes]
    assert [batch.num_scheduled_tokens.tolist() for batch in decodes] == [[4], [4]], "one with the stop, one behind it"


def test_a_block_is_hashed_once_its_last_token_is_committed_and_computed() -> None:
    """Case 5: B=4, T=6, k=3. All drafts rejected: T=7, and block 1 waits for position 7."""
    rig = rig_of(3, right=0)
    rig.submit(1, numbers(5), max_tokens=20)
    rig.step()
    ids = numbers(5) + output_of(1, numbers(5), max_tokens=20)
    assert rig.sequence(1).ledger.num_tokens == 6
    for num_tokens in (7, 8):
        rig.step()
        assert rig.sequence(1).ledger.num_tokens == num_tokens
        assert published(rig) == [tuple(ids[:4])], "position 7 is not computed"
    rig.step()
    assert published(rig) == sorted([tuple(ids[:4]), tuple(ids[4:8])])


def test_blocks_of_accepted_drafts_are_hashed() -> None:
    """Case 5: B=4, T=6, k=3. All accepted: T=10, exactly blocks 0 and 1."""
    rig = rig_of(3)
    rig.submit(1, numbers(5), max_tokens=20)
    rig.step()
    rig.step()
    ids = numbers(5) + rig.output(1)
    assert len(ids) == 10
    assert published(rig) == sorted([tuple(ids[:4]), tuple(ids[4:8])])


@pytest.mark.parametrize(("in_flight", "k"), [(1, 0), (2, 0), (1, 3), (2, 3)])
def test_a_prompt_sent_again_hits_whatever_is_deferred(in_flight: int, k: int) -> None:
    """Case 4: B=4, [1..9] twice: 8 cached tokens."""
    rig = rig_of(k)
    for number in (1, 2):
        rig.submit(number, numbers(9), max_tokens=5)
        rig.finish_all(in_flight)
    assert rig.sequence(2).num_cached_tokens == 8
    assert rig.output(1) == rig.output(2)


# -- late outputs


def test_a_late_output_of_a_preempted_sequence_with_drafts_is_dropped_once() -> None:
    """Cases 43 and 90: its row is in flight when it has to go, and nothing of it counts; a chunk beside it samples nothing."""
    rig = rig_of(3, num_blocks=6, enable_prefix_caching=False)
    rig.submit(1, numbers(7), max_tokens=16)
    rig.submit(2, numbers(7, 30), max_tokens=16)
    late = 0
    for output in outputs_with_two_in_flight(rig):
        before = {number: (rig.sequence(number).attempt, rig.output(number)) for number in (1, 2)}
        waits = [number for number in (1, 2) if rig.sequence(number).status is SequenceStatus.WAITING]
        late += bool(waits) and len(output.token_counts) > 1
        rig.post(output)
        for number in waits:
            assert (rig.sequence(number).attempt, rig.output(number)) == before[number]
    assert late and rig.scheduler.load().num_preemptions
    rig.assert_as_alone(1, 2)


def test_a_late_output_of_an_aborted_sequence_with_drafts_is_dropped() -> None:
    """Case 62, beyond the prompt."""
    rig = rig_of(3)
    rig.submit(1, numbers(7), max_tokens=16)
    rig.step()
    issue(rig)
    issue(rig)
    rig.scheduler.abort(bytes(15) + b"\1", rig.now_us)
    output, blocks = rig.output(1), published(rig)
    rig.finish_all(in_flight=2)
    assert (rig.output(1), rig.reason(1), published(rig)) == (output, FinishReason.ABORTED, blocks)
    assert rig.free_blocks == 16


def test_outputs_in_flight_of_a_sequence_swapped_out_count() -> None:
    """Same slot, same attempt: its drafts were verified before its KV moved."""
    limits = replace(LIMITS, num_speculative_tokens=3)
    rig = Rig(
        Config(max_num_seqs=4, max_num_batched_tokens=64, num_speculative_tokens=3, preemption_mode="swap"),
        FakeWorker(6, 4, limits, num_host_blocks=8),
    )
    rig.submit(1, numbers(7), max_tokens=16)
    rig.submit(2, numbers(7, 30), max_tokens=16)
    counted = 0
    for output in outputs_with_two_in_flight(rig):
        swapped = [number for number in (1, 2) if rig.sequence(number).status is SequenceStatus.SWAPPED]
        before = {number: len(rig.output(number)) for number in swapped}
        rig.post(output)
        counted += sum(len(rig.output(number)) > before[number] for number in swapped)
    assert counted and rig.scheduler.load().num_preemptions
    rig.assert_as_alone(1, 2)


# -- bad outputs


@pytest.mark.parametrize(
    ("counts", "drafts", "complaint"),
    [
        ([5], [3], "at most"),
        ([0], [3], "at most"),
        ([4, 1], [3, 0], "at most"),
        ([3], [], "room for"),
        ([3], [1], "room for"),
        ([2], [4], "room for"),
        ([2], [2, 2], "room for"),
        ([1], [-1], "room for"),
    ],
)
def test_an_output_that_does_not_fit_its_rows_changes_nothing(counts: list[int], drafts: list[int], complaint: str) -> None:
    rig = rig_of(3)
    rig.submit(1, numbers(7), max_tokens=16)
    rig.step()
    issue(rig)
    output = rig.execute()
    assert (output.token_counts.tolist(), output.draft_counts.tolist()) == ([4], [3])
    token_ids = np.full(sum(counts), 5, np.int32)
    bad = replace(output, token_counts=np.array(counts, np.int32), token_ids=token_ids, draft_counts=np.array(drafts, np.int32))
    before = rig.output(1)
    with pytest.raises(BadOutput, match=complaint):
        rig.post(bad)
    assert rig.output(1) == before
    rig.post(output)
    assert len(rig.output(1)) == 5


def test_drafts_of_rows_that_had_no_room_for_any_are_a_bad_output() -> None:
    rig = rig_of(0)
    rig.submit(1, numbers(7), max_tokens=16)
    rig.step()
    issue(rig)
    with pytest.raises(BadOutput, match="room for"):
        rig.post(replace(rig.execute(), draft_counts=np.array([1], np.int32)))


# -- counters


def test_drafts_and_acceptances_are_counted_by_position() -> None:
    """Case 45: k=3, accepted 0, 1 and 3: 9 drafts, 4 accepted, 3 steps, by position [2, 1, 1]."""
    rig = rig_of(3)
    accepted = iter((0, 1, 3))
    rig.worker.propose = lambda room: (room, next(accepted))
    rig.submit(1, numbers(7), max_tokens=16)
    for _ in range(4):
        rig.step()
    stats = rig.scheduler.spec_stats
    assert (stats.num_drafts, stats.num_accepted, stats.num_steps) == (9, 4, 3)
    assert stats.accepted_by_position == [2, 1, 1]
    assert stats.acceptance_rate == pytest.approx(4 / 9) and stats.tokens_per_step == pytest.approx(7 / 3)


def test_without_speculation_counters_are_zero_and_rates_too() -> None:
    """Case 45: no divide by zero."""
    rig = rig_of(0)
    rig.submit(1, numbers(7), max_tokens=16)
    rig.finish_all(in_flight=2)
    stats = rig.scheduler.spec_stats
    assert (stats.num_drafts, stats.num_accepted, stats.num_steps, stats.accepted_by_position) == (0, 0, 0, [])
    assert (stats.acceptance_rate, stats.tokens_per_step) == (0.0, 0.0)


def test_only_drafts_that_were_there_are_counted() -> None:
    rig = rig_of(3)
    made = iter(((1, 1), (0, 0), (2, 0)))
    rig.worker.propose = lambda room: next(made)
    rig.submit(1, numbers(7), max_tokens=16)
    for _ in range(4):
        rig.step()
    stats = rig.scheduler.spec_stats
    assert (stats.num_drafts, stats.num_accepted, stats.num_steps) == (3, 1, 2)


# -- takeover


def test_a_takeover_with_drafts_in_flight_goes_on_from_what_was_accepted() -> None:
    """The worker executed one batch more than its leader has heard of; the report counts accepted drafts alone, and the new leader's first
    batch is exact."""
    rig = rig_of(3, right=1)
    rig.submit(1, numbers(7), max_tokens=20)
    rig.step()
    issue(rig)
    issue(rig)
    rig.execute()
    slot = rig.worker.report().slots[0]
    assert (len(slot.token_ids), slot.computed_len) == (10, 9), "8 known, one draft accepted of three"
    rig.attach()
    ledger = rig.sequence(1).ledger
    assert (ledger.num_tokens, ledger.computed_len, ledger.positions_in_flight, ledger.drafts_in_flight) == (10, 9, 0, 0)
    batch = issue(rig)
    assert (batch.context_lens[0], batch.num_scheduled_tokens[0]) == (13, 4)
    assert batch.seen_step == rig.worker.last_step, "or its worker would lower the positions again"
    rig.finish_all(in_flight=2)
    rig.assert_as_alone(1)
    assert rig.worker.computed_positions == 7 + 20 - 1, "a position is computed twice"


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_stop_within_a_row_whose_output_was_lost_is_found_at_the_attach(stop: int) -> None:
    """The worker knows of no stop: its slot has the tokens behind it, and those of the next row."""
    rig = rig_of(3)
    rig.submit(1, PROMPT, max_tokens=16, stop_token_ids=(REFERENCE[stop],))
    rig.step()
    for _ in range(2):
        issue(rig)
    for _ in range(2):
        rig.execute()
    assert len(rig.worker.report().slots[0].token_ids) == len(PROMPT) + 9
    rig.attach()
    rig.assert_as_alone(1)
    assert rig.output(1) == REFERENCE[: 1 + REFERENCE.index(REFERENCE[stop])]
    rig.finish_all()
    assert rig.free_blocks == 16


# -- tokens depend on nothing of it


requests = st.lists(
    st.tuples(
        st.lists(st.integers(30, 33), min_size=1, max_size=9),
        st.builds(
            SamplingParams,
            seed=st.integers(0, 3),
            max_tokens=st.integers(1, 16),
            ignore_eos=st.booleans(),
            stop_token_ids=st.lists(st.integers(0, 63), max_size=6).map(tuple),
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    requests=requests,
    k=st.integers(0, 5),
    drafts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30),
    in_flight=st.integers(1, 2),
    num_tokens=st.integers(26, 60),
    block_size=st.integers(1, 5),
)
def test_outputs_are_those_without_speculation(
    requests: list[tuple[list[int], SamplingParams]],
    k: int,
    drafts: list[tuple[int, int]],
    in_flight: int,
    num_tokens: int,
    block_size: int,
) -> None:
    """Whatever is proposed and accepted, and however late it is told."""
    rig = rig_of(k, num_tokens // block_size, block_size)
    pattern = iter(drafts)

    def propose(room: int) -> tuple[int, int]:
        number, right = next(pattern, (room, room))
        return min(number, room), min(number, right, room)

    rig.worker.propose = propose
    for number, (prompt, sampling) in enumerate(requests, 1):
        rig.scheduler.submit(submission(number, prompt, sampling), 0, (), rig.now_us)
    rig.finish_all(in_flight)
    for number, (prompt, sampling) in enumerate(requests, 1):
        expected, finish = reference_output(submission(number, prompt, sampling), rig.pool_tokens)
        assert (rig.output(number), rig.sequence(number).finish) == (expected, finish)
    assert rig.free_blocks == num_tokens // block_size
