"""All requests a scheduler knows, live and finished, and which of them the journal has to hear about."""

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from services.scheduler.core.changes import LaneTokens, decode_columns, is_steady, joined, request_delta
from services.scheduler.core.lane_rows import LaneRows
from services.scheduler.core.record import DecodeColumns, RequestDelta
from services.scheduler.core.sequence import Sequence
from tessera.values.finish import Finish, FinishReason


class RequestBook:
    """Requests by internal id, and by (principal, client's own id): the live one so named, and the one that ended last."""

    __slots__ = (
        "_by_client_id",
        "_decoded",
        "_decoded_ids",
        "_finished",
        "_finished_by_client_id",
        "_forgotten",
        "_in_lanes",
        "_sequences",
        "_touched",
        "num_ended",
        "num_output_tokens",
    )

    def __init__(self) -> None:
        self._sequences: dict[bytes, Sequence] = {}
        self._by_client_id: dict[tuple[str, str], Sequence] = {}
        self._finished: dict[bytes, Sequence] = {}  # in the order in which they ended
        self._finished_by_client_id: dict[tuple[str, str], Sequence] = {}
        self._touched: dict[bytes, Sequence] = {}
        self._decoded: dict[bytes, Sequence] = {}
        self._decoded_ids: tuple[bytes, ...] = ()  # those of the columns told last
        self._in_lanes: list[LaneTokens] = []  # of different workers, none of which told of two outputs
        self._forgotten: list[bytes] = []
        self.num_ended: Counter[FinishReason] = Counter()  # by this scheduler, forgotten ones too
        self.num_output_tokens = 0  # of these

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    @property
    def num_finished(self) -> int:
        """Finished requests that can still be read."""
        return len(self._finished)

    @property
    def num_unfinished(self) -> int:
        """Requests without an end: those that wait, run or are swapped out."""
        return len(self._sequences) - len(self._finished)

    def get(self, request_id: bytes) -> Sequence | None:
        """The request with this internal id."""
        return self._sequences.get(request_id)

    def live_with_client_id(self, principal: str, client_request_id: str) -> Sequence | None:
        """The live request that a principal named so; an empty name names none."""
        return self._by_client_id.get((principal, client_request_id))

    def finished_with_client_id(self, principal: str, client_request_id: str) -> Sequence | None:
        """Of the requests that a principal named so and that can still be read, the one that ended last."""
        return self._finished_by_client_id.get((principal, client_request_id))

    def add(self, sequence: Sequence) -> None:
        """Take in a new or recovered request."""
        assert sequence.request_id not in self._sequences
        self._sequences[sequence.request_id] = sequence
        self.touch(sequence)
        assert not sequence.status.has_ended, "a recovered end is added live, and then ends"
        if sequence.submission.client_request_id:
            self._by_client_id[_name(sequence)] = sequence

    def touch(self, sequence: Sequence) -> None:
        """The journal has to hear about this request."""
        self._touched[sequence.request_id] = sequence

    def decoded(self, sequence: Sequence) -> None:
        """A running request gained an output token; nothing else of it changed but its table."""
        self._decoded[sequence.request_id] = sequence

    def decoded_in_lanes(self, rows: LaneRows, token_offsets: npt.NDArray[np.int32], token_ids: npt.NDArray[np.int32]) -> None:
        """As `decoded` for each of these rows, with their new tokens, int32 `[R]`, at these offsets."""
        told = LaneTokens(rows, token_offsets, token_ids)
        for other in self._in_lanes:
            if other.rows.lanes is rows.lanes:  # two outputs in one turn: no columns
                self._in_lanes.remove(other)
                for sequence in (*other.rows.sequences, *rows.sequences):
                    if sequence.finish is None:
                        self.decoded(sequence)
                return
        self._in_lanes.append(told)

    def ended(self, sequence: Sequence) -> None:
        """A request has its terminal mark: its client id may be used again, and until then names what can still be read."""
        self.touch(sequence)
        self._finished[sequence.request_id] = sequence
        self._count(sequence, 1)
        if sequence.submission.client_request_id:
            if self._by_client_id.get(_name(sequence)) is sequence:
                del self._by_client_id[_name(sequence)]
            self._finished_by_client_id[_name(sequence)] = sequence

    def end_earlier(self, sequence: Sequence, finish: Finish) -> None:
        """A request that has ended turns out to have ended earlier."""
        self._count(sequence, -1)
        sequence.end_earlier(finish)
        self._count(sequence, 1)
        self.touch(sequence)

    def forget_finished(self, ended_before_us: int, is_owed: Callable[[bytes], bool]) -> list[bytes]:
        """Drop requests that ended before this time or at it, except those whose end somebody waits for; returns their ids."""
        dropped = []
        for sequence in self._finished.values():
            if sequence.finished_us > ended_before_us:
                break
            if not is_owed(sequence.request_id):
                dropped.append(sequence)
        for sequence in dropped:
            del self._finished[sequence.request_id], self._sequences[sequence.request_id]
            if self._finished_by_client_id.get(_name(sequence)) is sequence:
                del self._finished_by_client_id[_name(sequence)]
            self._touched.pop(sequence.request_id, None)
            self._decoded.pop(sequence.request_id, None)
        forgotten = [sequence.request_id for sequence in dropped]
        self._forgotten += forgotten
        return forgotten

    def take_changes(self) -> tuple[tuple[RequestDelta, ...], DecodeColumns | None, tuple[bytes, ...]]:
        """What changed since the last call: deltas, columns of requests that only decoded, and ids forgotten."""
        columns = [told.columns() for told in self._take_lanes()]
        steady = []
        for request_id, sequence in self._decoded.items():
            if request_id in self._touched:
                continue
            if is_steady(sequence):
                steady.append(sequence)
            else:
                self._touched[request_id] = sequence
        if steady:
            columns.append(decode_columns(steady))
        requests = tuple(map(request_delta, self._touched.values()))
        forgotten = tuple(self._forgotten)
        self._touched.clear()
        self._decoded.clear()
        self._forgotten.clear()
        decoded = joined(columns, self._decoded_ids)
        self._decoded_ids = decoded.request_ids if decoded is not None else ()
        return requests, decoded, forgotten

    def _take_lanes(self) -> list[LaneTokens]:
        """The outputs in lanes, without requests that are told otherwise."""
        taken, self._in_lanes = self._in_lanes, []
        for at, told in enumerate(taken):
            sequences, left_out = told.rows.sequences, told.rows.left()
            for row in left_out:
                if sequences[row].finish is None:
                    self.decoded(sequences[row])
            if left_out:
                told = taken[at] = told.without(left_out)
                sequences = told.rows.sequences
            for row in told.rows_with_many_blocks():
                self.touch(sequences[row])
            if self._touched or self._decoded or self._forgotten:
                others = self._touched.keys() | self._decoded.keys()
                left_out = {row for row, item in enumerate(sequences) if item.request_id in others}
                if left_out:
                    taken[at] = told.without(left_out)
        return taken

    def check_integrity(self) -> None:
        """Assert that the indexes agree with the requests."""
        for request_id, sequence in self._sequences.items():
            is_finished = sequence.status.has_ended
            assert request_id == sequence.request_id
            assert is_finished == (sequence.finish is not None) == (request_id in self._finished)
            held = self._by_client_id.get(_name(sequence))
            assert not sequence.submission.client_request_id or is_finished == (held is not sequence), (
                "the client id of a live request is free, or of a finished one held"
            )
        assert self._finished.keys() | self._touched.keys() | self._decoded.keys() <= self._sequences.keys()
        for index, is_finished in ((self._by_client_id, False), (self._finished_by_client_id, True)):
            for name, sequence in index.items():
                assert self._sequences[sequence.request_id] is sequence and name == _name(sequence)
                assert is_finished == (sequence.finish is not None)

    def forget_counts(self) -> None:
        """The requests that have ended so far did so under an earlier leader."""
        self.num_ended.clear()
        self.num_output_tokens = 0

    def _count(self, sequence: Sequence, times: int) -> None:
        assert sequence.finish is not None
        self.num_ended[sequence.finish.reason] += times
        self.num_output_tokens += times * sequence.output_len


def _name(sequence: Sequence) -> tuple[str, str]:
    return sequence.submission.principal, sequence.submission.client_request_id
