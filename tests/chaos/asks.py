"""What the streams of a scenario ask for: text, chats and token ids, greedy and sampled, with shared beginnings and stop strings."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tessera.client import ChatMessage, Prompt

_OPENINGS = (
    "You are a careful clerk of a small harbour town. You answer in plain words, you never guess, and you name the ledger you read. "
    "Ships come on Monday, letters on Tuesday, and nobody works on the day of the fair. ",
    "The following is an encyclopedia for children. Every entry begins with what the thing is, then tells where it is found, and ends "
    "with a question that the reader can think about on the way home. ",
    "Notes of a gardener, in no order. Water in the morning. Cut roses above an outward eye. Beans follow potatoes, cabbage follows beans, "
    "and nothing follows asparagus for twenty years. ",
)
_TOPICS = (
    "the tide",
    "a lost key",
    "salt",
    "the moon",
    "old maps",
    "bread",
    "a bridge",
    "wool",
    "thunder",
    "clocks",
    "honey",
    "glass",
)
_CHATS = ("Tell me about", "What is known of", "Write a short story about", "Give three facts on")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. The same ask always has the same seed, so that two runs of it can be compared."""

    prompt: Prompt
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = True
    stop: tuple[str, ...] = ()

    def options(self) -> dict[str, object]:
        """Keywords of the client's `stream`."""
        options: dict[str, object] = {"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed}
        options["ignore_eos"] = self.ignore_eos
        if self.temperature > 0:
            options["top_p"] = 0.95
        if self.stop:
            options["stop"] = self.stop
        return options


def make_asks(count: int, min_tokens: int, max_tokens: int, seed: int) -> list[Ask]:
    """`count` asks with answers of `min_tokens` to `max_tokens`: a third each of text, chats and token ids; every other one is sampled.
    Most begin like others: with one of three openings, or with the ids of the one before."""
    draw = random.Random(seed)
    asks: list[Ask] = []
    shared: list[int] = []
    for number in range(count):
        kind = number % 3
        topic = draw.choice(_TOPICS)
        prompt: Prompt
        if kind == 0:
            prompt = draw.choice(_OPENINGS) + f"Entry {number}: {topic}."
        elif kind == 1:
            prompt = [
                ChatMessage("system", draw.choice(_OPENINGS)),
                ChatMessage("user", f"{draw.choice(_CHATS)} {topic}, please (question {number})."),
            ]
        else:
            if number % 4 == 0:
                shared = [draw.randrange(300, 40_000) for _ in range(draw.randrange(20, 70))]
            prompt = [*shared, *(draw.randrange(300, 40_000) for _ in range(draw.randrange(4, 30)))]
        sampled = number % 2 == 1
        asks.append(
            Ask(
                prompt=prompt,
                max_tokens=draw.randrange(min_tokens, max_tokens + 1),
                temperature=0.8 if sampled else 0.0,
                seed=1000 + number,
                ignore_eos=kind != 1,
            )
        )
    return asks


def with_stop_strings(asks: Sequence[Ask], texts: Sequence[str]) -> list[Ask]:
    """The asks, every fourth one and every other chat with a stop string that its own answer (`texts`) has about in its middle."""
    changed = list(asks)
    for index, (ask, text) in enumerate(zip(asks, texts, strict=True)):
        middle = len(text) // 2
        if (index % 4 == 2 or index % 6 == 1) and middle >= 8:
            changed[index] = replace(ask, stop=(text[middle : middle + 5],))
    return changed
