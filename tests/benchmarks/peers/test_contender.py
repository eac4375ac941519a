"""What is made of the times of tokens, and how drivers are asked."""

import sys
from pathlib import Path

import pytest

from tessera.values.model import ModelInfo
from tests.benchmarks.peers import driven as driven_module
from tests.benchmarks.peers.contender import run_of
from tests.benchmarks.peers.driven import driven
from tests.benchmarks.peers.llama_server import token_times
from tests.benchmarks.workloads import Workload

TWO = Workload("two", 2, 4, 3)
MODEL = ModelInfo("model", "", 1000, 0, (2,), 1, "", "")

DRIVER = """
import sys
from questions import answer_questions

def load():
    print("libraries talk")
    asked = []
    def run(question):
        asked.append(len(question.prompts))
        if len(question.prompts) == 7:
            sys.exit("seven is too many")
        print("while they run, too")
        return [(0.5, [1.0 + len(asked)] * question.output_tokens)] * len(question.prompts)
    return "1.2.3", run

answer_questions(load)
"""


def test_a_run_lasts_from_the_first_request_to_the_last_token() -> None:
    run = run_of([(10.0, [10.5, 10.75, 11.0]), (9.5, [10.5, 11.5, 12.5])], TWO)
    assert (run.seconds, run.tokens_per_s, run.tpot_ms, run.is_whole) == (3.0, 2.0, 625.0, True)
    assert (run.ttft_ms.mean, run.ttft_ms.p50, run.ttft_ms.max) == (750.0, 750.0, 1000.0)


def test_a_run_that_was_ended_counts_what_had_come() -> None:
    run = run_of([(10.0, [10.5, 10.75]), (9.5, [])], TWO, limit_s=4.0)
    assert (run.is_whole, run.seconds, run.tokens_per_s, run.ttft_ms.max) == (False, 4.0, 0.5, 500.0)
    nothing = run_of([(10.0, []), (9.5, [])], TWO, limit_s=4.0)
    assert (nothing.tokens_per_s, nothing.ttft_ms.p50) == (0.0, 4000.0), "a first token takes longer than that"


def test_a_run_within_its_limit_is_whole() -> None:
    run = run_of([(10.0, [10.5, 10.75, 11.0]), (9.5, [10.5, 11.5, 12.5])], TWO, limit_s=4.0)
    assert (run.is_whole, run.seconds) == (True, 3.0)


@pytest.mark.parametrize("came", [[10.5, 10.75], [10.5, 10.75, 11.0, 11.25]])
def test_an_answer_of_another_length_is_no_run(came: list[float]) -> None:
    with pytest.raises(RuntimeError, match="not 2 times 3"):
        run_of([(10.0, came), (9.5, [10.5, 11.5, 12.5])], TWO)


def test_events_of_a_server_are_made_its_tokens() -> None:
    assert token_times([1.0, 2.0, 3.0], 2) == [1.0, 2.0], "the last event has no token"
    assert token_times([1.0, 2.0], 4) == [1.0, 2.0, 2.0, 2.0], "an event had several"


@pytest.fixture
def drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one driver, of an engine that computes nothing."""
    questions = driven_module.DRIVERS / "questions.py"
    (tmp_path / "questions.py").write_text(questions.read_text())
    (tmp_path / "engine.py").write_text(DRIVER)
    monkeypatch.setattr(driven_module, "DRIVERS", tmp_path)
    return tmp_path


def test_a_driver_answers_though_libraries_print(drivers: Path) -> None:
    with driven(Path(sys.executable), "engine.py", (), drivers / "log", MODEL) as engine:
        run = engine.run(TWO, 0)
        assert (run.seconds, run.ttft_ms.p50, run.tpot_ms) == (1.5, 1500.0, 0.0)
        warm = Workload("warm", 2, 4, 3, shared_prefix_tokens=4, is_warm=True)
        assert engine.run(warm, 0).seconds == 3.5, "one request came before"
    assert (drivers / "log").read_text().split("\n")[:2] == ["libraries talk", "while they run, too"]


def test_a_driver_that_ends_is_told_with_its_last_words(drivers: Path) -> None:
    told = pytest.raises(RuntimeError, match="it ended: seven is too many")
    with driven(Path(sys.executable), "engine.py", (), drivers / "log", MODEL) as engine, told:
        engine.run(Workload("seven", 7, 4, 3), 0)


def test_an_environment_that_is_not_there_is_told(drivers: Path) -> None:
    absent = driven(drivers / "no-python", "engine.py", (), drivers / "log", MODEL)
    with pytest.raises(RuntimeError, match="it ended"), absent:
        pass
