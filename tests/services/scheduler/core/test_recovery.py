"""The join, as stories: who knew what when the leader died, and what the next one starts from."""

from array import array
from collections.abc import Sequence

import numpy as np

from kv_manager.hash_chain import chain_digests, namespace_link
from kv_manager.published_block import PublishedBlock
from services.scheduler.core.held_blocks import kv_namespace
from services.scheduler.core.record import Arrival, StoredRequest, StoredState
from services.scheduler.core.recovered import Adoption, OrphanSlot, Recovered, RecoveredRequest, SlotToDrop
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.finish import Finish, FinishReason
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import DroppedSlot, SlotReport, WorkerReport
from tessera.values.request import RequestTimings, Submission
from tessera.values.sampling import SamplingParams

A, B = b"a" * 16, b"b" * 16
BOOT, OLD_BOOT = b"1" * 16, b"0" * 16
PROMPT = (1, 2, 3, 4, 5)
EOS_ID = 99
MODEL = ModelInfo("m", "LlamaForCausalLM", 1000, 512, (EOS_ID,), None, "t", "w")
GEOMETRY = KVGeometry(16, 4, 8, "f32")
DESCRIPTION = WorkerDescription(BOOT, MODEL, GEOMETRY, WorkerLimits(8, 64))


def stop_rule(submission: Submission, output: tuple[int, ...]) -> Finish | None:
    for length, token_id in enumerate(output, 1):
        if token_id == EOS_ID:
            return Finish(FinishReason.EOS, length, stop_token_id=token_id)
    return None


def store(last: int = 7, **requests: StoredRequest) -> StoredState:
    return StoredState(last, {name.encode() * 16: request for name, request in requests.items()})


def told(
    request_id: bytes, output: Sequence[int] = (), attempt: int = 1, finish: Finish | None = None, subscriber: int = 0
) -> StoredRequest:
    """A request as the store tells it."""
    submission = Submission(request_id, np.array(PROMPT, np.int32), SamplingParams(seed=1))
    status = SequenceStatus.FINISHED if finish else SequenceStatus.RUNNING
    request = StoredRequest(submission, Arrival(1, request_id[0]), status, subscriber, attempt, "w")
    request.output_token_ids, request.finish = array("i", output), finish
    request.num_cached_tokens, request.timings = 4, RequestTimings(1, 2, 3)
    return request


def live(
    request_id: bytes, output: Sequence[int] = (), attempt: int = 1, computed: int | None = None, slot: int = 0
) -> SlotReport:
    """A live slot that has computed all tokens but the last, unless said otherwise."""
    tokens = np.array([*PROMPT, *output], np.int32)
    computed_len = len(tokens) - 1 if computed is None else computed
    table = np.arange(slot * 4, slot * 4 + len(tokens) // 4 + 1, dtype=np.int32)
    return SlotReport(slot, request_id, attempt, len(PROMPT), tokens, table, computed_len)


def dropped(
    request_id: bytes, output: Sequence[int], attempt: int = 1, finish: Finish | None = None, step: int = 5
) -> DroppedSlot:
    slot = live(request_id, output, attempt)
    return DroppedSlot(request_id, attempt, slot.prompt_len, slot.token_ids, slot.block_table, slot.computed_len, finish, step)


def report(*slots: SlotReport, gone: Sequence[DroppedSlot] = (), written: dict[int, int] | None = None) -> WorkerReport:
    """A report after step 9; `written` says which step last wrote a block."""
    last_write_step = np.zeros(GEOMETRY.num_blocks, np.int64)
    for block_id, step in (written or {}).items():
        last_write_step[block_id] = step
    return WorkerReport(1, DESCRIPTION, 9, slots, tuple(gone), last_write_step)


def claim(request_id: bytes, *output: int, subscriber: int = 0) -> GatewayClaim:
    return GatewayClaim(request_id, subscriber, output)


def only(recovered: Recovered) -> RecoveredRequest:
    assert len(recovered.requests) == 1
    return recovered.requests[0]


def test_a_running_request_goes_on_in_its_slot() -> None:
    slot = live(A, (10, 11, 12), attempt=2)
    recovered = join(store(a=told(A, (10, 11), attempt=2)), {"w": report(slot)}, [claim(A, 10)], stop_rule)
    request = only(recovered)
    assert request.adoption == Adoption("w", slot)
    assert request.output_token_ids == (10, 11, 12), "the worker had sampled one more, and the store had not heard"
    assert (request.attempt, request.subscriber, request.finish) == (2, 0, None)
    assert (request.num_cached_tokens, request.timings, request.arrival) == (4, RequestTimings(1, 2, 3), Arrival(1, A[0]))
    assert not recovered.drops and not recovered.orphans and recovered.num_contradictions == 0
    assert recovered.last_record == 7
    assert [(worker.worker, worker.boot_id, worker.next_step) for worker in recovered.workers] == [("w", BOOT, 10)]


def test_a_request_without_a_slot_waits() -> None:
    request = only(join(store(a=told(A, (10,), attempt=3)), {"w": report()}, [], stop_rule))
    assert (request.adoption, request.attempt, request.output_token_ids) == (None, 3, (10,))


def test_a_worker_that_does_not_report_leaves_its_requests_waiting() -> None:
    recovered = join(store(a=told(A, (10,), attempt=3)), {}, [claim(A, 10, 11)], stop_rule)
    assert only(recovered).output_token_ids == (10, 11)
    assert only(recovered).adoption is None and recovered.workers == ()


def test_what_a_client_has_seen_is_kept_when_nobody_else_has_it() -> None:
    """The store had fallen behind, frames left undurable, and worker and scheduler died."""
    request = only(join(store(a=told(A, (10,))), {"w": report()}, [claim(A, 10, 11, 12)], stop_rule))
    assert request.output_token_ids == (10, 11, 12)


def test_the_slot_of_the_highest_attempt_is_adopted_and_the_others_dropped() -> None:
    older, newer = live(A, (10,), attempt=2, slot=0), live(A, (10, 11), attempt=3, slot=1)
    recovered = join(store(a=told(A, (10,), attempt=2)), {"w": report(older), "v": report(newer)}, [], stop_rule)
    assert only(recovered).adoption == Adoption("v", newer) and only(recovered).attempt == 3
    assert recovered.drops == (SlotToDrop("w", 0, A, 2, None),)


def test_a_slot_behind_the_attempt_in_the_store_is_dropped() -> None:
    """The request had moved on from this worker, which the leader then lost sight of."""
    recovered = join(store(a=told(A, (10,), attempt=3)), {"w": report(live(A, (10, 11), attempt=2))}, [], stop_rule)
    assert only(recovered).adoption is None and only(recovered).attempt == 3
    assert only(recovered).output_token_ids == (10, 11), "its tokens extend the store's all the same"
    assert recovered.drops == (SlotToDrop("w", 0, A, 2, None),)


def test_a_waiting_request_continues_with_the_highest_attempt_ever_used() -> None:
    recovered = join(store(a=told(A, (10,), attempt=1)), {"w": report(gone=[dropped(A, (10, 11), attempt=4)])}, [], stop_rule)
    assert (only(recovered).attempt, only(recovered).output_token_ids) == (4, (10, 11))


def test_gateways_win_over_the_store_and_the_store_over_workers() -> None:
    slot = live(A, (10, 21, 22), attempt=2)
    recovered = join(store(a=told(A, (10, 21), attempt=1)), {"w": report(slot)}, [claim(A, 10, 11, 12)], stop_rule)
    assert only(recovered).output_token_ids == (10, 11, 12)
    assert only(recovered).adoption is None, "its KV is that of other tokens"
    assert recovered.drops == (SlotToDrop("w", 0, A, 2, None),)
    assert recovered.num_contradictions == 2

    recovered = join(store(a=told(A, (10, 21), attempt=1)), {"w": report(live(A, (10, 31)))}, [claim(A, 10)], stop_rule)
    assert only(recovered).output_token_ids == (10, 21) and recovered.num_contradictions == 1


def test_the_highest_attempt_wins_over_lower_ones() -> None:
    reports = {"w": report(live(A, (10, 21, 22, 23), attempt=2)), "v": report(live(A, (10, 31), attempt=3))}
    recovered = join(store(a=told(A, (10,), attempt=1)), reports, [], stop_rule)
    assert only(recovered).output_token_ids == (10, 31) and recovered.num_contradictions == 1


def test_the_longest_of_several_gateways_wins() -> None:
    request = only(join(store(a=told(A)), {}, [claim(A, 10), claim(A, 10, 11, subscriber=2)], stop_rule))
    assert (request.output_token_ids, request.subscriber) == ((10, 11), 2)


def test_a_slot_whose_ids_differ_only_behind_its_computed_length_is_adopted() -> None:
    slot = live(A, (10, 21), computed=len(PROMPT) + 1)
    request = only(join(store(a=told(A)), {"w": report(slot)}, [claim(A, 10, 11)], stop_rule))
    assert request.adoption == Adoption("w", slot) and request.output_token_ids == (10, 11)


def test_a_slot_that_computed_beyond_the_known_tokens_is_not_adopted_where_they_end_differently() -> None:
    slot = live(A, (21, 22, 23))
    request = only(join(store(a=told(A, (10,))), {"w": report(slot)}, [], stop_rule))
    assert request.adoption is None and request.output_token_ids == (10,)


def test_a_slot_with_another_prompt_length_is_not_adopted() -> None:
    slot = SlotReport(0, A, 1, 4, np.array([*PROMPT, 10], np.int32), np.array([0, 1], np.int32), 5)
    assert only(join(store(a=told(A, ())), {"w": report(slot)}, [], stop_rule)).adoption is None


def test_a_finish_in_the_store_ends_the_request_and_its_slot() -> None:
    finish = Finish(FinishReason.STOP_STRING, 1, stop_string="x")
    recovered = join(store(a=told(A, (10,), finish=finish)), {"w": report(live(A, (10, 11)))}, [], stop_rule)
    request = only(recovered)
    assert (request.finish, request.output_token_ids, request.adoption) == (finish, (10,), None)
    assert recovered.drops == (SlotToDrop("w", 0, A, 1, finish),)


def test_a_finish_that_only_the_worker_was_told_holds() -> None:
    """The drop with its finish was executed; the record of it never reached the store."""
    finish = Finish(FinishReason.ABORTED, 2)
    request = only(join(store(a=told(A, (10,))), {"w": report(gone=[dropped(A, (10, 11, 12), finish=finish)])}, [], stop_rule))
    assert (request.finish, request.output_token_ids) == (finish, (10, 11))


def test_of_two_marks_the_earlier_one_wins() -> None:
    """A gateway's stop string replaced the end that the worker had been told."""
    stop_string, later = Finish(FinishReason.STOP_STRING, 1, stop_string="x"), Finish(FinishReason.MAX_TOKENS, 2)
    state = store(a=told(A, (10,), finish=stop_string))
    request = only(join(state, {"w": report(gone=[dropped(A, (10, 11), finish=later)])}, [], stop_rule))
    assert (request.finish, request.output_token_ids) == (stop_string, (10,))


def test_a_finish_of_other_tokens_than_the_client_has_seen_does_not_hold() -> None:
    finish = Finish(FinishReason.MAX_TOKENS, 2)
    request = only(join(store(a=told(A, (10, 21), finish=finish)), {}, [claim(A, 10, 11)], stop_rule))
    assert (request.finish, request.output_token_ids) == (None, (10, 11))


def test_an_abort_holds_whatever_the_tokens_are() -> None:
    state = store(a=told(A, (10, 21), finish=Finish(FinishReason.ABORTED, 2)))
    request = only(join(state, {}, [claim(A, 10, 11, 12)], stop_rule))
    assert (request.finish, request.output_token_ids) == (Finish(FinishReason.ABORTED, 3), (10, 11, 12))


def test_an_abort_that_a_leader_had_not_heard_of_cuts_nothing_that_a_client_has_seen() -> None:
    """The worker that was told of it was away, and the request went on elsewhere."""
    report_of_the_late = report(gone=[dropped(A, (10,), finish=Finish(FinishReason.ABORTED, 1))])
    request = only(join(store(a=told(A, (10,))), {"w": report_of_the_late}, [claim(A, 10, 11, 12)], stop_rule))
    assert (request.finish, request.output_token_ids) == (Finish(FinishReason.ABORTED, 3), (10, 11, 12))


def test_stop_rules_run_again_on_what_was_joined() -> None:
    """The worker had sampled the end and more, and died with its answer on the way."""
    recovered = join(store(a=told(A, (10,))), {"w": report(live(A, (10, EOS_ID, 12)))}, [], stop_rule)
    request = only(recovered)
    assert request.finish == Finish(FinishReason.EOS, 2, stop_token_id=EOS_ID)
    assert request.output_token_ids == (10, EOS_ID) and request.adoption is None
    assert recovered.drops == (SlotToDrop("w", 0, A, 1, request.finish),)


def test_a_slot_nobody_has_told_of_is_kept_for_the_grace() -> None:
    slot = live(B, (10,), slot=1)
    recovered = join(store(), {"w": report(slot)}, [claim(B, 10)], stop_rule)
    assert recovered.requests == () and recovered.drops == ()
    assert recovered.orphans == (OrphanSlot("w", slot),)


def digests(*tokens: int) -> list[int]:
    return chain_digests(np.array(tokens).reshape(-1, GEOMETRY.block_size), namespace_link(kv_namespace(DESCRIPTION)))


def published(recovered: Recovered) -> dict[int, PublishedBlock]:
    (worker,) = recovered.workers
    blocks = {block.block_id: block for block in worker.published}
    assert len(blocks) == len(worker.published), "a block is published twice"
    return blocks


def test_a_recorded_block_holds_while_nothing_wrote_it_since() -> None:
    first = PublishedBlock(12, 5, None, (1, 2, 3, 4), 6)
    second = PublishedBlock(13, 6, 5, (5, 6, 7, 8), 6)
    state = store()
    state.blocks = {("w", BOOT): {12: first, 13: second}, ("w", OLD_BOOT): {14: first}, ("v", BOOT): {15: first}}
    blocks = published(join(state, {"w": report(written={12: 6, 13: 7})}, [], stop_rule))
    assert blocks == {12: first}


def test_full_computed_blocks_of_every_slot_are_published_again() -> None:
    going_on, unknown = live(A, (10, 11, 12, 13), slot=0), live(B, (20, 21, 22), slot=1)
    state = store(a=told(A, (10,)))
    recovered = join(state, {"w": report(going_on, unknown, written={0: 3, 1: 4, 2: 5, 4: 6, 5: 7})}, [], stop_rule)
    blocks = published(recovered)
    assert set(blocks) == {0, 1, 4}
    first, second = digests(*PROMPT, 10, 11, 12)
    namespace = namespace_link(kv_namespace(DESCRIPTION))
    assert blocks[0] == PublishedBlock(0, first, None, PROMPT[:4], 3, namespace)
    assert blocks[1] == PublishedBlock(1, second, first, (PROMPT[4], 10, 11, 12), 4)
    assert blocks[4] == PublishedBlock(4, first, None, PROMPT[:4], 6, namespace)


def test_a_dropped_slot_publishes_what_nothing_wrote_since_its_drop() -> None:
    gone = dropped(A, (10, 11, 12, 13, 14, 15, 16, 17), step=5)
    state = store(a=told(A, (10,)))
    assert set(published(join(state, {"w": report(gone=[gone], written={0: 3, 1: 4, 2: 4})}, [], stop_rule))) == {0, 1, 2}
    assert set(published(join(state, {"w": report(gone=[gone], written={0: 3, 1: 5, 2: 4})}, [], stop_rule))) == {0}


def test_an_end_publishes_the_blocks_of_its_slot_before_they_are_freed() -> None:
    slot = live(A, (10, 11, 12, EOS_ID))
    recovered = join(store(a=told(A, (10,))), {"w": report(slot, written={0: 3, 1: 4})}, [], stop_rule)
    assert recovered.drops and set(published(recovered)) == {0, 1}


def test_the_join_changes_nothing_it_was_given() -> None:
    request, slot = told(A, (10,)), live(A, (10, 11))
    state = store(a=request)
    join(state, {"w": report(slot)}, [claim(A, 10, 11, 12)], stop_rule)
    assert request.output_token_ids.tolist() == [10] and slot.token_ids.tolist() == [*PROMPT, 10, 11]
    assert state.blocks == {}
