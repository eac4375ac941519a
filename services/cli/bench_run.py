"""One benchmark: its requests, level after level, at gateways that are there."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from services.bench.arrivals import arrivals_s
from services.bench.figures import Level
from services.bench.load import Load
from services.bench.prompts import Prompts
from services.bench.trace import TraceRequest
from services.bench.workload import Fitted, PlannedRequest, arriving, drawn_requests, traced_requests
from services.cli.bench_ask import GatewayAsk
from services.cli.bench_options import BenchConfig, LevelPlan, salt_of
from services.cli.bench_progress import progress
from tessera.client import AsyncClient, GenerateOptions, Model

WARMUP_INDEX = 1 << 40
"""Where requests of the warm-up are numbered from: their prompts are nobody else's."""


class WarmupError(RuntimeError):
    """The first requests failed, so nothing was measured."""


@dataclass(frozen=True, slots=True)
class Bench:
    """`options` go with every request. `trace` is empty where lengths are drawn."""

    config: BenchConfig
    trace: Sequence[TraceRequest]
    model: Model
    clients: Sequence[AsyncClient]
    options: GenerateOptions

    async def warm_up(self, stop: asyncio.Event) -> None:
        """Send the requests of the warm-up, all at once. Raises WarmupError where one fails, WorkloadError where there are none."""
        requests = (replace(request, index=WARMUP_INDEX + request.index) for request in self._requests())
        load = Load(self._ask(), self.config.warmup)
        await load.run(islice(requests, self.config.warmup), stop)
        failed = next((outcome for outcome in load.outcomes if not outcome.is_ok and not outcome.is_interrupted), None)
        if failed is not None:
            raise WarmupError(f"the warm-up failed: {failed.status}: {failed.message or 'the gateway did not say why'}")

    async def level(self, plan: LevelPlan, stop: asyncio.Event) -> Level:
        """Measure one level, to its end or until `stop`. Raises WorkloadError where the model has room for no request."""
        fitted = self._requests()
        requests: Iterator[PlannedRequest] = fitted
        count = self.config.requests
        if self.trace:
            requests = iter(those := list(islice(requests, count)))
            count = len(those)
        if plan.concurrency is not None or plan.rate is not None:
            rate, burstiness = plan.rate, self.config.burstiness
            requests = arriving(requests, None if rate is None else arrivals_s(rate, burstiness, self.config.seed))
        load = Load(self._ask(), plan.concurrency, self.config.duration_s)
        cpu_s = time.process_time()
        async with progress(load, plan.words, count if self.config.duration_s is None else None):
            await load.run(islice(requests, count), stop)
        return Level(
            plan.words,
            plan.value,
            load.began_s,
            tuple(sorted(load.outcomes, key=lambda outcome: outcome.index)),
            fitted.num_cut,
            fitted.num_skipped,
            time.process_time() - cpu_s,
        )

    def _requests(self) -> Fitted:
        """All that there are, those too long for the model cut or left out."""
        config = self.config
        requests = traced_requests(self.trace, config.time_scale) if self.trace else drawn_requests(config.shape, config.seed)
        return Fitted(
            requests, min(self.model.max_model_len, self.model.max_request_len or self.model.max_model_len), config.too_long
        )

    def _ask(self) -> GatewayAsk:
        """With a salt of its own, unless one was given."""
        model, config = self.model, self.config
        bos = [] if model.bos_token_id is None else [model.bos_token_id]
        prefix_tokens = 0 if self.trace else config.shape.shared_prefix_tokens
        prompts = Prompts(model.vocab_size, [*model.eos_token_ids, *bos], config.seed, prefix_tokens)
        options = self.options.copy()
        options.update({"cache_salt": salt_of(config), "temperature": config.temperature, "ignore_eos": True})
        return GatewayAsk(self.clients, prompts, options, config.retries)
