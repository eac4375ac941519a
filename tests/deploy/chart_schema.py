"""Writes the roles' options into the chart's values.schema.json, from the commands themselves: `python -m tests.deploy.chart_schema`, or
`make chart-schema`."""

import json
from pathlib import Path
from typing import Any

import click

from services.cli.main import main as tessera

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "tessera"
SCHEMA = CHART / "values.schema.json"
ROLES = ("gateway", "scheduler", "worker")

_OF_ALL = {
    *("listen", "health-listen", "metrics-listen", "otlp-endpoint", "trace-sample-ratio", "ready-file"),
    *("tls-cert", "tls-key", "tls-ca", "tls-peer-name", "tls-client-ca", "tokens", "token-file"),
}
OWNED = {
    "gateway": {*_OF_ALL, "scheduler", "model", "engine-listen", "drain-grace-s"},
    "scheduler": {*_OF_ALL, "worker", "redis", "redis-password-file", "group"},
    "worker": {
        *_OF_ALL,
        *("model", "device", "tensor-parallel-size", "drain-grace-s"),
        *("expert-parallel-size", "expert-parallel-rank", "expert-parallel-store"),
    },
}
"""What the chart gives a role by itself, from other values: it is no key of `options`."""


def options(role: str) -> dict[str, click.Option]:
    """Every option of `tessera ROLE` by its name, without dashes before it."""
    command = tessera.get_command(click.Context(tessera), role)
    assert command is not None
    return {option.opts[0].removeprefix("--"): option for option in command.params if isinstance(option, click.Option)}


def definition(role: str) -> dict[str, Any]:
    """The schema of `ROLE.options`."""
    named = {name: _schema(option) for name, option in options(role).items() if name not in OWNED[role]}
    return {"type": "object", "additionalProperties": False, "properties": named}


def _schema(option: click.Option) -> dict[str, Any]:
    kind = _kind(option)
    said = (option.help or "") if option.default in (None, "", ()) else f"{option.help} Default: {_words(option.default)}."
    return {"description": said, **({"type": "array", "minItems": 1, "items": kind} if option.multiple else kind)}


def _kind(option: click.Option) -> dict[str, Any]:
    if option.is_flag:
        return {"type": "boolean"}
    if isinstance(option.type, click.Choice):
        return {"enum": list(option.type.choices)}
    if isinstance(option.type, click.types.FloatParamType):
        return {"type": "number", "minimum": 0, "maximum": 2**31 - 1}
    if isinstance(option.type, click.types.IntParamType):
        return {"type": "integer", "minimum": 0, "maximum": 2**53}  # beyond, Helm's numbers are no longer whole
    return {"type": "string", "minLength": 1}


def _words(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else str(default)


def filled(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` with the options as the commands have them now."""
    own = {f"{role}Options": definition(role) for role in ROLES}
    return {**schema, "definitions": {**schema["definitions"], **own}}


def write() -> None:
    """Bring the file up to date."""
    SCHEMA.write_text(json.dumps(filled(json.loads(SCHEMA.read_text())), indent=1) + "\n")


if __name__ == "__main__":
    write()
