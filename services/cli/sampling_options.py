"""Options for sampling parameters, made from the one table that says which values are accepted."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import click

from tessera.client import GenerateOptions
from tessera.client.request import SamplingOptions
from tessera.values.sampling import Limit, plain_number
from tessera.values.sampling_limits import NUMBER_LIMITS

Command = TypeVar("Command", bound=Callable[..., Any])


NUMBERS = {name: limit for name, limit in NUMBER_LIMITS.items() if name in SamplingOptions.__annotations__}
"""The numbers that the public API takes."""

LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words", "logprob_token_ids")


TOKEN_ID = click.IntRange(0, 2**32 - 1)
"""Whatever the message can hold: the model's own range is the server's matter."""


class _Bias(click.ParamType[tuple[int, float]]):
    """One entry of `logit_bias`."""

    name = "ID=BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        """Parse `ID=BIAS`."""
        if isinstance(value, tuple):
            return value
        try:
            token_id, bias = value.split("=")
            return TOKEN_ID.convert(token_id, param, ctx), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not a token id, '=' and a number", param, ctx)


def sampling_options(command: Command) -> Command:
    """Decorate a click command with one option per sampling parameter of the public API."""
    for option in (
        click.option("--bad-word", "bad_words", multiple=True, metavar="TEXT", help="A word that the answer is not to have."),
        _ids("--allowed-token-id", "allowed_token_ids", "A token id that the answer may have; where one is given, no other."),
        click.option(
            "--logit-bias", type=_Bias(), multiple=True, help="What is added to the logit of a token id; -100 to 100."
        ),
        _ids("--stop-token-id", "stop_token_ids", "A token id that ends the answer."),
        _ids("--logprob-token-id", "logprob_token_ids", "A token id whose log-probability comes with every token's."),
        click.option("--ignore-eos", is_flag=True, help="Go on after the model's end of sequence."),
    ):
        command = option(command)
    for name in reversed(NUMBERS):
        command = _option(name, NUMBERS[name])(command)
    return command


def given_sampling(options: Mapping[str, Any]) -> GenerateOptions:
    """What the caller gave, as the client takes it; the rest stays absent, so that the server's defaults hold."""
    given: dict[str, Any] = {name: options[name] for name in NUMBERS if options[name] is not None}
    given |= {name: options[name] for name in ("ignore_eos", *LISTS) if options[name]}
    if options["logit_bias"]:
        given["logit_bias"] = dict(options["logit_bias"])
    return cast(GenerateOptions, given)


def _ids(flag: str, name: str, help_text: str) -> Callable[[Command], Command]:
    return click.option(flag, name, type=TOKEN_ID, multiple=True, metavar="ID", help=help_text)


def _option(name: str, limit: Limit) -> Callable[[Command], Command]:
    kind = int if limit.integer else float
    default = "" if limit.default is None else f"  [default: {limit.default:g}]"
    help_text = f"{plain_number(limit.minimum)} to {plain_number(limit.maximum)}; {limit.meaning}.{default}"

    def check(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
        problem = None if value is None else limit.problem(value)
        if problem is not None:
            raise click.BadParameter(problem)
        return value

    return click.option(
        "--" + name.replace("_", "-"), name, type=kind, callback=check, metavar=kind.__name__.upper(), help=help_text
    )
