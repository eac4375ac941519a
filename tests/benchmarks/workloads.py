"""The workloads of the serving benchmarks: greedy, EOS ignored, all requests at once, prompts of random ids that differ from round to round."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from services.bench.lengths import parse_lengths
from services.bench.prompts import Prompts
from services.bench.workload import PlannedRequest, Shape, drawn_requests
from services.cli.bench_run import WARMUP_INDEX
from tessera.values.model import ModelInfo


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests of these lengths in tokens; every prompt begins with the same `shared_prefix_tokens`, which `input_tokens` does not count.
    `is_warm`: a request with this prefix was served before."""

    name: str
    requests: int
    input_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0
    is_warm: bool = False

    @property
    def words(self) -> str:
        """For people."""
        shared = f"{self.shared_prefix_tokens}{' cached' if self.is_warm else ''}+" if self.shared_prefix_tokens else ""
        return f"{self.requests} x ({shared}{self.input_tokens} in, {self.output_tokens} out)"

    @property
    def computed_tokens(self) -> int:
        """Prompt positions of all requests that somebody has to compute."""
        shared = 0 if self.is_warm else self.shared_prefix_tokens
        return shared + self.requests * self.input_tokens

    @property
    def tokens_out(self) -> int:
        """Of all requests."""
        return self.requests * self.output_tokens

    def seed(self, number: int) -> int:
        """What prompts of this round are drawn from. Another one in every workload: else prompts of one are in the cache of who ran another."""
        return zlib.crc32(f"{self.name} {number}".encode())

    def bench_options(self, number: int, rate: float = math.inf) -> list[str]:
        """Of `tessera bench`, for one round; `rate` of arrivals per second."""
        lengths = {"input": self.input_tokens, "output": self.output_tokens, "shared-prefix": self.shared_prefix_tokens}
        given = [text for name, tokens in lengths.items() for text in (f"--{name}-tokens", str(tokens))]
        # Without a given salt the request before would have another one than those that are measured.
        before = ["--warmup", "1", "--cache-salt", f"{self.name}-{number}"] if self.is_warm else ["--warmup", "0"]
        return ["--rate", str(rate), "--requests", str(self.requests), "--seed", str(self.seed(number)), *given, *before]

    def prompts(self, model: ModelInfo, number: int) -> list[list[int]]:
        """Those that `tessera bench` sends with these options."""
        drawn = self._drawn(model, number)
        return [drawn.token_ids(request) for request in islice(self._planned(number), self.requests)]

    def warm_prompt(self, model: ModelInfo, number: int) -> list[int]:
        """A prompt with the shared prefix that is none of these, to be served before where the workload is warm."""
        first = next(self._planned(number))
        return self._drawn(model, number).token_ids(PlannedRequest(WARMUP_INDEX, first.input_tokens, first.output_tokens))

    def _planned(self, number: int) -> Iterator[PlannedRequest]:
        lengths = parse_lengths(str(self.input_tokens)), parse_lengths(str(self.output_tokens))
        return drawn_requests(Shape(*lengths, self.shared_prefix_tokens), self.seed(number))

    def _drawn(self, model: ModelInfo, number: int) -> Prompts:
        bos = [] if model.bos_token_id is None else [model.bos_token_id]
        return Prompts(model.vocab_size, [*model.eos_token_ids, *bos], self.seed(number), self.shared_prefix_tokens)


WORKLOADS = (
    Workload("w1c1", 1, 128, 128),
    Workload("w1c8", 8, 128, 128),
    Workload("w1c32", 32, 128, 128),
    Workload("w2", 8, 512, 16),
    Workload("w3", 32, 32, 32, shared_prefix_tokens=512),
    Workload("w3warm", 32, 32, 32, shared_prefix_tokens=512, is_warm=True),
)


def chosen(names: str) -> tuple[Workload, ...]:
    """Those with these names, separated by commas; empty: all. Raises ValueError for a name that none has."""
    by_name = {workload.name: workload for workload in WORKLOADS}
    wanted = names.split(",") if names else list(by_name)
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise ValueError(f"no workload {unknown[0]!r}; there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in wanted)
