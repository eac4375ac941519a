"""The examples of clients, against a real system."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from process_stack import Stack

EXAMPLES = Path(__file__).parents[2] / "examples"
NODE = shutil.which("node")
NODE_MODULES = EXAMPLES / "node" / "node_modules" / "@grpc" / "grpc-js"

COMMANDS = [
    pytest.param([sys.executable, str(EXAMPLES / "chat.py")], id="client"),
    pytest.param([sys.executable, str(EXAMPLES / "stubs.py")], id="stubs"),
    pytest.param(
        [NODE or "node", str(EXAMPLES / "node" / "chat.js")],
        id="node",
        marks=pytest.mark.skipif(NODE is None or not NODE_MODULES.exists(), reason="no node, or `make setup-node` has not run"),
    ),
]


def run(command: list[str], *arguments: str) -> tuple[int, str, str]:
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_streams_an_answer_and_tells_its_end(stack: Stack, command: list[str]) -> None:
    status, out, err = run(command, stack.address, "What is the capital of France?")
    assert (status, out.strip()) == (0, "The capital of France is Paris."), err
    assert "prompt 37 tokens, answer 8 tokens" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_says_why_it_was_refused(stack: Stack, command: list[str]) -> None:
    status, out, err = run(command, stack.address, "x y " * 30_000)
    assert (status, out) == (1, "")
    assert "INVALID_ARGUMENT: generation.chat.messages: has" in err
