"""The scheduler and the engine in one process, for batches of prompts: no gRPC, no Redis, the same tokens as the service gives.

from gateway.generate_input import SamplingInput
from services.llm import LLM

llm = LLM("SmolLM2-135M-Instruct")
for completion in llm.generate(["Once upon a time", "The capital of France is"], SamplingInput(max_tokens=32)):
    print(completion.text)
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gateway.delta import Delta
from gateway.generate_input import GenerateInput, Prompt, SamplingInput
from gateway.output_stream import OutputStream
from gateway.served_model import ServedModel
from gateway.tokenizer_source import load_tokenizer
from gateway.validation import validate
from services.scheduler.core.admission import Refused
from services.scheduler.core.scheduler import Scheduler
from services.worker.config import WorkerConfig
from services.worker.loading import load_engine
from services.worker.model_part import DETERMINISTIC
from tessera.values.batch import ScheduledBatch
from tessera.values.config import Config, ConfigError
from tessera.values.finish import Finish
from tessera.values.identity import Epoch, new_instance_id
from tessera.values.known_models import locate
from tessera.values.request import RequestOutput, RequestTimings, Submission

OnOutput = Callable[["Completion", Delta], None]
"""Called with a request as it is now, and what is new of it."""

_WORKER = "in-process"
_DEFAULTS = SamplingInput()


class NotAdmitted(Exception):
    """The scheduler does not take a request; the message names the numbers."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One request and what has come of it. `token_ids` include the stop token. `finish` and `timings` are None until it has ended."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    timings: RequestTimings | None = None
    num_cached_tokens: int = 0


@dataclass(slots=True)
class _Live:
    submission: Submission
    stream: OutputStream
    completion: Completion
    on_output: OnOutput | None


class LLM:
    """A model, its KV cache and a scheduler. Belongs to one thread; nothing is computed outside `step` and `generate`."""

    def __init__(self, model: str | WorkerConfig, config: Config | None = None) -> None:
        """Load `model`, as the worker does: a directory, a GGUF file or a known name, or a whole config (of which the address is not used).
        `config` is the scheduler's. Raises what `load_engine` and `load_tokenizer` raise, and ConfigError for more than one rank."""
        worker = model if isinstance(model, WorkerConfig) else WorkerConfig(model)
        if worker.tensor_parallel_size > 1:
            raise ConfigError("tensor_parallel_size: several ranks are a worker's processes; run `tessera worker`")
        self._engine = load_engine(worker)
        self.model = ServedModel(
            self._engine.report(1).description.model, load_tokenizer(locate(worker.model.removeprefix(f"{DETERMINISTIC}:")))
        )
        limits = Config(max_num_seqs=worker.max_num_seqs, max_num_batched_tokens=worker.max_num_batched_tokens)
        self._scheduler = Scheduler(config or limits, Epoch(1, new_instance_id()))
        self._scheduler.attach_worker(_WORKER, self._engine.report(1), _now_us())
        self._boot_id = self._engine.report(1).description.boot_id
        self._issued: deque[ScheduledBatch] = deque()
        self._live: dict[str, _Live] = {}
        self._num_added = 0

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingInput | Sequence[SamplingInput] = _DEFAULTS,
        on_output: OnOutput | None = None,
    ) -> list[Completion]:
        """The answers to all `prompts`, in their order; `sampling` is for all, or one for each. Requests added before are computed beside
        them, and told of by their own callbacks. Raises InvalidRequest and NotAdmitted, and then none of these prompts is left."""
        given = [sampling] * len(prompts) if isinstance(sampling, SamplingInput) else list(sampling)
        done: dict[str, Completion] = {}

        def keep(completion: Completion, delta: Delta) -> None:
            if on_output is not None:
                on_output(completion, delta)
            if completion.finish is not None:
                done[completion.request_id] = completion

        ids: list[str] = []
        try:
            for prompt, asked in zip(prompts, given, strict=True):
                ids.append(self.add_request(GenerateInput(prompt, sampling=asked), keep))
            while len(done) < len(ids):
                self.step()
        finally:
            for request_id in ids:
                self.abort_request(request_id)
        return [done[request_id] for request_id in ids]

    def add_request(self, request: GenerateInput | Prompt, on_output: OnOutput | None = None) -> str:
        """Queue a request and return its id, drawn where it has none. Raises InvalidRequest naming every wrong field, ValueError for an id
        that lives, NotAdmitted."""
        asked = request if isinstance(request, GenerateInput) else GenerateInput(request)
        request_id = asked.request_id or f"request-{self._num_added}"
        if request_id in self._live:
            raise ValueError(f"request_id: {request_id!r} lives already")
        submission = validate(replace(asked, request_id=request_id), self.model, "")
        answer = self._scheduler.submit(submission, 0, (), _now_us())
        if isinstance(answer, Refused):
            raise NotAdmitted(answer.message)
        self._num_added += 1
        stream = OutputStream(self.model.tokenizer, submission.detokenize)
        completion = Completion(request_id, tuple(submission.prompt_token_ids.tolist()))
        self._live[request_id] = _Live(submission, stream, completion, on_output)
        return request_id

    def abort_request(self, request_id: str) -> None:
        """End a request without a further word of it; nothing happens where none lives under this id."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._scheduler.abort(live.submission.request_id, _now_us())

    def step(self) -> list[Completion]:
        """Compute one batch, call the callbacks, and return the requests of which something is new. Nothing happens where none lives."""
        self._scheduler.end_late(_now_us())
        while (batch := self._scheduler.schedule(_WORKER, _now_us())) is not None:
            self._issued.append(batch)
        if self._issued:
            output = self._engine.execute(self._issued.popleft())
            self._scheduler.postprocess(_WORKER, output, _now_us())
            self._scheduler.set_durable_step(_WORKER, self._boot_id, output.step_id)  # no journal has to learn of it first
        told = [completion for live in list(self._live.values()) if (completion := self._tell(live)) is not None]
        self._scheduler.take_changes()
        self._scheduler.forget_finished(_now_us(), lambda request_id: False)
        return told

    def get_num_unfinished_requests(self) -> int:
        """How many wait or run."""
        return len(self._live)

    def has_unfinished_requests(self) -> bool:
        """Whether any waits or runs."""
        return bool(self._live)

    def _tell(self, live: _Live) -> Completion | None:
        """Take what the scheduler has of a request; its completion where something is new."""
        sequence = self._scheduler.request(live.submission.request_id)
        assert sequence is not None, "a live request is not forgotten"
        held = len(live.stream.token_ids)
        if sequence.output_len == held and sequence.finish is None:
            return None
        new = sequence.committed_output(held, sequence.output_len)
        timings = sequence.timings if sequence.finish is not None else None
        delta = live.stream.feed(
            RequestOutput(
                live.submission.request_id,
                0,
                held,
                new.token_ids,
                sequence.num_cached_tokens,
                sequence.finish,
                timings,
                new.logprobs,
                new.prompt_logprobs,
            )
        )
        if delta is None:
            return None
        if delta.found_here:
            self._end_at_stop_string(live)
            delta = replace(delta, timings=sequence.timings)
        before = live.completion
        live.completion = replace(
            before,
            text=before.text + delta.text,
            token_ids=before.token_ids + delta.token_ids,
            finish=delta.finish,
            timings=delta.timings,
            num_cached_tokens=delta.num_cached_tokens,
        )
        if delta.finish is not None:
            del self._live[before.request_id]
        if live.on_output is not None:
            live.on_output(live.completion, delta)
        return live.completion

    def _end_at_stop_string(self, live: _Live) -> None:
        finish = live.stream.finish
        assert finish is not None and finish.stop_string is not None, "only stop strings are found here"
        self._scheduler.stop_found(live.submission.request_id, finish.output_len, finish.stop_string, _now_us())


def _now_us() -> int:
    return time.monotonic_ns() // 1000
