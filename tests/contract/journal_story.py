"""Random but lawful histories of requests and blocks, as the changes a scheduler would hand to its journal."""

import random
from dataclasses import dataclass, field, fields

import numpy as np

from kv_manager.published_block import PublishedBlock
from services.scheduler.core.changes import Changes
from services.scheduler.core.record import Arrival, BlockDelta, DecodeColumns, RequestDelta, StoredState
from services.scheduler.core.sequence_status import SequenceStatus
from tessera.values.finish import Finish, FinishReason
from tessera.values.logprobs import Logprobs, joined_logprobs, no_logprobs
from tessera.values.request import DetokenizeOptions, RequestTimings, Submission
from tessera.values.sampling import SamplingParams

WORKERS = ("10.0.0.1:7000", "10.0.0.2:7000")
BLOCK_SIZE = 4


def submission(request_id: bytes, prompt_len: int = 5) -> Submission:
    """A request with recognizable contents in every field."""
    return Submission(
        request_id=request_id,
        prompt_token_ids=np.arange(prompt_len, dtype=np.int32) + request_id[0],
        sampling=SamplingParams(seed=7, temperature=0.5, stop_token_ids=(3,), stop_token_sequences=((1, 2), (4,))),
        detokenize=DetokenizeOptions(("stop", "\n"), True, False),
        client_request_id=f"client-{request_id[0]}",
        principal="someone",
        priority=-1,
        cache_salt=f"tenant-{request_id[0]}",
        max_model_length=1 + request_id[0],
        fork_of=bytes(reversed(request_id)),
        is_seed_given=True,
        trace_context=f"trace-{request_id[0]}",
    )


def logprobs_of(request_id: bytes, output: list[int], first: int) -> Logprobs | None:
    """Those of a request's tokens from `first` on: every other request wants some, and some tokens have none."""
    if request_id[0] % 2:
        return None
    tokens = output[first:]
    counts = np.array([token % 4 for token in tokens], np.int32)
    ids = np.array([token + at for token in tokens for at in range(token % 4)], np.int32)
    return Logprobs(counts, ids, (-ids / 7).astype(np.float32), counts + 1)


def facts(state: StoredState) -> dict[str, object]:
    """`state` as plain values that can be compared."""
    return {
        "last": state.last,
        "requests": {
            request_id: (
                request.submission.prompt_token_ids.tolist(),
                *(getattr(request.submission, field.name) for field in fields(Submission) if field.name != "prompt_token_ids"),
                request.arrival,
                request.status,
                request.subscriber,
                request.attempt,
                request.worker,
                request.output_token_ids.tolist(),
                request.block_ids.tolist(),
                request.num_cached_tokens,
                request.finish,
                request.timings,
                request.tokens_max,
                request.logprobs.read(0, len(request.output_token_ids)) if request.logprobs is not None else None,
                request.prompt_logprobs,
            )
            for request_id, request in state.requests.items()
        },
        "blocks": {
            boot: {entry.block_id: entry for entry in blocks.values()} for boot, blocks in state.blocks.items() if len(blocks)
        },
    }


@dataclass
class _Live:
    arrival: Arrival
    status: SequenceStatus = SequenceStatus.WAITING
    worker: str = ""
    attempt: int = 0
    subscriber: int = 0
    output: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    told_tokens: int = 0
    told_blocks: int = 0
    is_prompt_told: bool = False
    finish: Finish | None = None


class Story:
    """Draws one `Changes` after the other from `rng`. `retiring` lets workers come back under a new boot, and go for good."""

    def __init__(self, rng: random.Random, retiring: bool = True) -> None:
        self.rng = rng
        self.requests: dict[bytes, _Live] = {}
        self._retiring = retiring
        self._forgotten: list[bytes] = []
        self._count = 0
        self._boots = {worker: rng.randbytes(16) for worker in WORKERS}
        self._published: dict[str, dict[int, PublishedBlock]] = {worker: {} for worker in WORKERS}

    def step(self) -> Changes:
        """One step: some requests come, run, are preempted, end and are forgotten; the running ones decode."""
        rng = self.rng
        touched: dict[bytes, bool] = {}
        for _ in range(rng.choice((0, 0, 1, 3))):
            touched[self._admit()] = True
        for request_id, live in self.requests.items():
            if rng.random() < 0.15 and self._change(live):
                touched.setdefault(request_id, False)
        decoding = [
            (request_id, live)
            for request_id, live in self.requests.items()
            if live.status is SequenceStatus.RUNNING and request_id not in touched and rng.random() < 0.9
        ]
        columns = self._decode(decoding) if decoding else None
        deltas = tuple(self._delta(request_id, is_new) for request_id, is_new in touched.items())
        forgotten = [key for key, live in self.requests.items() if live.finish and key not in touched and rng.random() < 0.3]
        for request_id in forgotten:
            del self.requests[request_id]
        self._forgotten += forgotten
        removed = tuple(worker for worker in WORKERS if self._retiring and rng.random() < 0.01)
        for worker in removed:
            self._boots[worker], self._published[worker] = rng.randbytes(16), {}
        return Changes(deltas, self._blocks(), tuple(forgotten), columns, removed)

    def end(self) -> list[Changes]:
        """Everything live ends, and is forgotten."""
        for live in self.requests.values():
            if live.finish is None:
                live.finish, live.status = Finish(FinishReason.ABORTED, len(live.output)), SequenceStatus.ABORTED
            live.worker, live.table, live.told_blocks = "", [], 0
        ended = Changes(tuple(self._delta(request_id, False) for request_id in self.requests))
        forgotten = Changes(forgotten=tuple(self.requests))
        self.requests.clear()
        return [ended, forgotten]

    def _admit(self) -> bytes:
        again = self._forgotten and self.rng.random() < 0.1  # a resume of a request that was forgotten
        request_id = self._forgotten.pop() if again else bytes([self._count % 200]) + self.rng.randbytes(15)
        self._count += 1
        live = self.requests[request_id] = _Live(Arrival(1, self._count))
        if again:
            live.output = [self.rng.randrange(1000) for _ in range(3)]
        return request_id

    def _change(self, live: _Live) -> bool:
        if live.finish is not None:
            return False
        kind = self.rng.choice(("run", "run", "wait", "swap", "finish", "subscriber", "restart"))
        if kind == "subscriber":
            live.subscriber += 1
        elif kind == "run" and live.status is SequenceStatus.WAITING:
            live.status, live.worker, live.attempt = SequenceStatus.RUNNING, self.rng.choice(WORKERS), live.attempt + 1
            live.table = [self.rng.randrange(100) for _ in range((5 + len(live.output)) // BLOCK_SIZE + 1)]
        elif kind == "wait" and live.status is SequenceStatus.RUNNING:
            live.status, live.worker, live.table, live.told_blocks = SequenceStatus.WAITING, "", [], 0
        elif kind == "swap" and live.status is SequenceStatus.RUNNING:
            live.status, live.table, live.told_blocks = SequenceStatus.SWAPPED, [], 0
        elif kind == "run" and live.status is SequenceStatus.SWAPPED:
            live.status, live.table = SequenceStatus.RUNNING, [self.rng.randrange(100)]
        elif kind == "finish" and live.status is SequenceStatus.RUNNING and self.rng.random() < 0.5:
            live.finish = Finish(FinishReason.EOS, len(live.output), stop_token_id=2)
            live.status, live.worker, live.table, live.told_blocks = SequenceStatus.FINISHED, "", [], 0
        elif kind == "restart" and live.status is SequenceStatus.WAITING:
            live.output, live.told_tokens = [self.rng.randrange(1000) for _ in range(self.rng.randrange(4))], 0
        else:
            return False
        return True

    def _delta(self, request_id: bytes, is_new: bool) -> RequestDelta:
        live = self.requests[request_id]
        token_offset, live.told_tokens = min(live.told_tokens, len(live.output)), len(live.output)
        table_offset, live.told_blocks = min(live.told_blocks, len(live.table)), len(live.table)
        tells_prompt = bool(live.output) and not live.is_prompt_told
        live.is_prompt_told |= tells_prompt
        return RequestDelta(
            request_id=request_id,
            status=live.status,
            subscriber=live.subscriber,
            attempt=live.attempt,
            worker=live.worker,
            token_offset=token_offset,
            token_ids=tuple(live.output[token_offset:]),
            table_offset=table_offset,
            block_ids=tuple(live.table[table_offset:]),
            num_cached_tokens=live.attempt,
            finish=live.finish,
            timings=RequestTimings(1, 2, 3, 4) if live.finish else RequestTimings(),
            submission=submission(request_id) if is_new else None,
            arrival=live.arrival if is_new else None,
            tokens_max=100 * live.attempt,
            logprobs=logprobs_of(request_id, live.output, token_offset),
            prompt_logprobs=logprobs_of(request_id, [5, 6, 7, 9], 0) if tells_prompt else None,
        )

    def _decode(self, decoding: list[tuple[bytes, _Live]]) -> DecodeColumns:
        offsets, tokens, grown = [], [], []
        for row, (_, live) in enumerate(decoding):
            offsets.append(len(live.output))
            live.output.append(self.rng.randrange(1000))
            live.told_tokens = len(live.output)
            tokens.append(live.output[-1])
            if len(live.table) * BLOCK_SIZE < 5 + len(live.output):
                grown.append((row, len(live.table), self.rng.randrange(100)))
                live.table.append(grown[-1][2])
                live.told_blocks = len(live.table)
        columns = np.array(grown, np.int32).reshape(-1, 3)
        ids = tuple(request_id for request_id, _ in decoding)
        told = [logprobs_of(request_id, live.output, len(live.output) - 1) for request_id, live in decoding]
        wants = any(logprobs is not None for logprobs in told)
        return DecodeColumns(
            ids,
            np.array(offsets, np.int32),
            np.array(tokens, np.int32),
            columns[:, 0],
            columns[:, 1],
            columns[:, 2],
            joined_logprobs([logprobs or no_logprobs(1) for logprobs in told]) if wants else None,
        )

    def _blocks(self) -> tuple[BlockDelta, ...]:
        rng = self.rng
        deltas = []
        for worker in WORKERS:
            if self._retiring and rng.random() < 0.01:
                self._boots[worker], self._published[worker] = rng.randbytes(16), {}
                deltas.append(BlockDelta(worker, self._boots[worker], (), ()))
            held = self._published[worker]
            gone = [block_id for block_id in held if rng.random() < 0.1]
            for block_id in gone:
                del held[block_id]
            new = [self._block() for _ in range(rng.choice((0, 0, 1, 2)))]
            held.update((block.block_id, block) for block in new)
            if gone or new:
                deltas.append(BlockDelta(worker, self._boots[worker], tuple(new), tuple(gone)))
        return tuple(deltas)

    def _block(self) -> PublishedBlock:
        rng = self.rng
        parent = rng.choice((None, rng.randrange(2**64)))
        token_ids = tuple(rng.randrange(1000) for _ in range(BLOCK_SIZE))
        return PublishedBlock(rng.randrange(50), rng.randrange(2**64), parent, token_ids, rng.randrange(2**40))
