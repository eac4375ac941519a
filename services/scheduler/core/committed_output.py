"""What a request has so far, as those who send it read it."""

from dataclasses import dataclass

from tessera.values.logprobs import Logprobs


@dataclass(frozen=True, slots=True)
class CommittedOutput:
    """Some of a request's output tokens, with their `logprobs` where it wants them. `prompt_logprobs` are those of every prompt token but
    the first; they come with the first output token."""

    token_ids: tuple[int, ...]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


NO_OUTPUT = CommittedOutput(())
