"""Options of `tessera bench`, and what they ask for."""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from services.bench.lengths import LENGTH_MAX, parse_lengths
from services.bench.objectives import Objective, parse_objective
from services.bench.workload import Shape, TooLong

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_CONCURRENCY = 8
DEFAULT_REQUESTS = 100
CONCURRENCY_MAX = 10_000

PICTURES = (".png", ".svg", ".pdf")
"""Formats that are drawn, by the file's name."""


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """One level of load: a closed loop of `concurrency`, or an open one of `rate` requests a second, or neither: the times of a trace."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def words(self) -> str:
        """For people."""
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        if self.rate is None:
            return "the trace's times"
        return "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"

    @property
    def value(self) -> float:
        """What levels differ in."""
        return self.concurrency or self.rate or 0.0


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """What is measured. `requests` None: until `duration_s` is over, or the trace has ended."""

    levels: tuple[LevelPlan, ...]
    shape: Shape
    requests: int | None
    duration_s: float | None
    burstiness: float
    warmup: int
    seed: int
    trace: Path | None
    trace_limit: int | None
    time_scale: float
    too_long: TooLong
    temperature: float
    cache_salt: str | None
    objectives: tuple[Objective, ...]
    retries: int
    json_file: Path | None
    plot_file: Path | None

    @property
    def workload_words(self) -> str:
        """What is asked, for people."""
        if self.trace is not None:
            return f"lengths of {self.trace.name}"
        shared = f"{self.shape.shared_prefix_tokens} shared + " if self.shape.shared_prefix_tokens else ""
        return f"{shared}{self.shape.input_tokens.words} tokens in, {self.shape.output_tokens.words} out"

    @property
    def slo_words(self) -> list[str]:
        """The objectives as they were given."""
        return [f"{objective.measure}:{objective.limit_ms:g}" for objective in self.objectives]


def _parsed(parse: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that parses what was given, once or several times."""

    def callback(_context: click.Context, _parameter: click.Parameter, given: Any) -> Any:
        try:
            return tuple(map(parse, given)) if isinstance(given, tuple) else None if given is None else parse(given)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise ValueError(f"{text!r} is not above 0: give requests a second, such as 2.5, or inf")
    return rate


def _rates(text: str) -> tuple[float, ...]:
    rates = tuple(sorted(map(_rate, _between_commas(text, "1,2.5,4"))))
    if math.isinf(rates[-1]):
        raise ValueError("inf is no rate among others: give --rate inf")
    return rates


def _concurrencies(text: str) -> tuple[int, ...]:
    return tuple(sorted(map(_concurrency, _between_commas(text, "1,2,4"))))


def _concurrency(text: str) -> int:
    digits = text.strip()
    count = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= len(str(CONCURRENCY_MAX)) else 0
    if not 1 <= count <= CONCURRENCY_MAX:
        raise ValueError(f"{text!r}: each is 1 to {CONCURRENCY_MAX}")
    return count


def _between_commas(text: str, example: str) -> list[str]:
    items = text.split(",")
    if not all(item.strip() for item in items):
        raise ValueError(f"{text!r} has nothing where a number is expected: give {example}")
    return items


def _in_a_folder(path: Path) -> Path:
    """Said before anything is measured."""
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}")
    return path


def _picture(path: Path) -> Path:
    if path.suffix not in PICTURES:
        raise ValueError(f"{path.name}: a picture ends with {', '.join(PICTURES)}")
    return _in_a_folder(path)


_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
_POSITIVE = click.FloatRange(min=0, min_open=True)

_OPTIONS = (
    click.option(
        "--concurrency",
        type=click.IntRange(1, CONCURRENCY_MAX),
        help=f"Closed loop: so many requests are always under way.  [default: {DEFAULT_CONCURRENCY}]",
    ),
    click.option(
        "--concurrencies", callback=_parsed(_concurrencies), metavar="N,N,...", help="A closed loop at each of these, in turn."
    ),
    click.option(
        "--rate",
        callback=_parsed(_rate),
        metavar="FLOAT",
        help="Open loop: so many requests a second arrive, whatever is answered; inf: all at once.",
    ),
    click.option(
        "--rates", callback=_parsed(_rates), metavar="FLOAT,...", help="An open loop at each of these rates, in turn."
    ),
    click.option(
        "--burstiness",
        type=_POSITIVE,
        default=1.0,
        show_default=True,
        help="Shape of the gamma distribution of gaps in an open loop: 1 is Poisson, less comes in bursts, more is more even.",
    ),
    click.option(
        "--requests",
        type=click.IntRange(min=1),
        help=f"Requests at each level.  [default: {DEFAULT_REQUESTS}, the whole trace, or as many as --duration-s has time for]",
    ),
    click.option(
        "--duration-s", type=_POSITIVE, help="Send nothing more after so long, at each level; what is under way is awaited."
    ),
    click.option(
        "--warmup", type=click.IntRange(min=0), default=2, show_default=True, help="Requests before, which do not count."
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Lengths, arrivals and prompts follow from it."
    ),
    click.option(
        "--input-tokens",
        default="128",
        show_default=True,
        callback=_parsed(parse_lengths),
        metavar="LENGTH",
        help="Of each prompt: 128, 128:32 (mean and standard deviation), or 64-256 (evenly).",
    ),
    click.option(
        "--output-tokens",
        default="64",
        show_default=True,
        callback=_parsed(parse_lengths),
        metavar="LENGTH",
        help="Of each answer, likewise; the end of sequence is ignored.",
    ),
    click.option(
        "--shared-prefix-tokens",
        type=click.IntRange(0, LENGTH_MAX),
        default=0,
        show_default=True,
        help="Tokens before these that all prompts begin with.",
    ),
    click.option(
        "--trace",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="Lengths, arrivals and shared prefixes of a real service: Azure's CSV or Mooncake's JSON lines. "
        "With --rate or --concurrency its arrivals are not used.",
    ),
    click.option("--trace-limit", type=click.IntRange(min=1), help="Only the first so many requests of the trace."),
    click.option(
        "--time-scale",
        type=_POSITIVE,
        default=1.0,
        show_default=True,
        help="Times of the trace times this; 0.5 is twice as fast.",
    ),
    click.option(
        "--too-long",
        type=click.Choice(["skip", "cut"]),
        default="skip",
        show_default=True,
        help="Requests that the model has no room for: leave them out, or cut them. It is said how many.",
    ),
    click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="0 is greedy."),
    click.option(
        "--cache-salt",
        metavar="TEXT",
        help="Share cached prefixes with other runs of the same salt.  [default: another one for each level, so that it begins cold]",
    ),
    click.option(
        "--slo",
        "objectives",
        multiple=True,
        callback=_parsed(parse_objective),
        metavar="MEASURE:MS",
        help="What counts as goodput: ttft:500, tpot:50, e2el:9000 (end to end); several: all of them.",
    ),
    click.option(
        "--retries", type=click.IntRange(min=0), default=0, show_default=True, help="Of a request that there was no room for."
    ),
    click.option(
        "--json",
        "json_file",
        type=_FILE,
        callback=_parsed(_in_a_folder),
        metavar="FILE",
        help="Write every request there, one JSON object a line.",
    ),
    click.option(
        "--plot",
        "plot_file",
        type=_FILE,
        callback=_parsed(_picture),
        metavar="FILE.png",
        help="Draw latency against load there; of one level, its latencies over time. Needs the extra `bench`.",
    ),
)


def bench_options(command: Command) -> Command:
    """Decorate a click command with the options that `given_config` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def given_config(options: dict[str, Any]) -> BenchConfig:
    """What the options say. Raises click.UsageError where they do not go together."""
    given = [name for name in ("concurrency", "concurrencies", "rate", "rates") if options[name] is not None]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(f'--{name}' for name in given)} are two kinds of load: give one")
    trace, requests = options["trace"], options["requests"]
    _refuse_what_has_no_effect(trace is not None, options["rate"] is not None or options["rates"] is not None)
    if requests is None and trace is None and options["duration_s"] is None:
        requests = DEFAULT_REQUESTS
    if requests is None and options["rate"] is not None and math.isinf(options["rate"]) and trace is None:
        raise click.UsageError("--rate inf needs --requests: without it there is no end of them")
    own = {name: options[name] for name in ("trace", "trace_limit", "time_scale", "too_long", "temperature", "cache_salt")}
    rest = {name: options[name] for name in ("duration_s", "burstiness", "warmup", "seed", "retries", "json_file", "plot_file")}
    return BenchConfig(
        levels=_levels(options),
        shape=Shape(options["input_tokens"], options["output_tokens"], options["shared_prefix_tokens"]),
        requests=requests,
        objectives=options["objectives"],
        **own,
        **rest,
    )


_DRAWN = ("input_tokens", "output_tokens", "shared_prefix_tokens")


def _refuse_what_has_no_effect(has_trace: bool, has_rate: bool) -> None:
    """Raises click.UsageError for an option on the command line that the others make void; one from the environment is for every run."""
    context = click.get_current_context()
    void = {} if has_trace else dict.fromkeys(("trace_limit", "time_scale"), "needs --trace")
    if has_trace:
        void |= dict.fromkeys(_DRAWN, "has no effect with --trace, which says the lengths")
    if not has_rate:
        void["burstiness"] = "needs --rate or --rates"
    for name, why in void.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} {why}")


def _levels(options: dict[str, Any]) -> tuple[LevelPlan, ...]:
    if options["rate"] is not None or options["rates"] is not None:
        return tuple(LevelPlan(rate=rate) for rate in options["rates"] or (options["rate"],))
    if options["concurrencies"] is not None:
        return tuple(LevelPlan(concurrency) for concurrency in options["concurrencies"])
    if options["concurrency"] is None and options["trace"] is not None:
        return (LevelPlan(),)
    return (LevelPlan(options["concurrency"] or DEFAULT_CONCURRENCY),)


def salt_of(config: BenchConfig) -> str:
    """Of one level: what was given, or one that nobody has had."""
    return config.cache_salt if config.cache_salt is not None else f"bench-{secrets.token_hex(8)}"
