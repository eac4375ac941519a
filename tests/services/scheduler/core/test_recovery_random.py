"""The join on random states: what holds whatever the sources say, and what holds when they do not contradict each other."""

import random
from array import array

import numpy as np
import pytest

from services.scheduler.core.record import Arrival, StoredRequest, StoredState
from services.scheduler.core.recovered import Recovered
from services.scheduler.core.recovery import GatewayClaim, join
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.finish import Finish, FinishReason
from tessera.values.model import KVGeometry, ModelInfo, WorkerDescription, WorkerLimits
from tessera.values.report import DroppedSlot, SlotReport, WorkerReport
from tessera.values.request import Submission
from tessera.values.sampling import SamplingParams

BLOCK_SIZE = 2
NUM_BLOCKS = 64
MODEL = ModelInfo("m", "LlamaForCausalLM", 100, 512, (), None, "t", "w")
PROMPT_LEN = 3
WORKERS = ("w", "v")


def stop_rule(submission: Submission, output: tuple[int, ...]) -> Finish | None:
    for length, token_id in enumerate(output, 1):
        if token_id % 10 == 0:
            return Finish(FinishReason.EOS, length, stop_token_id=token_id)
        if length == submission.sampling.max_tokens:
            return Finish(FinishReason.MAX_TOKENS, length)
    return None


class World:
    """Random sources for some requests. `deterministic`: every source holds a beginning of the request's one true output. A worker, which
    knows no stop, may hold up to `overrun` tokens behind that: of the row that found it, and of one behind."""

    def __init__(self, rng: random.Random, deterministic: bool, overrun: int = 0) -> None:
        self.rng = rng
        self.deterministic, self.overrun = deterministic, overrun
        self.submissions: dict[bytes, Submission] = {}
        self.truth: dict[bytes, list[int]] = {}
        self.sampled: dict[bytes, list[int]] = {}  # by a worker
        self.stored = StoredState(rng.randrange(100))
        self.claims: list[GatewayClaim] = []
        self.slots: dict[str, list[SlotReport]] = {worker: [] for worker in WORKERS}
        self.dropped: dict[str, list[DroppedSlot]] = {worker: [] for worker in WORKERS}
        for number in range(rng.randint(1, 5)):
            self._request(bytes([number]) * 16)

    def join(self) -> Recovered:
        return join(self.stored, self.reports(), self.claims, stop_rule)

    def reports(self) -> dict[str, WorkerReport]:
        reports = {}
        for worker in WORKERS:
            boot_id = worker.encode() * 16
            description = WorkerDescription(boot_id, MODEL, KVGeometry(NUM_BLOCKS, BLOCK_SIZE, 1, "f"), WorkerLimits(8, 64))
            written = np.array([self.rng.randrange(10) for _ in range(NUM_BLOCKS)], np.int64)
            reports[worker] = WorkerReport(1, description, 9, tuple(self.slots[worker]), tuple(self.dropped[worker]), written)
        return reports

    def output(self, request_id: bytes, of_worker: bool = False) -> list[int]:
        truth = self.sampled[request_id] if of_worker else self.truth[request_id]
        known = truth[: self.rng.randrange(len(truth) + 1)]
        if not self.deterministic and known and self.rng.random() < 0.3:
            known[self.rng.randrange(len(known))] = self.rng.randrange(100)
        return known

    def _request(self, request_id: bytes) -> None:
        rng = self.rng
        prompt = np.array([rng.randrange(100) for _ in range(PROMPT_LEN)], np.int32)
        submission = Submission(request_id, prompt, SamplingParams(seed=1, max_tokens=rng.randint(1, 12)))
        self.submissions[request_id] = submission
        self.truth[request_id] = [rng.randrange(100) for _ in range(12)]
        finish = stop_rule(submission, tuple(self.truth[request_id]))
        if finish is not None:
            self.sampled[request_id] = self.truth[request_id][: finish.output_len + self.overrun]
            del self.truth[request_id][finish.output_len :]
        else:
            self.sampled[request_id] = self.truth[request_id]
        attempt = rng.randint(1, 3)
        if rng.random() < 0.8:
            self._store(submission, attempt)
        for _ in range(rng.choice((0, 1, 1, 2))):
            self.claims.append(GatewayClaim(request_id, rng.randrange(3), tuple(self.output(request_id))))
        for worker in WORKERS:
            if rng.random() < 0.5:
                self._slot(worker, request_id, attempt + rng.choice((-1, 0, 0, 1)))
            if rng.random() < 0.2:
                self._dropped(worker, request_id, max(1, attempt - 1))

    def _store(self, submission: Submission, attempt: int) -> None:
        output = self.output(submission.request_id)
        finish = stop_rule(submission, tuple(output))
        if finish is None and self.rng.random() < 0.1:
            finish = Finish(FinishReason.ABORTED, len(output))
        status = SequenceStatus.FINISHED if finish else self.rng.choice((SequenceStatus.RUNNING, SequenceStatus.SWAPPED))
        request = StoredRequest(submission, Arrival(1, 1), status, self.rng.randrange(3), attempt, "w", array("i", output))
        request.finish = finish
        self.stored.requests[submission.request_id] = request

    def _slot(self, worker: str, request_id: bytes, attempt: int) -> None:
        slot = len(self.slots[worker])
        tokens = np.array(
            [*self.submissions[request_id].prompt_token_ids.tolist(), *self.output(request_id, of_worker=True)], np.int32
        )
        table = np.arange(slot * 8, slot * 8 + 8, dtype=np.int32)
        computed, is_swapped = self.rng.randrange(len(tokens)), self.rng.random() < 0.3
        self.slots[worker].append(SlotReport(slot, request_id, attempt, PROMPT_LEN, tokens, table, computed, is_swapped))

    def _dropped(self, worker: str, request_id: bytes, attempt: int) -> None:
        tokens = np.array(
            [*self.submissions[request_id].prompt_token_ids.tolist(), *self.output(request_id, of_worker=True)], np.int32
        )
        table = np.arange(48, 56, dtype=np.int32)
        finish = stop_rule(self.submissions[request_id], tuple(tokens[PROMPT_LEN:].tolist()))
        self.dropped[worker].append(DroppedSlot(request_id, attempt, PROMPT_LEN, tokens, table, len(tokens) - 1, finish, 8))

    def sources(self, request_id: bytes) -> list[tuple[int, ...]]:
        """Outputs in the store, in claims, and in slots."""
        found = [claim.token_ids for claim in self.claims if claim.request_id == request_id]
        found.append(tuple(self.stored.requests[request_id].output_token_ids))
        slots = [*self.slots["w"], *self.slots["v"], *self.dropped["w"], *self.dropped["v"]]
        found += [tuple(slot.token_ids[PROMPT_LEN:].tolist()) for slot in slots if slot.request_id == request_id]
        return found


def check_accounts(world: World, recovered: Recovered) -> None:
    """Every live slot is adopted, an orphan or dropped, exactly once; every stored request is recovered; nothing else is."""
    assert [request.submission.request_id for request in recovered.requests] == list(world.stored.requests)
    slots = {(worker, slot.slot): slot for worker in WORKERS for slot in world.slots[worker]}
    adopted = [
        (request.adoption.worker, request.adoption.slot.slot) for request in recovered.requests if request.adoption is not None
    ]
    orphans = [(orphan.worker, orphan.slot.slot) for orphan in recovered.orphans]
    drops = [(drop.worker, drop.slot) for drop in recovered.drops]
    assert sorted(adopted + orphans + drops) == sorted(slots)
    for drop in recovered.drops:
        slot = slots[drop.worker, drop.slot]
        assert (slot.request_id, slot.attempt) == (drop.request_id, drop.attempt)
    assert all(orphan.slot.request_id not in world.stored.requests for orphan in recovered.orphans)


def check_requests(world: World, recovered: Recovered) -> None:
    for request in recovered.requests:
        request_id = request.submission.request_id
        stored = world.stored.requests[request_id]
        output = request.output_token_ids
        claims = [claim for claim in world.claims if claim.request_id == request_id]
        assert output in [source[: len(output)] for source in world.sources(request_id)], "tokens that nobody had"
        assert request.subscriber >= max([stored.subscriber, *(claim.subscriber for claim in claims)])
        assert request.attempt >= stored.attempt
        if request.finish is not None:
            assert request.adoption is None and len(output) == request.finish.output_len
        else:
            longest = max((claim.token_ids for claim in claims), key=len, default=())
            assert output[: len(longest)] == longest, "a client has seen other tokens"
            assert stop_rule(request.submission, output) is None
        if request.adoption is not None:
            slot = request.adoption.slot
            tokens = [*request.submission.prompt_token_ids.tolist(), *output]
            assert request.attempt >= slot.attempt >= stored.attempt
            assert slot.token_ids[: slot.computed_len].tolist() == tokens[: slot.computed_len]


def check_published(world: World, recovered: Recovered) -> None:
    for worker in recovered.workers:
        ids = [block.block_id for block in worker.published]
        assert len(ids) == len(set(ids)) and worker.next_step == 10
        expected = {
            int(slot.block_table[index])
            for slot in world.slots[worker.worker]
            for index in range(slot.computed_len // BLOCK_SIZE)
            if not slot.is_swapped
        }
        assert expected <= set(ids), "a computed block of a live slot is lost"
        dropped = {int(block_id) for slot in world.dropped[worker.worker] for block_id in slot.block_table}
        assert set(ids) <= expected | dropped, "a block of the host pool is taken for one of the pool"


def checked(world: World) -> Recovered:
    """What is joined, of which everything holds that holds for all sources."""
    recovered = world.join()
    check_accounts(world, recovered)
    check_requests(world, recovered)
    check_published(world, recovered)
    return recovered


@pytest.mark.parametrize("seed", range(300))
def test_sources_that_agree_lose_nothing(seed: int) -> None:
    world = World(random.Random(seed), deterministic=True)
    recovered = checked(world)
    assert recovered.num_contradictions == 0
    for request in recovered.requests:
        sources = world.sources(request.submission.request_id)
        if request.finish is None or request.finish.reason is not FinishReason.ABORTED:
            assert len(request.output_token_ids) == max(map(len, sources)), "a token that somebody had is lost"
        stored = world.stored.requests[request.submission.request_id]
        live = [slot for worker in WORKERS for slot in world.slots[worker] if slot.request_id == request.submission.request_id]
        fit = [slot.attempt for slot in live if slot.attempt >= stored.attempt]
        if request.finish is None and fit:
            assert request.adoption is not None, "computed positions are lost"
            assert request.adoption.slot.attempt == max(fit)


@pytest.mark.parametrize("seed", range(300))
def test_sources_that_contradict_each_other_never_mix(seed: int) -> None:
    checked(World(random.Random(seed), deterministic=False))


@pytest.mark.parametrize("seed", range(300, 450))
def test_tokens_of_a_worker_behind_a_stop_are_told_to_nobody(seed: int) -> None:
    """Two rows of four tokens were in flight as the leader died: their reports show a stop, and what was sampled behind it."""
    world = World(random.Random(seed), deterministic=True, overrun=8)
    recovered = checked(world)
    assert recovered.num_contradictions == 0
    for request in recovered.requests:
        if request.finish is not None and request.finish.reason is FinishReason.ABORTED:
            continue
        truth = world.truth[request.submission.request_id]
        most = max(map(len, world.sources(request.submission.request_id)))
        assert request.output_token_ids == tuple(truth[:most]), "a token is lost, or one behind the stop kept"
        assert (request.finish is not None) == (stop_rule(request.submission, request.output_token_ids) is not None)
