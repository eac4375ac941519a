"""A draft model follows the model it drafts for: it computes every position once, also those that its drafts were right about."""

import numpy as np
import pytest
from engine_driver import DRAFTS_MAX, MAX_LEN, PROMPT, VOCAB, EngineDriver, Row, continuation, drop, entry
from torch import Tensor

from model_worker.batch import Batch
from model_worker.kv_pool import KVPool
from model_worker.kv_shape import KVShape
from model_worker.models.deterministic import DeterministicLM, deterministic_config
from model_worker.sampler import Sampler
from model_worker.speculation.draft_draws import DraftDraws
from model_worker.speculation.draft_model import DraftModelProposer
from tessera.values.sampling import SamplingParams

TOKENS = continuation(PROMPT, 16)
TABLE = [7, 2, 4, 5, 6, 8]


class DraftLM(DeterministicLM):
    """Notes how many positions each pass has. It knows better than the model at the positions `wrong_at`."""

    def __init__(self) -> None:
        super().__init__(deterministic_config(VOCAB, MAX_LEN))
        self.passes: list[int] = []
        self.wrong_at: set[int] = set()
        self.fails = False

    def forward(self, batch: Batch, kv: KVPool) -> Tensor:
        if self.fails:
            raise RuntimeError("out of order")
        self.passes.append(batch.num_tokens)
        logits = super().forward(batch, kv)
        for row, position in enumerate(batch.positions[batch.logits_rows].tolist()):
            if position in self.wrong_at:
                logits[row] = logits[row].roll(1)
        return logits


class FollowedDriver(EngineDriver):
    """The deterministic model, whose tokens depend on all KV, and itself as its draft model."""

    def __init__(self, sampling: SamplingParams | None = None) -> None:
        self.draft = DraftLM()
        super().__init__(
            paired=KVShape(1, 1, 1), make=lambda kv: DraftModelProposer(self.draft, kv, 8, DraftDraws(Sampler(())))
        )
        changes = {} if sampling is None else {"sampling": sampling}
        self.run([Row(0, 4, 4)], [entry(0, PROMPT, TABLE, **changes)], num_decodes=0)
        self.run([Row(0, 2, 6)], num_decodes=0)

    def speculate(self, room: int = DRAFTS_MAX) -> tuple[list[int], list[int]]:
        """One row with this room: its tokens, and the positions of the draft model's passes."""
        self.draft.passes = []
        computed = self.engine.report(1).slots[0].computed_len
        output = self.run([Row(0, 1 + room, computed + 1 + room)], num_decodes=1, seen_step=self.step)
        return output.token_ids.tolist(), self.draft.passes


def test_a_prompt_is_followed_in_the_chunks_it_comes_in() -> None:
    assert FollowedDriver().draft.passes == [4, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_drafts_of_the_same_model_are_right_and_only_the_last_one_is_left_to_compute(temperature: float) -> None:
    driver = FollowedDriver(SamplingParams(seed=3, temperature=temperature, frequency_penalty=0.5))
    for _ in range(3):
        tokens, passes = driver.speculate()
        assert len(tokens) == 1 + DRAFTS_MAX
        assert passes == [1, 1, 1, 1], "three to draft, and the position of the third draft"


def test_behind_a_wrong_draft_nothing_is_left_to_compute() -> None:
    driver = FollowedDriver()
    driver.draft.wrong_at = {7}
    assert driver.speculate() == (TOKENS[1:3], [1, 1, 1]), "the second draft is wrong"
    driver.draft.wrong_at = set()
    assert driver.speculate() == (TOKENS[3:7], [1, 1, 1, 1]), "what it drafted behind that is computed anew"


def test_a_row_without_room_is_followed_too() -> None:
    driver = FollowedDriver()
    assert driver.speculate(room=0) == (TOKENS[1:2], [1])
    assert driver.speculate() == (TOKENS[2:6], [1, 1, 1, 1])


def test_who_enters_behind_shared_blocks_is_drafted_for_at_once() -> None:
    """Its first row is one position of the prompt, with room behind it."""
    driver = FollowedDriver()
    driver.run([Row(0, 1, 7)])
    ids = PROMPT + TOKENS[:2]
    table = [7, 2, 9]
    driver.run([Row(0, 1, 8)])
    output = driver.run([Row(1, 4, 12)], [entry(1, [*ids, TOKENS[2]], table, "other", cached=8)], num_decodes=1)
    assert output.token_ids.tolist() == TOKENS[3:7] and output.draft_counts.tolist() == [3]


def test_a_draft_model_that_fails_costs_drafts_and_no_token() -> None:
    driver = FollowedDriver()
    driver.draft.fails = True
    assert driver.speculate() == (TOKENS[1:2], [])
    driver.draft.fails = False
    tokens, passes = driver.speculate()
    assert tokens[0] == TOKENS[2] and len(passes) >= DRAFTS_MAX, "it has missed a position, and drafts from what it has"
    driver.run(drops=[drop(0)], durable_step=driver.step)
    driver.run([Row(0, 8, 8)], [entry(0, PROMPT + TOKENS[:2], TABLE, "again", attempt=2)], num_decodes=0)
    assert driver.speculate() == (TOKENS[3:7], [1, 1, 1, 1]), "computed again, it is whole again"


def test_rooms_of_several_rows_may_differ() -> None:
    driver = FollowedDriver()
    driver.run([Row(1, 2, 2)], [entry(1, [8, 9], [10, 11], "1")], num_decodes=0)
    driver.draft.passes = []
    output = driver.run([Row(0, 4, 10), Row(1, 2, 4)], num_decodes=2)
    assert output.token_ids.tolist() == TOKENS[1:5] + continuation([8, 9], 3)[1:]
    assert driver.draft.passes == [2, 1, 1, 2], "both, then one; both have accepted their last draft"
    assert np.array_equal(output.draft_counts, [3, 1])
