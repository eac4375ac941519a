"""Drafts change the number of steps and nothing else: tokens, ids, computed lengths, KV, failures are those of steps of one token."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import MAX_LEN, PROMPT, VOCAB, EngineDriver, Row, continuation, drop, entry
from torch import Tensor

from model_worker.batch import Batch
from model_worker.batch_refused import BatchRefused
from model_worker.kv_pool import KVPool
from model_worker.models.deterministic import DeterministicLM, deterministic_config, next_tokens
from model_worker.sampling_table import SamplingTable
from model_worker.slot_table import SlotTable
from model_worker.speculation.proposer import Drafts
from tessera.values.logprobs import Logprobs
from tessera.values.report import SlotReport
from tessera.values.sampling import SamplingParams

TOKENS = continuation(PROMPT, 12)


@dataclass
class Scripted:
    """Proposes by slot what it is told to, as far as there is room."""

    of: dict[int, list[int]] = field(default_factory=dict)

    def propose(self, slots: np.ndarray, rooms: np.ndarray, table: SlotTable, sampling: SamplingTable) -> Drafts:
        given = [self.of.get(slot, [])[:room] for slot, room in zip(slots.tolist(), rooms.tolist(), strict=True)]
        counts = np.array([len(drafts) for drafts in given], np.int64)
        token_ids = np.full((len(given), int(rooms.max())), -1, np.int32)
        for row, drafts in enumerate(given):
            token_ids[row, : len(drafts)] = drafts
        return Drafts(counts, token_ids)


class WatchedLM(DeterministicLM):
    """Keeps its batches. Logits behind a token of `nan_after` are NaN; a pass with one of `fatal` raises."""

    def __init__(self) -> None:
        super().__init__(deterministic_config(VOCAB, MAX_LEN))
        self.batches: list[Batch] = []
        self.nan_after: set[int] = set()
        self.fatal: set[int] = set()

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        self.batches.append(batch)
        if self.fatal & set(batch.input_ids.tolist()):
            raise RuntimeError("no such token")
        logits = super().forward(batch, kv)
        for row, token in enumerate(batch.input_ids[batch.logits_rows].tolist()):
            if token in self.nan_after:
                logits[row, 0] = torch.nan
        return logits


class Drafting(EngineDriver):
    """A driver whose engine has the prompt of slot 0, and its first token."""

    def __init__(self, sampling: SamplingParams | None = None) -> None:
        self.model, self.script = WatchedLM(), Scripted()
        super().__init__(self.model, proposer=self.script)
        changes = {} if sampling is None else {"sampling": sampling}
        self.run([Row(0, 6, 6)], [entry(0, PROMPT, [7, 2, 4, 5, 6], **changes)])

    def speculate(self, drafts: list[int], room: int = 3, context_len: int | None = None, seen: int | None = None) -> list[int]:
        """One row of slot 0; where it ends exactly unless told otherwise. Its tokens."""
        self.script.of[0] = drafts
        end = self.slot.computed_len + 1 + room if context_len is None else context_len
        output = self.run([Row(0, 1 + room, end)], num_decodes=1, seen_step=self.step if seen is None else seen)
        assert output.row_errors == ()
        return output.token_ids.tolist()

    @property
    def slot(self) -> SlotReport:
        return self.engine.report(1).slots[0]


@pytest.mark.parametrize("right", range(4))
def test_a_row_samples_a_token_for_every_right_draft_and_one_more(right: int) -> None:
    driver = Drafting()
    wrong = [(token + 1) % VOCAB for token in TOKENS]
    driver.script.of[0] = [*TOKENS[1 : 1 + right], *wrong[1 + right : 4]]
    output = driver.run([Row(0, 4, 10)], num_decodes=1)
    assert output.token_ids.tolist() == TOKENS[1 : 2 + right]
    assert (output.token_counts.tolist(), output.draft_counts.tolist()) == ([1 + right], [3])
    assert driver.slot.token_ids.tolist() == PROMPT + TOKENS[: 2 + right]
    assert driver.slot.computed_len == 7 + right
    assert driver.speculate(wrong[2 + right : 4 + right]) == [TOKENS[2 + right]], "what was rejected is not read"


def test_rejected_drafts_leave_the_slot_and_its_kv_as_steps_of_one_token_do() -> None:
    drafting, plain = Drafting(), Drafting()
    for drafts in ([9, 9, 9], [TOKENS[2], 9], [TOKENS[3], TOKENS[4], 9], []):
        drafting.speculate(drafts)
    while plain.slot.computed_len < drafting.slot.computed_len:
        plain.speculate([], room=0)
    told = [(slot.token_ids.tolist(), slot.computed_len, slot.block_table.tolist()) for slot in (drafting.slot, plain.slot)]
    assert told[0] == told[1]
    full = drafting.slot.block_table[: drafting.slot.computed_len // 4].tolist()
    assert drafting.kv(*full) == plain.kv(*full)


def test_room_without_drafts_costs_nothing() -> None:
    driver = Drafting()
    assert driver.speculate([]) == TOKENS[1:2]
    assert driver.model.batches[-1].num_tokens == 1 and driver.model.batches[-1].num_decodes == 1


def test_positions_are_lowered_by_the_room_of_steps_that_the_scheduler_had_not_seen() -> None:
    """Two batches in flight: each is put together before the output of the one before it is known."""
    driver = Drafting()
    assert driver.speculate([TOKENS[1], 0, 0], context_len=10, seen=1) == TOKENS[1:3], "7 to 10, of which 7 and 8 are computed"
    assert driver.speculate([0], context_len=14, seen=1) == TOKENS[3:4], "9 on, as the two positions were for nothing"
    assert driver.speculate([TOKENS[4]], context_len=16, seen=2) == TOKENS[4:6], "10 on: 12 less three"
    output = driver.run([Row(0, 1, 14)], seen_step=3)
    assert output.token_ids.tolist() == TOKENS[6:7], "11 on: a row without room is lowered as well, by two"


def test_a_slot_entered_anew_is_not_lowered_by_what_it_had_before() -> None:
    driver = Drafting()
    driver.speculate([0, 0, 0], seen=1)
    output = driver.run(
        [Row(0, 8, 8)], [entry(0, PROMPT + TOKENS[:2], [8, 9, 10], attempt=2, prompt_len=6)], [drop(0)], seen_step=1
    )
    assert output.token_ids.tolist() == TOKENS[2:3]


def test_outputs_are_in_the_order_of_the_batch_though_single_positions_are_computed_first() -> None:
    """Case 47, without logprobs: of three requests one has drafts, one has room and none, one no room; a prompt comes beside them."""
    driver = Drafting()
    others = {1: [8, 9], 2: [30, 31, 32]}
    driver.run(
        [Row(slot, len(ids), len(ids)) for slot, ids in others.items()],
        [entry(slot, ids, [10 * slot, 10 * slot + 1], str(slot)) for slot, ids in others.items()],
        num_decodes=0,
    )
    driver.script.of = {0: TOKENS[1:3]}
    rows = [Row(0, 3, 9), Row(1, 3, 5), Row(2, 1, 4), Row(3, 2, 2)]
    output = driver.run(rows, [entry(3, [50, 51], [3], "3")], num_decodes=3)
    assert output.token_counts.tolist() == [3, 1, 1, 1] and output.draft_counts.tolist() == [2, 0, 0, 0]
    rest = [continuation(others[1], 2)[1], continuation(others[2], 2)[1], *continuation([50, 51], 1)]
    assert output.token_ids.tolist() == [*TOKENS[1:4], *rest]
    assert driver.model.batches[-1].num_decodes == 2, "rows of one position lead"


def test_log_probabilities_are_those_of_steps_of_one_token() -> None:
    """Case 47: one request has two drafts and wants the two likeliest, one has no drafts and asks for two ids, one wants none. Every token
    has the entries that it has without drafts, in the order of the batch."""
    wants = (
        SamplingParams(seed=0, temperature=0.0, logprobs=2),
        SamplingParams(seed=0, temperature=0.0, logprob_token_ids=(3, 5)),
        SamplingParams(seed=0, temperature=0.0),
    )
    entries: list[list[tuple[list[int], list[float], int]]] = []
    for drafts in ([TOKENS[1], 9], []):
        driver = Drafting(wants[0])
        others = [entry(slot, [8, 9], [10 * slot], str(slot), sampling=wants[slot]) for slot in (1, 2)]
        driver.run([Row(1, 2, 2), Row(2, 2, 2)], others, num_decodes=0)
        driver.script.of[0] = drafts
        outputs = [driver.run([Row(0, 3, 9), Row(1, 1, 3), Row(2, 1, 3)], num_decodes=3)]
        if not drafts:
            outputs.append(driver.run([Row(0, 1, 8)], seen_step=driver.step))
        assert [output.token_counts.tolist() for output in outputs] == ([[2, 1, 1]] if drafts else [[1, 1, 1], [1]])
        entries.append([told for output in outputs for told in told_of(output.logprobs)])
    drafted, plain = entries
    assert drafted == [plain[0], plain[3], plain[1], plain[2]], "the second token of the first request comes a step later"
    assert [len(ids) for ids, _, _ in drafted] == [3, 3, 3, 0]
    assert drafted[1][0][:2] == [TOKENS[2], TOKENS[2]] and drafted[2][0][1:] == [3, 5]


def told_of(logprobs: Logprobs | None) -> list[tuple[list[int], list[float], int]]:
    """By token: ids, log-probabilities, rank."""
    assert logprobs is not None
    ends = np.cumsum(logprobs.counts)[:-1]
    parts = zip(np.split(logprobs.token_ids, ends), np.split(logprobs.logprobs, ends), logprobs.ranks.tolist(), strict=True)
    return [(ids.tolist(), values.tolist(), rank) for ids, values, rank in parts]


def test_min_tokens_holds_for_each_token_of_a_row() -> None:
    """The stop token is what the model likes best at the third place; a draft of it is wrong there while it is masked."""
    stop = TOKENS[2]
    second = next_tokens(PROMPT + TOKENS[:2], VOCAB)[1]
    for min_tokens, expected in ((2, TOKENS[1:4]), (3, [TOKENS[1], second])):
        driver = Drafting(SamplingParams(seed=0, temperature=0.0, min_tokens=min_tokens, stop_token_ids=(stop,)))
        assert driver.speculate([TOKENS[1], stop]) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rules",
    [
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"bad_words_ids": ((TOKENS[1], TOKENS[2]), (TOKENS[3],))},
        {"allowed_token_ids": (5, 6, 7), "logit_bias": ((6, 0.5),)},
    ],
)
def test_rules_see_the_drafts_before_a_position_as_output(rules: dict[str, Any], temperature: float) -> None:
    """What a plain run gives, and wrong drafts in every third place, among them one that repeats the token before it."""
    sampling = SamplingParams(seed=11, temperature=temperature, **rules)
    plain, drafting = Drafting(sampling), Drafting(sampling)
    while len(plain.slot.token_ids) < 6 + 14:
        plain.speculate([], room=0)
    expected = plain.slot.token_ids.tolist()
    accepted = 0
    while len(drafting.slot.token_ids) < 6 + 11:
        known = len(drafting.slot.token_ids)
        right = known % 3
        drafts = [*expected[known : known + right], expected[known + right - 1], expected[known]]
        accepted += len(drafting.speculate(drafts)) - 1
    assert drafting.slot.token_ids.tolist() == expected[: len(drafting.slot.token_ids)]
    assert accepted >= 3


def test_nan_behind_a_wrong_draft_is_nobody_s_fault() -> None:
    driver = Drafting()
    bad = (TOKENS[1] + 1) % VOCAB
    driver.model.nan_after = {bad}
    assert driver.speculate([bad, 0, 0]) == TOKENS[1:2]
    assert driver.speculate([]) == TOKENS[2:3]


def test_tokens_before_a_nan_stand_and_the_next_step_fails_the_row() -> None:
    """As it would be without speculation: the token whose position has the NaN is sampled, and what would follow it is not."""
    driver = Drafting()
    driver.model.nan_after = {TOKENS[2]}
    assert driver.speculate(TOKENS[1:4]) == TOKENS[1:3]
    assert driver.slot.computed_len == 8, "KV with a NaN does not count"
    kept = np.concatenate([block.kv for block in driver.engine.read_blocks(driver.slot.block_table)], axis=2)
    assert kept[:, :, :8].all() and not kept[:, :, 8:].any(), "nor does it lie about"
    output = driver.run([Row(0, 4, 12)], num_decodes=1, seen_step=driver.step)
    assert output.token_counts.tolist() == [0] and "NaN" in output.row_errors[0].message


def test_a_pass_that_fails_with_drafts_is_tried_without() -> None:
    driver = Drafting()
    bad = (TOKENS[1] + 1) % VOCAB
    driver.model.fatal = {bad}
    driver.script.of[0] = [bad]
    output = driver.run([Row(0, 4, 10)], num_decodes=1)
    assert output.row_errors == () and output.token_ids.tolist() == TOKENS[1:2]
    assert not len(output.draft_counts), "nothing was verified"
    assert driver.model.batches[-1].num_decodes == 1
    assert driver.decode(0, 8 + 3) == TOKENS[2], "its room came to nothing"


def test_a_row_that_fails_alone_fails_alone_though_its_neighbour_has_drafts() -> None:
    driver = Drafting()
    driver.model.fatal = {66}
    driver.script.of[0] = TOKENS[1:3]
    output = driver.run([Row(0, 3, 9), Row(1, 2, 2)], [entry(1, [66, 1], [9], "1")], num_decodes=1)
    assert output.token_counts.tolist() == [1, 0] and output.token_ids.tolist() == TOKENS[1:2]
    assert [(error.row, error.message) for error in output.row_errors] == [(1, "RuntimeError: no such token")]


@pytest.mark.parametrize(
    ("row", "changes", "complaint"),
    [
        (Row(0, 5, 11), {}, "row 0 has room for 4 drafts, this worker makes at most 3"),
        (Row(0, 3, 8), {}, "row 0 starts at 5, but slot 0 has computed 6"),
        (Row(0, 4, 28, [9, 10]), {}, "row 0 starts at 24"),
        (
            Row(1, 2, 2),
            {"entries": [entry(1, [1, 2, 3], [9], "x")]},
            "row 0 has room for drafts at 0, but slot 1 holds 3 token ids",
        ),
    ],
)
def test_room_that_does_not_fit_is_refused(row: Row, changes: dict[str, object], complaint: str) -> None:
    driver = Drafting()
    with pytest.raises(BatchRefused, match=complaint):
        driver.run([row], num_decodes=1, **changes)
    assert driver.speculate(TOKENS[1:3]) == TOKENS[1:4], "and nothing has changed"


def test_room_beyond_the_table_or_the_model_is_refused() -> None:
    driver = Drafting()
    driver.run([Row(1, 17, 37)], [entry(1, list(range(37)), list(range(10, 20)), "long", cached=20)], num_decodes=0)
    with pytest.raises(BatchRefused, match="max_model_len is 40"):
        driver.run([Row(1, 4, 41)], num_decodes=1)
    driver.run([Row(2, 6, 6)], [entry(2, PROMPT, [21, 22], "short")], num_decodes=0)
    with pytest.raises(BatchRefused, match="has context_len 9, but its blocks cover 8"):
        driver.run([Row(2, 3, 9)], num_decodes=1)
