"""Steps of an installation: done once, and told where they fail."""

import sys
from pathlib import Path

import pytest

from tests.benchmarks.peers.install import Home, InstallFailed

PYTHON = (sys.executable, "-c")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def home(tmp_path: Path, said: list[str]) -> Home:
    return Home(tmp_path, tmp_path / "model.gguf", "torch", said.append)


def test_a_step_is_told_and_kept_in_a_log(home: Home, said: list[str]) -> None:
    home.step("say hello", *PYTHON, "print('hello')")
    assert (home.folder / "logs/say-hello.log").read_text() == "hello\n"
    assert said[0] == "  say hello ..." and said[1].startswith("    ok")


def test_a_step_that_fails_says_its_last_words(home: Home) -> None:
    with pytest.raises(InstallFailed, match=r"break: .* ended with 3: no room \(log: .*break\.log\)"):
        home.step("break", *PYTHON, "print('no room'); raise SystemExit(3)")
    with pytest.raises(InstallFailed, match="lost: no-such-program"):
        home.step("lost", "no-such-program")


def test_what_is_done_is_not_done_again(home: Home) -> None:
    calls: list[int] = []
    home.once("thing==1", lambda: calls.append(1))
    home.once("thing==1", lambda: calls.append(1))
    assert calls == [1]


def test_what_failed_is_tried_again(home: Home) -> None:
    def fail() -> None:
        raise InstallFailed("once")

    with pytest.raises(InstallFailed):
        home.once("thing==1", fail)
    calls: list[int] = []
    home.once("thing==1", lambda: calls.append(1))
    assert calls == [1]
