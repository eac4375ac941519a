"""Command-line options made from the fields of a config dataclass, so that the two cannot drift apart.

The dataclass has names, types and defaults; a table beside the command has what people read. A field without an
entry, or an entry without a field, is a bug that shows as soon as the command is imported. A field whose entry is None
is no option, and keeps its default.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from tessera.values.config import ConfigError

Config = TypeVar("Config")
Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Text:
    """What people read of one option: `help` with range and unit, `metavar` for the value, `name` where it is not the field's."""

    help: str
    metavar: str | None = None
    name: str | None = None
    choices: tuple[str, ...] = ()


def config_options(config: type[Any], texts: Mapping[str, Text | None]) -> Callable[[Command], Command]:
    """Decorate a click command with one option per field of `config`; a field that is a dataclass gives its own fields' options."""
    flat = _flat_fields(config)
    assert flat.keys() == texts.keys(), f"fields and texts of {config.__name__} differ: {flat.keys() ^ texts.keys()}"

    def decorate(command: Command) -> Command:
        for name in reversed(flat):  # click lists options in the reverse of the order in which they are added
            text = texts[name]
            command = command if text is None else _option(flat[name], text)(command)
        return command

    return decorate


def build_config(config: type[Config], values: Mapping[str, Any]) -> Config:
    """The config from what click parsed. Raises click.UsageError with the config's own words where it refuses a value, its fields called
    as the options are."""
    try:
        return _build(config, values)
    except ConfigError as error:
        raise click.UsageError(said_of_options(str(error))) from error


def said_of_options(message: str) -> str:
    """`message` with the options of the running command in place of the names of their fields: the first word, and those that are certainly none
    of English, nor one of the values that an option may have."""
    context = click.get_current_context()
    options = [option for option in context.command.params if option.name in context.params]
    flags = {option.name: option.opts[0] for option in options}
    values = {value for option in options if isinstance(option.type, click.Choice) for value in option.type.choices}

    def said(word: re.Match[str]) -> str:
        is_value = word[0] in values and word.start() > 0
        return word[0] if is_value else flags.get(word[0], word[0])

    return re.sub(r"^\w+|\w+_\w+", said, message)


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    type: Any
    default: Any  # dataclasses.MISSING: the option is required


def _flat_fields(config: type[Any]) -> dict[str, _Field]:
    hints = typing.get_type_hints(config)
    flat: dict[str, _Field] = {}
    for item in dataclasses.fields(config):
        if dataclasses.is_dataclass(hints[item.name]):
            inner = _flat_fields(hints[item.name])
        else:
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            inner = {item.name: _Field(item.name, hints[item.name], default)}
        assert not flat.keys() & inner.keys(), f"two fields of {config.__name__} share a name: {flat.keys() & inner.keys()}"
        flat |= inner
    return flat


def _option(item: _Field, text: Text) -> Callable[[Command], Command]:
    flag = text.name or "--" + item.name.replace("_", "-")
    required = item.default is dataclasses.MISSING
    settings: dict[str, Any] = {"help": text.help, "required": required, "show_default": item.default not in (None, "", ())}
    if not required:
        settings["default"] = item.default
    kind = _plain_type(item.type)
    if kind is bool:
        return click.option(f"{flag}/--no-{flag.removeprefix('--')}", item.name, **settings)
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
        settings["multiple"] = True
    if text.choices:
        return click.option(flag, item.name, type=click.Choice(text.choices), **settings)
    return click.option(flag, item.name, type=_click_type(kind), metavar=text.metavar, **settings)


def _plain_type(hint: Any) -> Any:
    """`X` for `X | None`, else the hint itself."""
    if isinstance(hint, types.UnionType):
        inner = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        assert len(inner) == 1, f"an option cannot be {hint}"
        return inner[0]
    return hint


def _click_type(kind: Any) -> Any:
    assert kind in (int, float, str, Path), f"no option type for {kind}"
    return click.Path(path_type=Path) if kind is Path else kind


def _build(config: type[Config], values: Mapping[str, Any]) -> Config:
    hints = typing.get_type_hints(config)
    assert dataclasses.is_dataclass(config)
    arguments = {
        item.name: _build(hints[item.name], values) if dataclasses.is_dataclass(hints[item.name]) else values[item.name]
        for item in dataclasses.fields(config)
        if item.name in values or dataclasses.is_dataclass(hints[item.name])
    }
    return config(**arguments)
