"""A part of `make parity`: the real model through the real scheduler and engine, against transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.architectures import LOGIT_TOLERANCE

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)  # of two threads' work on a busy machine
def test_three_prompts_in_every_mode() -> None:
    command = [sys.executable, "-m", "tests.parity.run", "--prompts", "3", "--tokens", "12", "--threads", "1"]
    command += ["--architectures", "Qwen3ForCausalLM"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    assert (line["prompts"], line["tokens"], line["mismatches"], len(line["modes"])) == (3, 36, 0, 12)
    assert line["drawn_differences"] == 0
    assert 0.0 < line["architectures"]["Qwen3ForCausalLM"] <= LOGIT_TOLERANCE
