"""What an engine computes, remembers and reports, batch by batch. The model is deterministic and reads its KV from the pool."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from engine_driver import BLOCK, EPOCH, NUM_BLOCKS, PROMPT, VOCAB, EngineDriver, Row, continuation, drop, entry, request_id
from torch import Tensor

from model_worker import slot_table
from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.models.deterministic import DeterministicLM, deterministic_config, next_tokens
from tessera.values.batch import RowError
from tessera.values.finish import Finish, FinishReason
from tessera.values.sampling import SamplingParams


def test_a_prompt_and_its_decodes() -> None:
    driver = EngineDriver()
    output = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    tokens = [*output.token_ids.tolist(), driver.decode(0, 7), driver.decode(0, 8), driver.decode(0, 9, [11])]
    assert tokens == continuation(PROMPT, 4)
    assert (output.epoch, output.nonce, output.step_id, output.row_errors) == (EPOCH, 1, 1, ())
    (slot,) = driver.engine.report(5).slots
    assert slot.token_ids.tolist() == PROMPT + tokens
    assert (slot.slot, slot.request_id, slot.attempt, slot.prompt_len, slot.computed_len) == (0, request_id("r"), 1, 6, 9)
    assert slot.block_table.tolist() == [7, 2, 11]


def test_a_chunk_gives_no_token_until_the_prompt_is_complete() -> None:
    driver = EngineDriver()
    first = driver.run([Row(0, 3, 3)], [entry(0, PROMPT, [7])])
    second = driver.run([Row(0, 2, 5, [2])])
    last = driver.run([Row(0, 1, 6)])
    assert [output.token_counts.tolist() for output in (first, second, last)] == [[0], [0], [1]]
    assert last.token_ids.tolist() == continuation(PROMPT, 1)


def test_decodes_and_prefill_chunks_share_a_batch() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [0, 1], "a")])
    output = driver.run([Row(0, 1, 7), Row(1, 4, 4), Row(2, 2, 2)], [entry(1, PROMPT, [2, 3], "b"), entry(2, [8, 9], [4], "c")])
    assert output.token_counts.tolist() == [1, 0, 1]
    assert output.token_ids.tolist() == [continuation(PROMPT, 2)[1], *continuation([8, 9], 1)]


def test_cached_blocks_are_read_and_not_computed() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2], "a")])
    longer = [*PROMPT[:4], 60, 61]
    output = driver.run([Row(1, 2, 6)], [entry(1, longer, [7, 3], "b", cached=4)])
    assert output.token_ids.tolist() == continuation(longer, 1)
    assert driver.engine.report(1).last_write_step[[7, 2, 3]].tolist() == [1, 1, 2]


def test_the_model_notices_a_wrong_block() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2], "a")])
    longer = [*PROMPT[:4], 60, 61]
    output = driver.run([Row(1, 2, 6)], [entry(1, longer, [2, 3], "b", cached=4)])
    assert output.token_ids.tolist() != continuation(longer, 1)


def test_a_resumed_sequence_goes_on_with_the_same_tokens() -> None:
    """Noise is keyed by the output index: a second attempt that brings its outputs along draws what the first would have."""
    sampling = SamplingParams(seed=1234, temperature=1.0)
    driver = EngineDriver()
    tokens = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [0, 1], sampling=sampling)]).token_ids.tolist()
    tokens += [driver.decode(0, 7), driver.decode(0, 8), driver.decode(0, 9, [2]), driver.decode(0, 10)]
    again = entry(3, PROMPT + tokens[:3], [8, 9, 10], attempt=2, prompt_len=6, sampling=sampling)
    output = driver.run([Row(3, 9, 9)], [again], [drop(0)])
    resumed = [*tokens[:3], *output.token_ids.tolist(), driver.decode(3, 10)]
    assert resumed == tokens
    assert any(token != greedy for token, greedy in zip(tokens, continuation(PROMPT, 5), strict=True)), "noise had a say"


def test_a_slot_is_dropped_and_entered_in_one_batch() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2], "a")])
    output = driver.run([Row(0, 2, 2)], [entry(0, [8, 9], [7], "b")], [drop(0, "a")])
    assert output.token_ids.tolist() == continuation([8, 9], 1)


def test_a_batch_without_rows_only_drops() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    output = driver.run(drops=[drop(0)])
    assert len(output.token_counts) == len(output.token_ids) == 0
    assert driver.engine.report(1).slots == () and driver.engine.report(1).last_step == 2


def test_a_drop_of_another_attempt_or_request_does_nothing() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2], attempt=2)])
    driver.run(drops=[drop(0, attempt=1), drop(0, "x", attempt=2), drop(1)])
    driver.run(drops=[drop(0, attempt=1)])
    report = driver.engine.report(1)
    assert len(report.slots) == 1 and report.dropped == ()


def test_a_dropped_slot_is_kept_until_its_drop_is_durable() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    finish = Finish(FinishReason.MAX_TOKENS, 1)
    driver.run(drops=[drop(0, finish=finish)])
    driver.run(durable_step=1)
    (dropped,) = driver.engine.report(1).dropped
    assert dropped.token_ids.tolist() == PROMPT + continuation(PROMPT, 1)
    assert (dropped.request_id, dropped.attempt, dropped.prompt_len) == (request_id("r"), 1, 6)
    assert (dropped.computed_len, dropped.finish, dropped.drop_step) == (6, finish, 2)
    assert dropped.block_table.tolist() == [7, 2]
    driver.run(durable_step=2)
    assert driver.engine.report(1).dropped == ()


def test_dropped_slots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_table, "DROPPED_SLOTS_MAX", 3)
    driver = EngineDriver()
    for index in range(5):
        driver.run([Row(0, 2, 2)], [entry(0, [1, 2], [0], str(index))])
        driver.run(drops=[drop(0, str(index))])
    assert [slot.request_id for slot in driver.engine.report(1).dropped] == [request_id(name) for name in "234"]


def test_last_write_step_is_per_block_and_zero_for_never() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    driver.run([Row(0, 1, 7)])
    expected = np.zeros(NUM_BLOCKS, dtype=np.int64)
    expected[[7, 2]] = [1, 2]
    assert driver.engine.report(1).last_write_step.tolist() == expected.tolist()


def test_a_report_does_not_change_with_later_steps() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    report = driver.engine.report(1)
    driver.run([Row(0, 1, 7)])
    assert len(report.slots[0].token_ids) == 7 and report.last_write_step[2] == 1 and report.last_step == 1


def test_step_ids_may_have_gaps() -> None:
    driver = EngineDriver()
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])], step_id=10)
    assert driver.run([Row(0, 1, 7)], step_id=12).token_ids.tolist() == continuation(PROMPT, 2)[1:]


class SabotagedLM(DeterministicLM):
    """A deterministic model whose forward pass is first shown to `sabotage(batch)`, which may raise or return logits rows to spoil."""

    def __init__(self, sabotage: Callable[[Batch], list[int]]) -> None:
        super().__init__(deterministic_config(VOCAB, 40))
        self.sabotage = sabotage

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        spoiled = self.sabotage(batch)
        logits = super().forward(batch, kv)
        logits[spoiled, 0] = torch.nan
        return logits


def spoil_token(token: int) -> Callable[[Batch], list[int]]:
    """NaN in the rows that compute `token`."""

    def sabotage(batch: Batch) -> list[int]:
        ends = batch.cu_seqlens_q.tolist()
        rows = range(batch.num_rows)
        return [row for row in rows if token in batch.input_ids[ends[row] : ends[row + 1]]]

    return sabotage


def test_a_row_with_nan_logits_fails_alone_and_stays_out_until_it_is_dropped() -> None:
    driver = EngineDriver(SabotagedLM(spoil_token(66)))
    prompts = [PROMPT, [66, 1, 2], [8, 9]]
    entries = [entry(slot, ids, [2 * slot, 2 * slot + 1], str(slot)) for slot, ids in enumerate(prompts)]
    output = driver.run([Row(slot, len(ids), len(ids)) for slot, ids in enumerate(prompts)], entries)
    assert output.token_counts.tolist() == [1, 0, 1]
    assert output.token_ids.tolist() == continuation(PROMPT, 1) + continuation([8, 9], 1)
    (error,) = output.row_errors
    assert error.row == 1 and "NaN" in error.message
    assert [slot.computed_len for slot in driver.engine.report(1).slots] == [6, 0, 2]

    # The next batch was already on its way, with a token for the failed row that never came.
    output = driver.run([Row(1, 1, 4), Row(0, 1, 7)])
    assert output.token_counts.tolist() == [0, 1] and output.row_errors == (RowError(0, error.message),)
    assert output.token_ids.tolist() == continuation(PROMPT, 2)[1:]

    output = driver.run([Row(1, 2, 2)], [entry(1, [8, 9], [10], "new")], [drop(1, "1")])
    assert output.row_errors == () and output.token_ids.tolist() == continuation([8, 9], 1)


def test_what_a_failed_row_has_written_is_cleared_and_nothing_else() -> None:
    """Some kernels multiply what lies behind a context by zero: a NaN there would end whoever has the block next."""
    driver, sound = EngineDriver(SabotagedLM(spoil_token(66))), EngineDriver()
    for each in (driver, sound):
        each.run([Row(0, 6, 6), Row(1, 2, 2)], [entry(0, PROMPT, [7, 2], "a"), entry(1, [8, 9, 66, 1], [3], "b")])
        each.run([Row(0, 1, 7), Row(1, 2, 4)])
    (failed,) = driver.engine.read_blocks([3])
    (whole,) = sound.engine.read_blocks([3])
    assert (
        np.array_equal(failed.kv[:, :, :2], whole.kv[:, :, :2]) and not failed.kv[:, :, 2:].any() and whole.kv[:, :, 2:4].all()
    )
    assert driver.kv(7, 2) == sound.kv(7, 2)


def test_an_unfinished_chunk_with_nan_does_not_count_as_computed() -> None:
    driver = EngineDriver(SabotagedLM(spoil_token(66)))
    output = driver.run([Row(0, 4, 4)], [entry(0, [66, 1, 2, 3, 4, 5], [0, 1])])
    assert output.token_counts.tolist() == [0] and len(output.row_errors) == 1
    assert driver.engine.report(1).slots[0].computed_len == 0


def test_a_pass_that_fails_once_is_tried_again() -> None:
    failures = iter([RuntimeError("a kernel tripped")])

    def fail_once(_batch: Batch) -> list[int]:
        for error in failures:
            raise error
        return []

    driver = EngineDriver(SabotagedLM(fail_once))
    output = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2])])
    assert output.token_ids.tolist() == continuation(PROMPT, 1) and output.row_errors == ()


def test_a_pass_that_fails_twice_is_split_and_only_the_cause_fails() -> None:
    def fail_with_66(batch: Batch) -> list[int]:
        if 66 in batch.input_ids:
            raise RuntimeError("no such row")
        return []

    driver = EngineDriver(SabotagedLM(fail_with_66))
    driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [0, 1], "0")])
    output = driver.run(
        [Row(0, 1, 7), Row(1, 3, 3), Row(2, 2, 2)], [entry(1, [66, 1, 2], [2], "1"), entry(2, [8, 9], [3], "2")]
    )
    assert output.token_counts.tolist() == [1, 0, 1]
    assert output.token_ids.tolist() == [continuation(PROMPT, 2)[1], *continuation([8, 9], 1)]
    assert output.row_errors == (RowError(1, "RuntimeError: no such row"),)
    assert [slot.computed_len for slot in driver.engine.report(1).slots] == [7, 0, 2]


def test_when_every_row_fails_the_engine_lives_on() -> None:
    broken = True

    def sabotage(_batch: Batch) -> list[int]:
        if broken:
            raise RuntimeError("the device is gone")
        return []

    driver = EngineDriver(SabotagedLM(sabotage))
    output = driver.run([Row(0, 6, 6), Row(1, 2, 2)], [entry(0, PROMPT, [0, 1], "0"), entry(1, [8, 9], [2], "1")])
    assert [error.row for error in output.row_errors] == [0, 1] and len(output.token_ids) == 0
    broken = False
    output = driver.run([Row(2, 2, 2)], [entry(2, [8, 9], [3], "2")], [drop(0, "0"), drop(1, "1")])
    assert output.token_ids.tolist() == continuation([8, 9], 1)


def test_min_tokens_counts_outputs_and_not_prompt() -> None:
    first = next_tokens(PROMPT, VOCAB)[0]
    sampling = SamplingParams(seed=0, temperature=0.0, min_tokens=1, stop_token_ids=(first,))
    driver = EngineDriver()
    output = driver.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2], sampling=sampling)])
    assert output.token_ids.tolist() == [next_tokens(PROMPT, VOCAB)[1]]
    resumed = entry(1, PROMPT, [8, 9], "s", prompt_len=5, sampling=sampling)
    assert driver.run([Row(1, 6, 6)], [resumed]).token_ids.tolist() == [first]


def test_tables_grow_by_several_blocks_in_one_batch() -> None:
    driver = EngineDriver()
    ids = list(range(1, 2 * BLOCK + 2))
    driver.run([Row(0, 1, 1), Row(1, 1, 1)], [entry(0, ids, [0], "a"), entry(1, ids, [1], "b")])
    driver.run([Row(1, 8, 9, [5, 3]), Row(0, 8, 9, [2, 9])])
    assert [slot.block_table.tolist() for slot in driver.engine.report(1).slots] == [[0, 2, 9], [1, 5, 3]]
    assert driver.decode(0, 10) == continuation(ids, 2)[1]
