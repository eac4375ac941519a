"""`tessera bench`: load on running gateways, and how fast they answer it."""

import asyncio
import contextlib
import importlib.util
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import click

from services.bench.figures import Figures, Level, figures_of
from services.bench.report import full_report, row, row_heads, warnings_of
from services.bench.trace import TraceError, TraceRequest, read_trace
from services.bench.workload import WorkloadError
from services.cli.bench_options import BenchConfig, bench_options, given_config
from services.cli.bench_run import Bench, WarmupError
from services.cli.exit_status import FAILED, INTERRUPTED, REFUSED, exit_status
from services.cli.gateway_access import GatewayAccess, access_options, given_access
from services.cli.gateway_options import gateway_options
from tessera.client import AsyncClient, GenerateOptions, TesseraError


@click.command("bench", short_help="Measure how fast running gateways answer.")
@gateway_options(resume_timeout_s=0.0)
@access_options
@bench_options
def command(**options: Any) -> None:
    """Put load on running gateways and measure their answers: throughput, and the times that users wait for.

    Prompts are random token ids, answers have the asked length. Several gateways get the requests in turn. A table is written to standard
    output, the last line is one JSON object. Ctrl-C ends the load, and what was finished is reported.

    TTFT is the time from sending to the first token, TPOT the mean per token after it, ITL every pause between two pieces of an answer; `in the
    queue` is the scheduler's own word. A request that there is no room for (RESOURCE_EXHAUSTED) counts as rejected.

    \b
    Examples:
      tessera bench --concurrency 8 --requests 200 --input-tokens 128:32 --output-tokens 64-256
      tessera bench --rate 4 --duration-s 60 --slo ttft:500 --slo tpot:50
      tessera bench --rates 1,2,4,8 --plot curve.png
      tessera bench --shared-prefix-tokens 512 --input-tokens 32 --rate inf --requests 32
      tessera bench --trace AzureLLMInferenceTrace_conv.csv --trace-limit 500 --time-scale 2

    \b
    Exit status: 0 measured; 1 no request was answered; 2 nothing to ask, or refused; 3 no gateway answers; 130 interrupted.
    """
    config, access = given_config(options), given_access(options)
    if config.plot_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install 'tessera-server[bench]'")
    asked = GenerateOptions(model=options["model"], timeout_s=options["timeout_s"])
    try:
        trace = _trace_of(config)
        run = asyncio.run(_measured(config, trace, _clients_of(options, access), asked))
    except (TraceError, WorkloadError) as error:
        _fail(str(error), REFUSED)
    except WarmupError as error:
        _fail(str(error), FAILED)
    except TesseraError as error:
        _fail(str(error), exit_status(error))
    if config.plot_file is not None and any(figures.num_ok for figures in run.figures):
        _draw(run, config)
        click.echo(f"drawn: {config.plot_file}", err=True)
    click.echo(json.dumps({"benchmark": "bench", **run.told(config)}))
    sys.exit(INTERRUPTED if run.was_interrupted else 0 if any(figures.num_ok for figures in run.figures) else FAILED)


def _trace_of(config: BenchConfig) -> list[TraceRequest]:
    """Empty without one. What will be sent otherwise than it is there is said. Raises TraceError."""
    if config.trace is None:
        return []
    trace = read_trace(config.trace, config.trace_limit)
    if num_empty := sum(request.is_empty for request in trace):
        noun, verb = ("request", "has") if num_empty == 1 else ("requests", "have")
        click.echo(f"Note: {num_empty} {noun} of {config.trace.name} {verb} 0 tokens of prompt or answer, sent as 1", err=True)
    return trace


@dataclass
class _Run:
    """What was measured so far, of which model."""

    model: str = ""
    levels: list[Level] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    was_interrupted: bool = False

    def told(self, config: BenchConfig) -> dict[str, Any]:
        """All of it but the single requests, for JSON."""
        levels = [figures.as_json() for figures in self.figures]
        return {
            "model": self.model,
            "workload": config.workload_words,
            "seed": config.seed,
            "slo": config.slo_words,
            "levels": levels,
        }


@dataclass(frozen=True, slots=True)
class _Clients:
    """How to make one client per gateway: each begins at its own, and knows the others."""

    addresses: tuple[str, ...]
    resume_timeout_s: float
    access: GatewayAccess

    def open(self) -> list[AsyncClient]:
        """To be closed by the caller."""
        tls, token = self.access.tls, self.access.token
        orders = [(*self.addresses[at:], *self.addresses[:at]) for at in range(len(self.addresses))]
        return [AsyncClient(order, resume_timeout_s=self.resume_timeout_s, tls=tls, token=token) for order in orders]


def _clients_of(options: dict[str, Any], access: GatewayAccess) -> _Clients:
    return _Clients(options["gateways"], options["resume_timeout_s"], access)


async def _measured(config: BenchConfig, trace: Sequence[TraceRequest], clients: _Clients, asked: GenerateOptions) -> _Run:
    run = _Run()
    async with contextlib.AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(client) for client in clients.open()]
        model = await opened[0].model(asked.get("model", ""))
        run.model = model.name
        bench = Bench(config, trace, model, opened, asked)
        stop = await stack.enter_async_context(_stop_on_signals())
        file = stack.enter_context(config.json_file.open("w")) if config.json_file is not None else None
        click.echo(f"{model.name} at {', '.join(clients.addresses)}: {config.workload_words}")
        if config.warmup:
            await bench.warm_up(stop)
        if len(config.levels) > 1:
            click.echo(row_heads())
        for plan in config.levels:
            if stop.is_set():
                break
            level = await bench.level(plan, stop)
            run.levels.append(level)
            run.figures.append(figures := figures_of(level, config.objectives))
            click.echo(row(figures) if len(config.levels) > 1 else full_report(figures, " ".join(config.slo_words)))
            for warning in warnings_of(figures):
                click.echo(f"Note, {figures.load}: {warning}", err=True)
            if file is not None:
                file.writelines(
                    json.dumps({"load": level.load, **item.as_json(level.began_s)}) + "\n" for item in level.outcomes
                )
        run.was_interrupted = stop.is_set()
    return run


@contextlib.asynccontextmanager
async def _stop_on_signals() -> AsyncIterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; the next one ends the process as ever."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def forget() -> None:
        for number in signals:
            loop.remove_signal_handler(number)

    def on_signal() -> None:
        stop.set()
        forget()

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        forget()


def _draw(run: _Run, config: BenchConfig) -> None:
    """The picture that suits the number of levels."""
    from services.bench.plot import draw_curve, draw_level  # matplotlib is needed for this alone

    assert config.plot_file is not None
    title = f"{run.model}: {config.workload_words}"
    if len(config.levels) == 1:
        draw_level(run.levels[0], f"{title}, {run.figures[0].load}", config.plot_file)
    else:
        is_rate = config.levels[0].rate is not None
        load_label = "requests per second, offered" if is_rate else "requests at once"
        draw_curve(run.figures, title, load_label, config.plot_file, config.objectives)


def _fail(message: str, status: int) -> NoReturn:
    click.echo(f"Error: {message}", err=True)
    sys.exit(status)
