"""Speculation end to end, in small: the real engine under the real scheduler, drafts that are right and wrong, and what must not change."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from engine_worker import EngineWorker, KnowingProposer, output_alone
from fake_worker import LIMITS, MODEL
from scheduler_rig import IGNORE_EOS, WORKER, Rig, own_stop

from model_worker import engine as engine_module
from model_worker.speculation.ngram import NgramProposer
from services.scheduler.core.recovery import join
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.config import Config
from tessera.values.finish import FinishReason
from tessera.values.identity import Epoch

PROMPT = list(range(10, 17))


def rig_of(k: int = 3, num_blocks: int = 32, right: float = 1.0, block_size: int = 4, host: int = 0, **config: object) -> Rig:
    """As many drafts as there is room for, or fewer; each right with this chance."""
    limits = replace(LIMITS, num_speculative_tokens=k)
    worker = EngineWorker(num_blocks, block_size, limits, host, KnowingProposer(1, right))
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_speculative_tokens": k, **config}
    return Rig(Config(**settings), worker)


def alone(rig: Rig, number: int) -> list[int]:
    """What request `number` gives token by token, as far as it came."""
    sequence = rig.sequence(number)
    prompt = sequence.submission.prompt_token_ids.tolist()
    return output_alone(prompt, len(rig.output(number)), sequence.submission.sampling)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_accepted_drafts_never_overshoot_max_tokens(temperature: float, in_flight: int) -> None:
    """Case 41, for every length that a row of four tokens can end at."""
    for max_tokens in range(1, 10):
        rig = rig_of(block_size=1, num_blocks=64)
        rig.submit(1, PROMPT, max_tokens=max_tokens, temperature=temperature)
        rig.finish_all(in_flight)
        assert rig.output(1) == alone(rig, 1) and len(rig.output(1)) == max_tokens
        assert rig.reason(1) is FinishReason.MAX_TOKENS
        replica = rig.scheduler.replica(WORKER)
        assert replica is not None
        assert len(replica.manager.published()) == len(PROMPT) + max_tokens - 1, "KV of what comes behind is not indexed"


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("stop", range(1, 9))
def test_a_stop_inside_a_row_of_drafts_ends_there(stop: int, in_flight: int) -> None:
    expected = output_alone(PROMPT, 12, IGNORE_EOS)
    length = 1 + expected.index(expected[stop])
    rig = rig_of(k=4)
    rig.submit(1, PROMPT, max_tokens=12, stop_token_ids=(expected[stop],))
    rig.finish_all(in_flight)
    assert (rig.output(1), rig.reason(1)) == (expected[:length], FinishReason.STOP_TOKEN)
    assert rig.free_blocks == 32


@pytest.mark.parametrize(("mode", "host"), [("recompute", 0), ("swap", 12)])
def test_a_late_output_of_a_preempted_sequence_counts_once_or_not_at_all(mode: str, host: int) -> None:
    """Case 43: its row with drafts is in flight when it has to make room. Swapped out it keeps its slot, and the output counts; else it is
    dropped, and what it was is computed again."""
    rig = rig_of(num_blocks=7, right=0.7, host=host, preemption_mode=mode)
    for number in (1, 2):
        rig.submit(number, [token + number for token in PROMPT], max_tokens=17, temperature=0.5, seed=number)
    away, late = (SequenceStatus.WAITING, SequenceStatus.SWAPPED), Counter[str]()
    for _ in range(80):
        while len(rig.worker.queue) < 2 and rig.schedule() is not None:
            pass
        if not rig.worker.queue:
            break
        output = rig.execute()
        before = {number: len(rig.output(number)) for number in (1, 2) if rig.sequence(number).status in away}
        rig.post(output)
        for number, length in before.items():
            late["counted" if len(rig.output(number)) > length else "nothing"] += 1
        assert all(rig.sequence(number).ledger.num_placeholders >= 0 for number in (1, 2))
    assert rig.scheduler.load().num_preemptions and late["nothing"]
    assert (late["counted"] > 0) == (mode == "swap")
    for number in (1, 2):
        assert rig.output(number) == alone(rig, number) and len(rig.output(number)) == 17


def test_a_batch_of_rows_with_and_without_drafts_gives_each_request_its_own() -> None:
    """Case 47, without logprobs: of three requests one is about to end and has no room, a prompt comes late."""
    rig = rig_of(right=0.6)
    rig.submit(1, PROMPT, max_tokens=20, temperature=0.9, seed=5)
    rig.submit(2, PROMPT[:3], max_tokens=2)
    rig.step(2)
    rig.submit(3, PROMPT[2:], max_tokens=9, temperature=0.3, seed=6, fork_of=bytes(15) + b"\1")
    rig.finish_all(2)
    for number, length in ((1, 20), (2, 2), (3, 9)):
        assert rig.output(number) == alone(rig, number) and len(rig.output(number)) == length


def test_two_ranks_accept_the_same_drafts_for_two_hundred_steps() -> None:
    """Case 48: temperature 0.8, k=3. A rank is told the batches alone; both draw with the same noise."""
    rig = rig_of(right=0.7)
    other = EngineWorker(32, 4, rig.worker.limits, 0, KnowingProposer(1, 0.7))
    counts: Counter[int] = Counter()
    numbers = iter(range(1, 1000))
    while sum(counts.values()) < 200:
        if not rig.worker.queue and rig.schedule() is None:
            for number in islice(numbers, 3):
                rig.submit(number, PROMPT[number % 3 :], max_tokens=40, temperature=0.8, seed=number)
            continue
        batch = rig.worker.queue[0]
        mine = rig.execute()
        theirs = other.engine.execute(replace(batch, epoch=mine.epoch))
        for column in ("token_counts", "token_ids", "draft_counts"):
            assert getattr(mine, column).tolist() == getattr(theirs, column).tolist()
        rig.post(mine)
        counts[int(mine.token_counts.max(initial=0))] += 1
    assert min(counts[tokens] for tokens in (1, 2, 3, 4)) > 5, counts


@pytest.mark.parametrize("unheard", [0, 1, 2])
def test_a_new_leader_goes_on_from_what_was_accepted(unheard: int) -> None:
    """The old one dies with batches in flight, of which the worker has executed `unheard`; its report has every token accepted since."""
    rig = rig_of(right=0.7)
    for number in (1, 2):
        rig.submit(number, PROMPT[number:], max_tokens=24, temperature=0.7, seed=number)
    for _ in range(3):
        rig.step(2)
    while len(rig.worker.queue) < 2:
        assert rig.schedule() is not None
    for _ in range(unheard):
        rig.execute()
    heard = {number: len(rig.output(number)) for number in (1, 2)}
    rig.epoch, rig.nonce = Epoch(2, b"next"), 1
    report = rig.worker.attach(rig.epoch, 1)
    rig.scheduler = Scheduler(rig.config, rig.epoch)
    rig.scheduler.restore(join(rig.state, {WORKER: report}, [], own_stop), {WORKER: report}, rig.now_us)
    positions = [slot.computed_len for slot in report.slots]
    for number in (1, 2):
        assert (len(rig.output(number)) > heard[number]) == (unheard > 0)
        assert rig.sequence(number).ledger.computed_len == positions[number - 1], "nothing is computed again"
    rig.take_every = 1 << 30  # the records begin anew
    rig.finish_all(2)
    for number in (1, 2):
        assert rig.output(number) == alone(rig, number) and len(rig.output(number)) == 24


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_prompt_lookup_changes_no_token_and_finds_what_repeats(temperature: float) -> None:
    """The model repeats itself by chance alone, so the worker is told a vocabulary of two."""
    model = replace(MODEL, vocab_size=2, eos_token_ids=())
    outputs = []
    for k in (0, 3):
        limits, proposer = replace(LIMITS, num_speculative_tokens=k), NgramProposer(1, 4) if k else None
        worker = EngineWorker(32, 4, limits, 0, proposer, model)
        rig = Rig(Config(max_num_seqs=4, max_num_batched_tokens=64, num_speculative_tokens=k), worker)
        for number in (1, 2, 3):
            rig.submit(number, [number % 2, 1, 0], max_tokens=40, temperature=temperature, seed=number)
        rig.finish_all(2)
        outputs.append([rig.output(number) for number in (1, 2, 3)])
    assert outputs[0] == outputs[1]
    assert 0 < rig.scheduler.spec_stats.num_accepted < rig.scheduler.spec_stats.num_drafts


def accept_everything(targets: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """A defect: whatever was drafted stands."""
    return targets


def accept_one_too_many(targets: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """A defect: the token behind the first wrong draft stands as well."""
    right = np.logical_and.accumulate(targets[:, :-1] == drafts, axis=1)
    late = np.concatenate((np.ones((len(targets), min(2, targets.shape[1])), np.bool_), right[:, :-1]), axis=1)
    return np.where(late[:, : targets.shape[1]], targets, -1)


@pytest.mark.parametrize("defect", [accept_everything, accept_one_too_many])
def test_a_wrong_draft_that_is_accepted_is_found(defect: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "accepted", defect)
    rig = rig_of(right=0.5)
    rig.submit(1, PROMPT, max_tokens=24)
    rig.finish_all(2)
    assert rig.output(1) != alone(rig, 1)
