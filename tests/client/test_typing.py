"""The client's types, as a user's type checker sees them, and a docstring for everything that a user can call."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tessera.client

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "typed"


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """Of `mypy --strict`, with no settings but its own: program -> lines with an error. What it says of the installed package is not for users."""
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent"]
    command += ["--cache-dir", str(tmp_path_factory.mktemp("mypy")), *map(str, sorted(PROGRAMS.glob("*.py")))]
    environment = os.environ | {"MYPYPATH": str(ROOT / "protos")}
    result = subprocess.run(command, env=environment, cwd=PROGRAMS, capture_output=True, text=True, timeout=240)
    assert result.returncode == 1, result.stdout + result.stderr
    found: dict[str, set[int]] = {}
    for name, line in re.findall(r"^(\w+\.py):(\d+): error:", result.stdout, re.MULTILINE):
        found.setdefault(name, set()).add(int(line))
    return found


def test_a_right_program_is_accepted(complaints: dict[str, set[int]]) -> None:
    assert "right_program.py" not in complaints


def test_every_mistake_is_found_and_nothing_else(complaints: dict[str, set[int]]) -> None:
    lines = (PROGRAMS / "wrong_program.py").read_text().splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) > 10 and complaints["wrong_program.py"] == wrong


def test_the_right_program_uses_every_public_name() -> None:
    used = set(re.findall(r"\w+", (PROGRAMS / "right_program.py").read_text().partition("\n)\n")[2]))
    assert set(tessera.client.__all__) - used == set()


def test_the_right_program_calls_every_public_method() -> None:
    program = (PROGRAMS / "right_program.py").read_text()
    parts = dict(re.findall(r"^(?:async )?def (\w+)(.*?)(?=^\S|\Z)", program, re.MULTILINE | re.DOTALL))
    clients = {
        "blocking": tessera.client.Client,
        "asynchronous": tessera.client.AsyncClient,
        "administration": tessera.client.AdminClient,
    }
    for part, kind in clients.items():
        for name, member in public_members(kind):
            assert inspect.isfunction(member) and (name == "close" or f"client.{name}(" in parts[part]), f"{part}: {name}"


def public_members(kind: type) -> Iterator[tuple[str, object]]:
    """Methods and properties of its own."""
    for name, member in vars(kind).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            yield name, member


@pytest.mark.parametrize("name", [name for name in tessera.client.__all__ if inspect.isclass(getattr(tessera.client, name))])
def test_what_is_public_says_what_it_is(name: str) -> None:
    kind = getattr(tessera.client, name)
    own = kind.__doc__ or ""
    assert own.strip() and not own.startswith(f"{name}("), "dataclasses make up one of their own"
    for method, member in public_members(kind):
        assert inspect.getdoc(member), f"{name}.{method}"
    if "__init__" in vars(kind) and not issubclass(kind, Exception) and not hasattr(kind, "__dataclass_fields__"):
        assert kind.__init__.__doc__, f"{name}.__init__"
