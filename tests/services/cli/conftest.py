"""Fake children: tiny programs that behave like a role, well or badly."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.child import ChildSpec

_SAY_READY = """
import json, os, signal, sys, time
def ready(path):
    with open(path + ".part", "w") as file:
        json.dump({"address": f"pid:{os.getpid()}"}, file)
    os.replace(path + ".part", path)
"""

PROGRAMS = {
    "serves": "ready(sys.argv[1]); signal.pause()",
    "dies before it is ready": "print('weights are missing', flush=True); sys.exit(3)",
    "ignores SIGTERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(sys.argv[1]); signal.pause(); time.sleep(600)",
    "never ready": "signal.pause()",
    "dies once ready": "ready(sys.argv[1]); sys.exit(4)",
}
"""Name -> Python source; `sys.argv[1]` is the ready file."""

MakeSpec = Callable[[str, str], ChildSpec]


@pytest.fixture
def make_spec(tmp_path: Path) -> MakeSpec:
    """`make_spec(name, program)`: what to run for a child `name` that behaves like PROGRAMS[program]."""

    def make(name: str, program: str) -> ChildSpec:
        ready_file = tmp_path / f"{name}.json"
        command = (sys.executable, "-S", "-c", _SAY_READY + PROGRAMS[program], str(ready_file))
        return ChildSpec(name, command, tmp_path / f"{name}.log", ready_file)

    return make
