"""What the documents name exists: files, links, make targets, commands and their options."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from services.cli.main import main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
MADE_AT_RUN_TIME = ("data/", "/", ".venv")
"""Beginnings of paths that a clone does not have."""


def named_files(text: str) -> Iterator[str]:
    """Paths in backticks: with a slash or a known suffix, and nothing that stands for something else."""
    for name in re.findall(r"`([\w./-]+)`", text):
        if name.endswith("/") or re.search(r"\.(py|md|proto|toml|svg)$", name):
            yield name


def named_options(text: str) -> Iterator[tuple[str, str]]:
    """(command, option) of every `tessera COMMAND ... --option` in one line."""
    for command, rest in re.findall(r"\btessera ([a-z]+)(.*)", text):
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest.partition("|")[0]):
            yield command, option


def anchors(text: str) -> list[str]:
    """What the headings of a document are linked by, as GitHub makes it of them."""
    return [
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_things_exist(document: Path) -> None:
    text = document.read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        linked = document.parent / path if path else document
        assert link.startswith("http") or linked.exists(), f"link {link}"
        assert link.startswith("http") or not anchor or anchor in anchors(linked.read_text()), f"link {link}"
    for name in named_files(text):
        places = (ROOT, ROOT / "protos", document.parent)
        assert name.startswith(MADE_AT_RUN_TIME) or any((place / name).exists() for place in places), f"file {name}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, f"make {target}"
    for path in re.findall(r"ARGS=(tests/[\w/.]+)", text):
        assert (ROOT / path).exists(), f"make test ARGS={path}"
    for name, option in named_options(text):
        command = main.get_command(click.Context(main), name)
        assert command is not None, f"tessera {name}"
        commands = command.commands.values() if isinstance(command, click.Group) else [command]
        parameters = [parameter for each in commands for parameter in each.params]
        known = {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}
        assert option in known | {"--help"}, f"tessera {name} {option}"


def test_a_wrong_name_would_be_seen() -> None:
    assert list(named_files("see `kv_manager/gone.py`, `gone/`, `not a path`")) == ["kv_manager/gone.py", "gone/"]
    assert list(named_options("run `tessera up --gone 1 --once`")) == [("up", "--gone"), ("up", "--once")]


def test_the_contents_of_operations_are_its_sections_in_their_order() -> None:
    head, _, rest = (ROOT / "docs" / "operations.md").read_text().partition("\n## ")
    sections = "\n".join(re.findall(r"^## .*$", f"## {rest}", re.MULTILINE))
    assert re.findall(r"\]\(#([^)]+)\)", head) == anchors(sections)


def test_names_given_with_their_file_are_defined_there() -> None:
    """The table from ATOM's names: `Name` (`path`), or `Name`, `Name` (`path`)."""
    text = (ROOT / "docs" / "structure.md").read_text()
    groups = re.findall(r"((?:`\w+`(?:, )?)+) \(`([\w./]+\.py)`\)", text)
    assert len(groups) > 15, "the pattern finds the table"
    for names, path in groups:
        source = next(place / path for place in (ROOT, ROOT / "protos") if (place / path).exists()).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), f"{name} is not in {path}"
