"""Sends a benchmark's requests to gateways, and notes when the parts of each answer come."""

import asyncio
import time
from array import array
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from services.bench.outcome import OK, Outcome, Served
from services.bench.prompts import Prompts
from services.bench.workload import PlannedRequest
from tessera.client import AsyncClient, Finish, FinishReason, GenerateOptions, Overloaded, TesseraError

RETRY_MS = 100
"""Wait before a retry where the gateway does not say."""

_ABORTED = "an operator or another client aborted it"
"""Not this client: it gives a request up by leaving its stream."""


@dataclass(frozen=True, slots=True)
class GatewayAsk:
    """A `services.bench.load.Ask` that gives each request to the next of `clients`. `retries`: of one that is rejected, see `Outcome`;
    `options` go with every request."""

    clients: Sequence[AsyncClient]
    prompts: Prompts
    options: GenerateOptions
    retries: int = 0

    async def __call__(self, request: PlannedRequest, arrival_s: float | None) -> Outcome:
        """Raises nothing but asyncio.CancelledError, which ends the request at the gateway too: what fails is an outcome."""
        token_ids, options = self.prompts.token_ids(request), self.options.copy()
        options["max_tokens"] = request.output_tokens
        client = self.clients[request.index % len(self.clients)]
        piece_s = array("d")
        sent_s, retries = time.monotonic(), 0
        while True:
            finish: Finish | None = None
            status = message = ""
            try:
                async with aclosing(client.stream(token_ids, **options)) as pieces:
                    async for piece in pieces:
                        if piece.token_ids:
                            piece_s.append(time.monotonic())
                        finish = piece.finish
            except TesseraError as error:
                if isinstance(error, Overloaded) and retries < self.retries and not piece_s:
                    retries += 1
                    await asyncio.sleep((error.details.retry_after_ms or RETRY_MS) / 1000)
                    continue
                status, message = error.code.name, error.message
            if finish is not None:
                status = OK if finish.is_whole else f"ANSWER_{finish.reason.name}"
                message = finish.message or (_ABORTED if finish.reason is FinishReason.ABORTED else "")
            served = None if finish is None else _served(finish)
            return Outcome(request.index, sent_s, time.monotonic(), status, message, arrival_s, piece_s, served, retries)


def _served(finish: Finish) -> Served:
    usage, timings = finish.usage, finish.timings
    return Served(
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        timings.queue_us / 1000,
        timings.ttft_us / 1000,
        timings.num_preemptions,
    )
