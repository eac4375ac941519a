"""Steady steps through the streams: whole columns at once, and never anything else than request by request."""

import random
from array import array
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pytest

from services.scheduler.core.committed_output import CommittedOutput
from services.scheduler.core.record import Arrival, DecodeColumns, Record, RequestDelta
from services.scheduler.core.sequence_status import SequenceStatus
from services.scheduler.core.stream_columns import StreamColumns
from services.scheduler.core.streams import SHOWN_MAX, Streams
from tessera.values.config import Config
from tessera.values.finish import Finish, FinishReason
from tessera.values.logprobs import Logprobs, joined_logprobs, no_logprobs
from tessera.values.output_columns import OutputColumns
from tessera.values.request import RequestOutput, RequestTimings, Submission
from tessera.values.sampling import SamplingParams

IDS = tuple(bytes([number]) * 16 for number in range(6))
NONE = np.zeros(0, np.int32)


def logprobs_of(token_ids: Sequence[int]) -> Logprobs:
    """Two entries a token, which tell what it is."""
    ids = np.repeat(np.array(token_ids, np.int32), 2)
    counts, ranks = np.full(len(token_ids), 2, np.int32), np.array(token_ids, np.int32) + 1
    return Logprobs(counts, ids, (-ids / 8).astype(np.float32), ranks)


class Desk:
    """Outputs of `IDS`, whose records are made here, and the streams under test. Those of `wanting` want log-probabilities."""

    def __init__(self, wanting: Collection[bytes] = ()) -> None:
        self.wanting = wanting
        self.outputs = {request_id: array("i") for request_id in IDS}
        self.num_read = 0
        self.number = 0
        self.streams: Streams[str] = Streams(Config(), self._read)

    def _read(self, request_id: bytes, first: int, end: int) -> CommittedOutput:
        self.num_read += 1
        token_ids = tuple(self.outputs[request_id][first:end])
        return CommittedOutput(token_ids, self.logprobs(request_id, token_ids))

    def logprobs(self, request_id: bytes, token_ids: Sequence[int]) -> Logprobs | None:
        return logprobs_of(token_ids) if request_id in self.wanting and token_ids else None

    def _record(self, **fields: Any) -> None:
        self.number += 1
        self.streams.add(Record(self.number, **fields), 0)

    def decode(self, ids: tuple[bytes, ...], token_id: int) -> None:
        """One more token for each."""
        offsets = np.array([len(self.outputs[request_id]) for request_id in ids], np.int32)
        token_ids = np.arange(token_id, token_id + len(ids), dtype=np.int32)
        for request_id, sampled in zip(ids, token_ids.tolist(), strict=True):
            self.outputs[request_id].append(sampled)
        told = [self.logprobs(request_id, [sampled]) for request_id, sampled in zip(ids, token_ids.tolist(), strict=True)]
        logprobs = joined_logprobs([one or no_logprobs(1) for one in told]) if any(told) else None
        self._record(decoded=DecodeColumns(ids, offsets, token_ids, NONE, NONE, NONE, logprobs))

    def tell(
        self, request_id: bytes, offset: int, token_ids: list[int], finish: Finish | None = None, subscriber: int = 0
    ) -> None:
        """A delta that replaces the output from `offset` on."""
        self.outputs[request_id][offset:] = array("i", token_ids)
        status = SequenceStatus.RUNNING if finish is None else SequenceStatus.FINISHED
        submission = Submission(request_id, np.zeros(1, np.int32), SamplingParams(seed=0))
        timings, arrival = RequestTimings(1, 2, 3), Arrival(1, 1)
        told = RequestDelta(
            request_id, status, subscriber, 1, "", offset, tuple(token_ids), 0, (), 0, finish, timings, submission, arrival
        )
        self._record(requests=(told,))

    def forget(self, request_id: bytes) -> None:
        self._record(forgotten=(request_id,))

    def show(self) -> None:
        self.streams.release(self.number, is_durable=True)


@pytest.fixture
def desk() -> Desk:
    """Requests 0 to 3 stream to session "a", 4 and 5 to "b"."""
    return opened()


def opened(wanting: Collection[bytes] = ()) -> Desk:
    desk = Desk(wanting)
    for number, request_id in enumerate(IDS):
        desk.streams.claim("a" if number < 4 else "b", request_id, number, 0)
        desk.tell(request_id, 0, [])
    desk.show()
    return desk


def test_a_steady_step_is_sent_without_reading_any_output(desk: Desk) -> None:
    desk.decode(IDS, 100)
    desk.show()
    assert desk.streams.due_sessions == ["a", "b"]
    frame = desk.streams.take_frame("a")
    assert isinstance(frame, OutputColumns)
    assert frame == [RequestOutput(IDS[number], number, 0, (100 + number,)) for number in range(4)]
    assert desk.streams.take_frame("b") == [RequestOutput(IDS[4], 4, 0, (104,)), RequestOutput(IDS[5], 5, 0, (105,))]
    assert desk.streams.take_frame("a") == [] and desk.streams.due_sessions == []
    assert desk.num_read == 0


def test_steps_acknowledged_together_are_sent_together(desk: Desk) -> None:
    for token_id in (10, 20, 30):
        desk.decode(IDS, token_id)
    desk.show()
    assert desk.streams.take_frame("b") == [
        RequestOutput(IDS[4], 4, 0, (14, 24, 34)),
        RequestOutput(IDS[5], 5, 0, (15, 25, 35)),
    ]
    assert desk.num_read == 0


def test_log_probabilities_go_with_their_tokens_in_a_steady_step() -> None:
    desk = opened((IDS[1], IDS[3]))
    for token_id in (10, 20):
        desk.decode(IDS, token_id)
        desk.show()
    assert desk.streams.take_frame("a") == [
        RequestOutput(IDS[0], 0, 0, (10, 20)),
        RequestOutput(IDS[1], 1, 0, (11, 21), logprobs=logprobs_of((11, 21))),
        RequestOutput(IDS[2], 2, 0, (12, 22)),
        RequestOutput(IDS[3], 3, 0, (13, 23), logprobs=logprobs_of((13, 23))),
    ]
    frame = desk.streams.take_frame("b")
    assert isinstance(frame, OutputColumns) and all(output.logprobs is None for output in frame)
    assert desk.num_read == 0


def test_who_ends_beside_a_steady_step_is_sent_its_end_and_the_others_theirs(desk: Desk) -> None:
    desk.decode(IDS, 10)
    finish = Finish(FinishReason.MAX_TOKENS, 2)
    desk.tell(IDS[1], 1, [7], finish)
    desk.show()
    frame = desk.streams.take_frame("a")
    assert [output.token_ids for output in frame] == [(10,), (12,), (13,), (11, 7)]
    assert [output.finish for output in frame] == [None, None, None, finish]


def test_a_step_shown_before_a_claim_moves_with_it(desk: Desk) -> None:
    desk.decode(IDS, 10)
    desk.show()
    desk.streams.claim("b", IDS[0], 7, 0)
    assert [output.request_id for output in desk.streams.take_frame("a")] == list(IDS[1:4])
    outputs = {output.request_id: output for output in desk.streams.take_frame("b")}
    assert outputs.keys() == {IDS[0], IDS[4], IDS[5]} and outputs[IDS[0]] == RequestOutput(IDS[0], 7, 0, (10,))


def test_a_step_whose_output_is_replaced_before_it_is_sent_is_not_sent(desk: Desk) -> None:
    desk.decode(IDS, 10)
    desk.show()
    desk.tell(IDS[2], 0, [99])
    assert [output.request_id for output in desk.streams.take_frame("a")] == [IDS[0], IDS[1], IDS[3]]
    desk.show()
    assert desk.streams.take_frame("a") == [RequestOutput(IDS[2], 2, 0, (99,))]


def test_a_step_is_sent_to_the_latest_subscriber(desk: Desk) -> None:
    desk.decode(IDS, 10)
    desk.show()
    desk.tell(IDS[5], 1, [], subscriber=9)
    assert [output.subscriber for output in desk.streams.take_frame("b")] == [4, 9]


def test_of_a_gateway_that_does_not_read_a_cursor_is_all_that_is_kept(desk: Desk) -> None:
    for step in range(3 * SHOWN_MAX):
        desk.decode(IDS, 10 * step)
        desk.show()
        assert len(desk.streams._shown["b"]) <= SHOWN_MAX
    (first, second) = desk.streams.take_frame("b")
    assert first.token_ids == tuple(10 * step + 4 for step in range(3 * SHOWN_MAX))
    assert second.token_ids == tuple(10 * step + 5 for step in range(3 * SHOWN_MAX))


def test_rows_of_the_columns_are_used_again_and_begin_at_nothing() -> None:
    columns = StreamColumns()
    rows = [columns.add() for _ in range(200)]
    assert len(set(rows)) == 200
    columns.told[rows] = columns.cursor[rows] = 5
    columns.remove(rows[3])
    assert columns.add() == rows[3] and columns.told[rows[3]] == columns.cursor[rows[3]] == 0
    assert columns.told[rows[199]] == 5


@pytest.mark.parametrize("seed", range(60))
def test_any_mixture_of_steps_and_moves_gives_each_client_the_output_once(seed: int) -> None:
    """Steady runs, acknowledged late and together, beside ends, claims elsewhere, outputs cut where nobody has seen them, and forgetting."""
    rng = random.Random(seed)
    desk = opened(((), IDS[1:5:2], IDS)[seed % 3])
    session = {request_id: "a" if number < 4 else "b" for number, request_id in enumerate(IDS)}
    seen: dict[bytes, list[int]] = {request_id: [] for request_id in IDS}
    subscriber = {request_id: number for number, request_id in enumerate(IDS)}
    live, steady, ended = list(IDS), IDS, set()
    acked = desk.number

    def take(name: str) -> None:
        outputs = list(desk.streams.take_frame(name))
        assert len({output.request_id for output in outputs}) == len(outputs), "two outputs of one request"
        for output in outputs:
            assert session[output.request_id] == name and output.subscriber == subscriber[output.request_id]
            assert output.token_offset == len(seen[output.request_id]), "a gap, or something twice"
            seen[output.request_id].extend(output.token_ids)
            assert output.logprobs == desk.logprobs(output.request_id, output.token_ids)
            if output.finish is not None:
                assert output.request_id not in ended
                ended.add(output.request_id)

    for step in range(150):
        move = rng.random()
        if move < 0.6 and live:
            desk.decode(steady, 1000 * step)
        elif move < 0.65 and live:
            steady = tuple(rng.sample(live, rng.randint(1, len(live))))
        elif move < 0.75:
            request_id, name = rng.choice(IDS), rng.choice("abc")
            if request_id not in ended:
                subscriber[request_id] += 1
                desk.streams.claim(name, request_id, subscriber[request_id], len(seen[request_id]))
                session[request_id] = name
        elif move < 0.8 and live:
            request_id = rng.choice(live)
            kept = rng.randint(len(seen[request_id]), len(desk.outputs[request_id]))
            desk.tell(request_id, kept, [rng.randrange(1000) for _ in range(rng.randint(0, 2))])
        elif move < 0.82 and len(live) > 1:
            request_id = live.pop(rng.randrange(len(live)))
            steady = tuple(live)
            count = len(desk.outputs[request_id])
            desk.tell(request_id, count, [5], Finish(FinishReason.EOS, count + 1))
        if rng.random() < 0.5:
            acked = rng.randint(acked, desk.number)
            desk.streams.release(acked, is_durable=True)
        if rng.random() < 0.6:
            take(rng.choice("abc"))
    desk.show()
    for name in "abc":
        take(name)
    assert {request_id: list(output) for request_id, output in desk.outputs.items()} == seen
    assert ended == set(IDS) - set(live)
    for request_id in ended:
        desk.forget(request_id)
    desk.decode(tuple(live), 7)
    desk.show()
    assert sum(len(desk.streams.take_frame(name)) for name in "abc") == len(live)
