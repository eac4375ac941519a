"""Options for sampling parameters, made from the one table that says which values are accepted."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click

from tessera.client import GenerateOptions
from tessera.values.sampling import LIMITS, Limit

Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_options(command: Command) -> Command:
    """Decorate a click command with one option per entry of LIMITS, and the two that have no range."""
    command = click.option(
        "--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID", help="A token id that ends the answer."
    )(command)
    command = click.option("--ignore-eos", is_flag=True, help="Go on after the model's end of sequence.")(command)
    for name in reversed(LIMITS):
        command = _option(name, LIMITS[name])(command)
    return command


def given_sampling(options: Mapping[str, Any]) -> GenerateOptions:
    """What the caller gave, as the client takes it; the rest stays absent, so that the server's defaults hold."""
    given: dict[str, Any] = {name: options[name] for name in LIMITS if options[name] is not None}
    given |= {name: options[name] for name in ("ignore_eos", "stop_token_ids") if options[name]}
    return cast(GenerateOptions, given)


def _option(name: str, limit: Limit) -> Callable[[Command], Command]:
    kind = int if limit.integer else float
    default = "" if limit.default is None else f"  [default: {limit.default:g}]"
    help_text = f"{kind(limit.minimum)} to {kind(limit.maximum)}; {limit.meaning}.{default}"

    def check(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
        problem = None if value is None else limit.problem(value)
        if problem is not None:
            raise click.BadParameter(problem)
        return value

    return click.option(
        "--" + name.replace("_", "-"), name, type=kind, callback=check, metavar=kind.__name__.upper(), help=help_text
    )
