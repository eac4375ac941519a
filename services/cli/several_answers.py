"""Several answers to one prompt, whole, each under its number: what `generate --answers` shows."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.cli.gateway_access import GatewayAccess
from tessera.client import Answer, AsyncClient, GenerateOptions, Prompt


@dataclass(frozen=True, slots=True)
class SeveralAnswers:
    """In the order of their numbers, and how long all took, seconds."""

    answers: tuple[Answer, ...]
    total_s: float

    @property
    def are_whole(self) -> bool:
        """Whether each came to an end of its own."""
        return all(answer.finish.is_whole for answer in self.answers)


async def ask_several(
    addresses: Sequence[str], prompt: Prompt, count: int, options: GenerateOptions, access: GatewayAccess
) -> SeveralAnswers:
    """Ask the first of `addresses` for `count` answers. Raises TesseraError."""
    began_s = time.monotonic()
    async with AsyncClient(addresses, tls=access.tls, token=access.token) as client:
        answers = await client.generate_several(prompt, count, **options)
    return SeveralAnswers(tuple(answers), time.monotonic() - began_s)


def shown(several: SeveralAnswers) -> str:
    """Every text below a line with its number."""
    return "\n".join(f"=== answer {index} ===\n{answer.text}" for index, answer in enumerate(several.answers))


def summary_of_several(several: SeveralAnswers) -> str:
    """A line for each answer, and one for all."""
    lines, num_tokens = [], 0
    for index, answer in enumerate(several.answers):
        usage, message = answer.finish.usage, answer.finish.message
        num_tokens += usage.completion_tokens
        ended = f"{answer.finish.reason.value}{f': {message}' if message else ''}"
        lines.append(f"[answer {index}: {ended}; {usage.completion_tokens} tokens]")
    usage = several.answers[0].finish.usage
    cached = f" ({usage.cached_tokens} from cache)" if usage.cached_tokens else ""
    lines.append(f"[prompt {usage.prompt_tokens} tokens{cached}, answers {num_tokens} tokens in {several.total_s:.2f} s]")
    return "\n".join(lines)
