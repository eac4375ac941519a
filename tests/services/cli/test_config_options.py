"""Options come from a config's fields, and only from them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from services.cli.config_options import Text, build_config, config_options
from tessera.values.config import ConfigError


@dataclass(frozen=True, slots=True)
class Inner:
    depth: int = 3
    caching: bool = True


@dataclass(frozen=True, slots=True)
class Outer:
    workers: tuple[str, ...]
    name: str = "default"
    grace_s: float = 5.0
    folder: Path | None = None
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self) -> None:
        if self.grace_s < 0:
            raise ConfigError(f"grace_s must not be negative, got {self.grace_s}")


TEXTS: dict[str, Text | None] = {
    "workers": Text("Addresses.", name="--worker"),
    "name": Text("Name.", choices=("default", "other")),
    "grace_s": Text("Grace."),
    "folder": Text("Folder."),
    "depth": Text("Depth."),
    "caching": Text("Caching."),
}


def parse(*arguments: str) -> Any:
    """What the command makes of `arguments`: the config, or click's output where it refuses them."""
    built: list[Outer] = []

    @click.command()
    @config_options(Outer, TEXTS)
    def command(**options: Any) -> None:
        built.append(build_config(Outer, options))

    result = CliRunner().invoke(command, arguments)
    return built[0] if result.exit_code == 0 else (result.exit_code, result.output)


def test_defaults_are_the_config_s_own() -> None:
    assert parse("--worker", "a:1") == Outer(("a:1",))


def test_every_kind_of_field_is_set() -> None:
    arguments = ("--worker", "a:1", "--worker", "b:2", "--name", "other", "--grace-s", "0.5")
    nested = ("--folder", "/x", "--depth", "7", "--no-caching")
    assert parse(*arguments, *nested) == Outer(("a:1", "b:2"), "other", 0.5, Path("/x"), Inner(7, False))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Missing option '--worker'"),
        (("--worker", "a", "--grace-s", "-1"), "--grace-s must not be negative, got -1.0"),
        (("--worker", "a", "--depth", "x"), "'x' is not a valid integer"),
        (("--worker", "a", "--name", "third"), "'third' is not one of 'default', 'other'"),
        (("--worker", "a", "--unknown", "1"), "No such option"),
    ],
)
def test_a_refused_value_is_a_usage_error(arguments: tuple[str, ...], complaint: str) -> None:
    status, output = parse(*arguments)
    assert status == 2 and complaint in output


def test_a_field_without_a_text_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="depth"):
        config_options(Outer, {name: text for name, text in TEXTS.items() if name != "depth"})


def test_a_text_without_a_field_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="gone"):
        config_options(Outer, TEXTS | {"gone": Text("A field that was removed.")})


def test_a_field_that_is_not_offered_keeps_its_default() -> None:
    built: list[Outer] = []

    @click.command()
    @config_options(Outer, TEXTS | {"depth": None})
    def command(**options: Any) -> None:
        built.append(build_config(Outer, options))

    assert CliRunner().invoke(command, ("--worker", "a", "--depth", "7")).exit_code == 2
    assert CliRunner().invoke(command, ("--worker", "a")).exit_code == 0
    assert built == [Outer(("a",))]
