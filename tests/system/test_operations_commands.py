"""The commands that docs/operations.md tells operators to type, typed: as they stand there, but for addresses, against a system that runs."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from process_stack import MODEL, Stack, StackOptions

from services.cli.main import main
from tessera.client import Client, FinishReason

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("operations"), StackOptions(MODEL, f"deterministic:{MODEL}")) as running:
        with Client(running.address) as client:
            client.generate([1, 2, 3], max_tokens=1)  # all have found each other
        yield running


def commands(section: str) -> list[list[str]]:
    """The lines of a section that call `tessera`, as words."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (tessera .*)$", text, re.MULTILINE)]


def typed(words: list[str], stack: Stack, request_id: str = "") -> Result:
    """What comes of a command. Those that ask a gateway are told which."""
    addresses = {"50051": stack.gateway.address, "50052": stack.scheduler.address, "50053": stack.worker.address}
    given = [addresses.get(word.rpartition(":")[2], word) if ":" in word else word for word in words[1:]]
    given = [request_id if word == "ID" else word for word in given]
    if given[0] != "health":
        given += ["--gateway", stack.gateway.address]
    return CliRunner().invoke(main, given)


@pytest.mark.parametrize("section", ["Health", "Debug"])
def test_looking_finds_a_system_that_works(section: str, stack: Stack) -> None:
    found = commands(section)
    assert len(found) >= 4
    for words in found:
        result = typed(words, stack)
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"
        if words[1] == "health":
            assert result.output == "SERVING\n"


def test_operators_do_what_the_manual_says(stack: Stack) -> None:
    """`abort` has a request to end; what follows on a pause or a drain undoes it."""
    with Client(stack.address) as client:
        running = client.stream([7, 8, 9], max_tokens=4000, ignore_eos=True)
        next(running)
        listed = json.loads(typed(shlex.split("tessera admin requests --json"), stack).output)
        found = commands("Administer")
        assert {words[2] for words in found} >= {"stats", "requests", "abort", "pause", "drain-worker", "reset-prefix-cache"}
        undo = {"pause": ["tessera", "admin", "resume"], "drain-worker": ["tessera", "admin", "undrain-worker", "x:50053"]}
        for words in found:
            for each in (words, undo.get(words[2])):
                result = typed(each, stack, listed["requests"][0]["id"]) if each else None
                assert result is None or result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"
        assert list(running)[-1].finish.reason is FinishReason.ABORTED
        assert client.generate([1, 2, 3], max_tokens=2, ignore_eos=True).finish.usage.completion_tokens == 2
