"""What long prompts do to answers that are being read: eight answers stream, then prompts of 2,048 tokens come, each as soon as the one before
is answered. What counts are the pauses between two tokens of the eight (ITL), before and while prompts come."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from services.bench.figures import Spread, spread_of
from tessera.client import AsyncClient, GenerateOptions

NAME = "itl"
STREAMS, STREAM_INPUT, STREAM_OUTPUT_MAX = 8, 32, 4000
PROMPT_TOKENS, PROMPTS = 2048, 4
ALONE_TOKENS, SETTLING_TOKENS = 60, 20
"""How many tokens of each answer come before the first prompt, and how many of these do not count: the eight prompts themselves are among them."""

VOCABULARY = range(1000, 40_000)
HEADS = (
    f"{'':<14}{'ITL ms of 8 answers alone, p50':>32}{'while prompts come: p50':>26}{'p99':>9}{'max':>9}"
    f"{'p99 / p50':>12}{'p99 / alone':>13}{'TTFT ms of 2,048':>18}"
)


@dataclass(frozen=True, slots=True)
class Pauses:
    """Milliseconds: between tokens of the answers, alone and while prompts come; and from a prompt to its first token."""

    alone: Spread
    beside: Spread
    ttft: Spread

    @property
    def ratio(self) -> float:
        """Of the long pauses to those in the middle, while prompts come."""
        return self.beside.p99 / self.beside.p50

    @property
    def ratio_to_alone(self) -> float:
        """Of the long pauses while prompts come to those in the middle without any."""
        return self.beside.p99 / self.alone.p50

    def row(self, precision: str) -> str:
        """Of the table."""
        return (
            f"{precision:<6}{NAME:<8}{self.alone.p50:>32.1f}{self.beside.p50:>26.1f}{self.beside.p99:>9.1f}{self.beside.max:>9.1f}"
            f"{self.ratio:>12.2f}{self.ratio_to_alone:>13.2f}{self.ttft.p50:>18.0f}"
        )

    def told(self) -> dict[str, float]:
        """For JSON."""
        figures = {
            "alone_p50_ms": self.alone.p50,
            "p50_ms": self.beside.p50,
            "p99_ms": self.beside.p99,
            "max_ms": self.beside.max,
        }
        figures |= {"p99_to_p50": self.ratio, "p99_to_alone_p50": self.ratio_to_alone, "prompt_ttft_p50_ms": self.ttft.p50}
        return {name: round(value, 2) for name, value in figures.items()}


@dataclass
class Answer:
    """When its tokens came."""

    came_s: list[float] = field(default_factory=list)
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, client: AsyncClient, prompt: list[int]) -> None:
        """Until it is cancelled."""
        async for now_s in _tokens(client, prompt, STREAM_OUTPUT_MAX):
            self.came_s.append(now_s)
            if len(self.came_s) == ALONE_TOKENS:
                self.has_begun.set()
        raise RuntimeError(f"an answer ended after {len(self.came_s)} tokens, before all prompts were there")

    def pauses_ms(self, begin_s: float, end_s: float) -> list[float]:
        """Between its tokens, of those pauses that ended between these."""
        pairs = zip(self.came_s, self.came_s[1:], strict=False)
        return [1e3 * (later - earlier) for earlier, later in pairs if begin_s < later <= end_s]


async def _tokens(client: AsyncClient, prompt: list[int], max_tokens: int) -> AsyncIterator[float]:
    """The times at which pieces come."""
    options = GenerateOptions(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    async with aclosing(client.stream(prompt, **options)) as pieces:
        async for piece in pieces:
            if piece.token_ids:
                yield time.monotonic()


def pauses_of(answers: Sequence[Answer], began_s: float, ended_s: float, ttft_ms: Sequence[float]) -> Pauses:
    """Of answers that were alone before `began_s`, and then beside prompts until `ended_s`."""
    settled_s = max(answer.came_s[SETTLING_TOKENS] for answer in answers)
    alone = spread_of(pause for answer in answers for pause in answer.pauses_ms(settled_s, began_s))
    beside = spread_of(pause for answer in answers for pause in answer.pauses_ms(began_s, ended_s))
    ttft = spread_of(ttft_ms)
    assert alone is not None and beside is not None and ttft is not None, "each had tokens before and after"
    return Pauses(alone, beside, ttft)


async def _measured(address: str, seed: int) -> Pauses:
    rng = np.random.default_rng(seed)

    def prompt(tokens: int) -> list[int]:
        ids: list[int] = rng.integers(VOCABULARY.start, VOCABULARY.stop, tokens).tolist()
        return ids

    answers, ttft_ms = [Answer() for _ in range(STREAMS)], []
    async with AsyncClient(address) as client:
        reading = [asyncio.create_task(answer.read(client, prompt(STREAM_INPUT))) for answer in answers]
        try:
            await asyncio.gather(*(answer.has_begun.wait() for answer in answers))
            began_s = time.monotonic()
            for _ in range(PROMPTS):
                sent_s = time.monotonic()
                ttft_ms += [1e3 * (now_s - sent_s) async for now_s in _tokens(client, prompt(PROMPT_TOKENS), 1)]
            ended_s = time.monotonic()
        finally:
            for task in reading:
                task.cancel()
            ended = await asyncio.gather(*reading, return_exceptions=True)
    failed = [error for error in ended if not isinstance(error, asyncio.CancelledError)]
    if failed:
        raise RuntimeError(f"an answer failed: {failed[0]}")
    return pauses_of(answers, began_s, ended_s, ttft_ms)


def measured_pauses(address: str, seed: int) -> Pauses:
    """At a running system. Raises RuntimeError where an answer fails."""
    return asyncio.run(_measured(address, seed))
