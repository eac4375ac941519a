"""Tokens that have positions and no ids yet: how many there are, and what they may not count to.

ATOM appends them to a sequence, as many as its table says, and puts the real ids in their place a step later. Here they follow from the lengths
in the ledger: what is in flight can come to so many tokens.
"""

import numpy as np
import pytest
from fake_worker import FakeWorker
from scheduler_rig import WORKER, Rig

from services.scheduler.core.ledger import Ledger
from services.scheduler.core.tokens import Tokens
from tessera.values.config import Config
from tessera.values.finish import FinishReason

PROMPT = [1, 2, 3, 4, 5]


def decoding(k: int, is_deferred: bool) -> Ledger:
    """A sequence that decodes: the prompt is computed, one token sampled; with deferred output its next row is in flight."""
    ledger = Ledger(Tokens(np.array(PROMPT, np.int32)))
    ledger.schedule(len(PROMPT))
    ledger.commit(len(PROMPT), [6])
    if is_deferred:
        ledger.schedule_decode(1 + k)
    return ledger


@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_sequence_that_was_processed_has_a_placeholder_for_the_token_and_each_draft(k: int, is_deferred: bool) -> None:
    """ATOM: always 1 + k, whatever the mode: its next row is on its way, or about to be."""
    ledger = decoding(k, is_deferred)
    if not is_deferred:
        ledger.schedule_decode(1 + k)
    assert ledger.num_placeholders == 1 + k
    ledger.schedule_decode(1 + k)  # the batch behind it
    ledger.commit(1 + k, [7], num_drafts=k)
    assert ledger.num_placeholders == 1 + k, "one output came, the next row is in flight"


@pytest.mark.parametrize(
    ("is_deferred", "k", "atoms"),
    [
        pytest.param(True, 3, 4, id="deferred output and speculation: k + 1"),
        pytest.param(True, 1, 2, id="deferred output and speculation, k = 1"),
        pytest.param(True, 0, 1, id="deferred output only: 1"),
        pytest.param(False, 3, 3, id="speculation only: k"),
        pytest.param(False, 1, 1, id="speculation only, k = 1"),
        pytest.param(False, 0, 0, id="neither: none"),
    ],
)
def test_a_sequence_that_was_skipped_keeps_what_is_in_flight(is_deferred: bool, k: int, atoms: int) -> None:
    """With deferred output its row of an earlier step is in flight. Without nothing is, and ATOM's k placeholders are the drafts that
    its next row computes beyond the last token."""
    ledger = decoding(k, is_deferred)
    if is_deferred:
        assert ledger.num_placeholders == atoms
        return
    assert ledger.num_placeholders == 0
    ledger.schedule_decode(1 + k)
    assert ledger.scheduled_len - ledger.num_tokens == atoms


@pytest.mark.parametrize("k", [0, 1, 3])
def test_after_a_prefill_the_next_row_reaches_as_far_as_atoms_placeholders(k: int) -> None:
    """A sequence whose first token is under way has 1 + k of them in ATOM; here one, and the next row brings its own."""
    ledger = Ledger(Tokens(np.array(PROMPT, np.int32)))
    ledger.schedule(len(PROMPT))
    assert ledger.num_placeholders == 1
    ledger.schedule_decode(1 + k)
    assert ledger.scheduled_len == len(PROMPT) + 1 + k


def test_a_chunk_of_a_prompt_samples_nothing_and_has_no_placeholder() -> None:
    """Case 43."""
    ledger = Ledger(Tokens(np.array(PROMPT, np.int32)))
    ledger.schedule(3)
    assert ledger.num_placeholders == 0
    ledger.commit(3, [])
    assert (ledger.num_placeholders, ledger.num_tokens) == (0, len(PROMPT))


@pytest.mark.parametrize("k", [0, 3])
def test_a_preemption_leaves_no_placeholder_and_all_generated_tokens(k: int) -> None:
    """ATOM strips them, keeps the tokens, and computes all of them again."""
    ledger = decoding(k, is_deferred=True)
    ledger.restart(0)
    assert (ledger.num_placeholders, ledger.positions_in_flight, ledger.drafts_in_flight) == (0, 0, 0)
    assert ledger.token_ids == [*PROMPT, 6] and ledger.num_remaining == len(PROMPT) + 1


def rig_of(**config: object) -> Rig:
    return Rig(Config(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, **config}), FakeWorker(20, 4))


def test_placeholders_are_no_output_and_count_to_no_limit() -> None:
    rig = rig_of()
    rig.submit(1, list(range(10, 14)), max_tokens=2, max_model_length=6)
    rig.schedule()
    rig.schedule()
    sequence = rig.sequence(1)
    assert sequence.ledger.num_placeholders == 2
    assert (sequence.output_len, sequence.finish) == (0, None), "two tokens would be its last, but none is there"
    assert rig.state.requests[sequence.request_id].output_token_ids.tolist() == []
    assert rig.schedule() is None, "what would come behind its last token is not computed"
    rig.post(rig.execute())
    assert (sequence.ledger.num_placeholders, sequence.output_len, sequence.finish) == (1, 1, None)
    rig.post(rig.execute())
    assert rig.reason(1) is FinishReason.MAX_TOKENS and rig.sequence(1).ledger.num_placeholders == 0


def published_tokens(rig: Rig) -> int:
    """How far the KV of all requests is in the prefix cache."""
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None
    return 4 * len(replica.manager.published())


@pytest.mark.parametrize("in_flight", [1, 2])
def test_blocks_are_hashed_over_committed_tokens_only(in_flight: int) -> None:
    """Prompt of 10, generation to 16: 8 tokens are cached after the prefill, 12 and 16 only once their last position is computed."""
    rig = rig_of()
    rig.submit(1, list(range(10, 20)), max_tokens=8)
    watermarks = {}
    while rig.step(in_flight):
        watermarks.setdefault(10 + len(rig.output(1)), published_tokens(rig))
    assert watermarks == {11: 8, 12: 8, 13: 12, 14: 12, 15: 12, 16: 12, 17: 16, 18: 16}
    assert published_tokens(rig) == 16


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_next_turn_of_a_conversation_finds_what_was_generated(in_flight: int) -> None:
    """Prompt of 8, 12 generated: of these 20 the last one's KV is never written, so 16 are cached; a longer answer gives the fifth block."""
    rig = rig_of()
    prompt = list(range(10, 18))
    rig.submit(1, prompt, max_tokens=12)
    rig.submit(2, prompt[1:], max_tokens=14)
    rig.finish_all(in_flight)
    for number, before, cached in ((3, 1, 16), (4, 2, 20)):
        said = rig.sequence(before).submission.prompt_token_ids.tolist() + rig.output(before)
        rig.submit(number, [*said, 60], max_tokens=1)
        rig.finish_all(in_flight)
        assert rig.sequence(number).num_cached_tokens == cached
        rig.assert_as_alone(number)


def test_without_a_cache_nothing_generated_is_hashed() -> None:
    rig = rig_of(enable_prefix_caching=False)
    rig.submit(1, list(range(10, 18)), max_tokens=12)
    rig.finish_all()
    assert published_tokens(rig) == 0
