"""The script for GPUs runs here too, on the CPU and at tiny sizes, and says that this is all that it was."""

import json
from pathlib import Path

import pytest
import torch

from tests.gpu import run
from tests.gpu.backends import Backend, Machine, this_machine
from tests.gpu.llamas import TINY, Llama

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU `make check-gpu` itself is to be run")


def test_without_a_gpu_the_same_code_runs_on_the_cpu_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--report", str(tmp_path / "report.md")]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["is_gpu"], found["good"], found["broken"]) == (False, True, [])
    assert found["missing"] == ["no GPU is here: only the CPU half was run"]
    assert {each["what"] for each in found["equalities"]} >= {"Llama", "DeepSeek-V3.2", "graphs, tiny"}
    assert [each["rows"] for each in found["speeds"]] == [1, 4]
    text = (tmp_path / "report.md").read_text()
    assert "**no GPU is here" in text and "tokens/s |" not in text


def test_a_backend_that_breaks_is_named_and_the_others_are_tried() -> None:
    def broken(dtype: torch.dtype) -> None:
        raise MemoryError("no room")

    here = this_machine()
    tried = run.Tried(Machine(here.name, here.device, (Backend("broken", broken), *here.backends), ()))
    tried.run()
    assert not tried.is_good and len(tried.broken) == 3 and "broken, models: MemoryError: no room" in tried.broken
    assert "**Broken: broken, models" in run.report(tried)
    assert len(tried.speeds) == 2 and not any(each.fails for each in tried.equalities)


def test_a_pass_reads_the_weights_once_and_every_context() -> None:
    llama = Llama.random(TINY, this_machine().backends[0].make(torch.bfloat16), max_rows=2, context=32)
    hidden, layers = TINY.hidden_size, TINY.num_layers
    layer = hidden * (4 * 16 + 2 * 2 * 16) + 4 * 16 * hidden + 3 * hidden * 96 + 2 * hidden
    weights = layers * layer + hidden + TINY.vocab_size * hidden
    assert llama.bytes_read(2) == 2 * weights + 2 * 32 * (layers * 2 * 2 * 16 * 2)
