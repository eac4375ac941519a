"""Requests that end by their own tokens, seen through the whole scheduler: in any schedule, at the same token, for the same reason."""

from dataclasses import replace

import pytest
from fake_worker import LIMITS, MODEL, FakeWorker, reference_output
from scheduler_rig import WORKER, Rig, submission

from services.scheduler.core.admission import Admitted, RefusalReason, Refused
from services.scheduler.core.worker_loss import LossKind, WorkerLoss
from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason
from tessera.values.sampling import SamplingParams

ID = (1).to_bytes(16, "big")
PROMPT = list(range(10, 17))
FREELY, _ = reference_output(submission(1, PROMPT, SamplingParams(seed=7, max_tokens=30, ignore_eos=True)), 1 << 20)
"""What the model says to the prompt if nothing stops it."""


def first_at(index: int) -> int:
    """A token that comes at this index of the output and not before."""
    token_id = FREELY[index]
    assert token_id not in FREELY[:index] and token_id not in MODEL.eos_token_ids
    return token_id


def rig_of(num_blocks: int = 40, num_drafts: int = 0, **config: object) -> Rig:
    """With a worker that proposes up to `num_drafts` tokens per step, some of which are right."""
    given = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_speculative_tokens": num_drafts, **config}
    limits = replace(LIMITS, num_speculative_tokens=num_drafts)
    return Rig(Config(**given), FakeWorker(num_blocks, 4, limits))


STOPS = {
    "a stop token sequence": ({"stop_token_sequences": (tuple(FREELY[3:6]),)}, Finish(FinishReason.STOP_SEQUENCE, 6)),
    "the sequence that is complete first": (
        {"stop_token_sequences": (tuple(FREELY[2:7]), tuple(FREELY[4:6]))},
        Finish(FinishReason.STOP_SEQUENCE, 6),
    ),
    "a stop token": (
        {"stop_token_ids": (first_at(4), FREELY[9])},
        Finish(FinishReason.STOP_TOKEN, 5, stop_token_id=FREELY[4]),
    ),
    "a sequence before a stop token at the same place": (
        {"stop_token_sequences": (tuple(FREELY[3:5]),), "stop_token_ids": (first_at(4),)},
        Finish(FinishReason.STOP_SEQUENCE, 5),
    ),
    "a stop token before max_tokens at the same place": (
        {"max_tokens": 5, "stop_token_ids": (first_at(4),)},
        Finish(FinishReason.STOP_TOKEN, 5, stop_token_id=FREELY[4]),
    ),
    "max_tokens": ({"max_tokens": 5}, Finish(FinishReason.MAX_TOKENS, 5)),
    "max_tokens of one": ({"max_tokens": 1}, Finish(FinishReason.MAX_TOKENS, 1)),
    "the request's own length": ({"max_model_length": 12}, Finish(FinishReason.MAX_MODEL_LEN, 5)),
    "max_tokens before the same length": ({"max_tokens": 5, "max_model_length": 12}, Finish(FinishReason.MAX_TOKENS, 5)),
}
DISTURBANCES = ("none", "preempted", "stream broke", "worker died", "worker lost")


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_it_ends_at_the_same_token_whatever_happens_on_the_way(
    stop: str, num_drafts: int, in_flight: int, disturbance: str
) -> None:
    """Cases 41, 50, 55, 56, 83: the tail of a stop sequence, min_tokens and limits are functions of the committed tokens."""
    given, expected = STOPS[stop]
    rig = rig_of(num_drafts=num_drafts)
    rig.submit(1, PROMPT, **{"max_tokens": 30, **given})
    for _ in range(2 if num_drafts else 4):
        rig.step(in_flight)
    disturb(rig, disturbance)
    rig.finish_all(in_flight)
    assert (rig.sequence(1).finish, rig.output(1)) == (expected, FREELY[: expected.output_len])
    assert list(rig.state.requests[ID].output_token_ids) == FREELY[: expected.output_len]
    assert rig.free_blocks == 40 and not rig.worker.slots


def disturb(rig: Rig, disturbance: str) -> None:
    """Something in the middle of an answer."""
    if disturbance == "preempted" and rig.sequence(1).slot is not None:
        rig.scheduler._lifecycle.send_back(rig.sequence(1))
        rig.check()
    elif disturbance == "stream broke":
        rig.attach()
    elif disturbance == "worker died":
        rig.worker.restart()
        rig.attach()
    elif disturbance == "worker lost":
        rig.scheduler.lose_worker(WORKER, WorkerLoss(LossKind.BROKEN, text="gone"), rig.now_us)
        rig.check()
        rig.attach()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_drafts_beyond_max_tokens_are_neither_told_nor_counted_nor_cached(in_flight: int) -> None:
    """Case 41: max_tokens 2, all three drafts accepted in one step."""
    rig = rig_of(num_drafts=3)
    rig.worker.propose = lambda room: (room, room)
    rig.submit(1, PROMPT, max_tokens=2)
    rig.finish_all(in_flight)
    assert (rig.output(1), rig.sequence(1).finish) == (FREELY[:2], Finish(FinishReason.MAX_TOKENS, 2))
    load = rig.scheduler.load()
    assert (load.num_output_tokens, load.num_ended) == (2, {"max_tokens": 1})
    replica = rig.scheduler.replica(WORKER)
    assert replica is not None and len(replica.manager.published()) == 2, "7 prompt tokens and one of the output"


def test_a_stop_among_accepted_drafts_cuts_the_rest() -> None:
    rig = rig_of(num_drafts=3)
    rig.worker.propose = lambda room: (room, room)
    rig.submit(1, PROMPT, max_tokens=30, stop_token_ids=(first_at(2),))
    rig.finish_all(in_flight=2)
    assert rig.output(1) == FREELY[:3], "the third of four tokens of a step"
    assert rig.sequence(1).finish == Finish(FinishReason.STOP_TOKEN, 3, stop_token_id=FREELY[2])


@pytest.mark.parametrize("eos_id", MODEL.eos_token_ids)
def test_an_eos_id_of_the_model_ends_it_or_not_as_asked(eos_id: int) -> None:
    """Case 50: the model names two. Ignored, it goes on; among the request's own stop ids, it stops all the same."""
    prompt = next(
        prompt for prompt in ([first, second, 12] for first in range(64) for second in range(64)) if said_to(prompt) == eos_id
    )
    rig = rig_of()
    rig.submit(1, prompt, max_tokens=6, ignore_eos=False)
    rig.submit(2, prompt, max_tokens=6)
    rig.submit(3, prompt, max_tokens=6, stop_token_ids=(eos_id,))
    rig.submit(4, prompt, max_tokens=6, ignore_eos=False, min_tokens=3)
    rig.finish_all(in_flight=2)
    assert rig.sequence(1).finish == Finish(FinishReason.EOS, 1, stop_token_id=eos_id)
    assert rig.output(2)[0] == eos_id and len(rig.output(2)) == 6
    finish = rig.sequence(3).finish
    assert finish == Finish(FinishReason.STOP_TOKEN, 1, stop_token_id=eos_id) and finish.label == f"stop_{eos_id}"
    assert not {*MODEL.eos_token_ids} & {*rig.output(4)[:3]}, "masked until there are min_tokens"
    for number in (1, 2, 3, 4):
        rig.assert_as_alone(number)


def said_to(prompt: list[int]) -> int:
    """The token that the model says first."""
    return reference_output(submission(1, prompt, SamplingParams(seed=7, max_tokens=1, ignore_eos=True)), 1 << 20)[0][0]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_sequence_that_outgrows_the_pool_alone_ends_by_length(in_flight: int) -> None:
    """Case 26: 2 blocks of 4, 7 prompt tokens, max_tokens 10. The last token needs no KV, so the answer has two."""
    rig = rig_of(2)
    rig.submit(1, PROMPT, max_tokens=10)
    rig.finish_all(in_flight)
    assert rig.sequence(1).finish == Finish(FinishReason.MAX_MODEL_LEN, 2) and rig.output(1) == FREELY[:2]
    assert rig.free_blocks == 2
    rig.submit(2, [10], max_tokens=1)
    rig.finish_all(in_flight)
    rig.assert_as_alone(2)


def test_a_request_that_moves_gets_what_is_left_of_its_answer() -> None:
    """Case 84: max_tokens 10, 4 delivered elsewhere. The prompt stays the prompt, and the answer has 10 tokens in all."""
    rig = rig_of()
    request = submission(1, PROMPT, SamplingParams(seed=7, max_tokens=10, ignore_eos=True))
    assert isinstance(rig.scheduler.submit(request, 1, tuple(FREELY[:4]), rig.now_us), Admitted)
    rig.check()
    rig.finish_all()
    sequence = rig.sequence(1)
    assert (rig.output(1), sequence.finish) == (FREELY[:10], Finish(FinishReason.MAX_TOKENS, 10))
    assert sequence.ledger.prompt_len == len(PROMPT)
    (entry,) = rig.batches[0].entries
    assert (entry.prompt_len, len(entry.token_ids)) == (len(PROMPT), len(PROMPT) + 4)


@pytest.mark.parametrize("own_cap", [0, 12])
def test_a_moved_request_at_its_length_ends_by_length_and_is_not_refused(own_cap: int) -> None:
    """Case 84: prompt and delivered tokens leave no room."""
    prompt, delivered = ([11] * 60, (40, 41, 42, 43)) if not own_cap else (PROMPT, (40, 41, 42, 43, 44))
    rig = rig_of()
    request = submission(1, prompt, SamplingParams(seed=7, max_tokens=10, ignore_eos=True), max_model_length=own_cap)
    assert isinstance(rig.scheduler.submit(request, 1, delivered, rig.now_us), Admitted)
    rig.check()
    assert rig.sequence(1).finish == Finish(FinishReason.MAX_MODEL_LEN, len(delivered))
    assert rig.schedule() is None and rig.free_blocks == 40


def test_every_limit_names_what_broke_it_and_by_how_much() -> None:
    """ATOM's `unschedulable` reasons, told at once: beyond the model, the pool, a whole step, the request's own cap."""
    for prompt_len, config, given, numbers in (
        (64, {}, {}, ("64", "63")),
        (17, {"num_blocks": 4}, {}, ("17", "16")),
        (17, {"enable_chunked_prefill": False}, {}, ("17", "16")),
        (9, {}, {"max_model_length": 9}, ("9", "max_model_length of 9")),
    ):
        rig = rig_of(**config)
        refused = rig.try_submit(1, [11] * prompt_len, **given)
        assert isinstance(refused, Refused) and refused.reason is RefusalReason.TOO_LONG
        assert refused.retry_after_ms == 0 and all(number in refused.message for number in numbers), refused.message
        assert not rig.scheduler.has_unfinished
