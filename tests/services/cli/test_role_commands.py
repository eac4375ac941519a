"""A role that cannot start says why in one line, with exit status 1, or 2 for what its config refuses."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest


def tessera(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("worker", "--model", "./gone", "--listen", "127.0.0.1:0"), "--model './gone' does not exist"),
        (("worker", "--model", "deterministic", "--kv-cache-bytes", "10", "--listen", "127.0.0.1:0"), "--kv-cache-bytes is 10"),
        (("worker", "--model", "deterministic", "--device", "cuda"), "--device cuda is of no use to deterministic"),
        (("gateway", "--model", "./gone", "--scheduler", "127.0.0.1:1"), "--model './gone' does not exist"),
        (
            ("scheduler", "--worker", "127.0.0.1:1", "--redis", "redis://127.0.0.1:1", "--listen", "256.0.0.1:1"),
            "cannot listen",
        ),
        (
            ("scheduler", "--worker", "127.0.0.1:1", "--redis", "redis://127.0.0.1:1", "--redis-password-file", "./gone"),
            "--redis-password-file gone cannot be read",
        ),
    ],
)
def test_what_cannot_work_is_one_line(arguments: tuple[str, ...], complaint: str) -> None:
    result = tessera(*arguments)
    assert result.returncode == 1, result.stderr
    assert f"Error: {complaint}" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("worker",), "Missing option '--model'"),
        (("worker", "--model", "x", "--block-size", "7"), "--block-size must be 1 or a multiple of 16, got 7"),
        (("worker", "--model", "x", "--threads", "100000"), "--threads must be at most 1024, got 100000"),
        (("worker", "--model", "x", "--graph-size", "4", "--enforce-eager"), "--enforce-eager and --graph-size exclude"),
        (("scheduler", "--worker", "a:1"), "Missing option '--redis'"),
        (("scheduler", "--worker", "a:1", "--redis", "http://x"), "--redis must begin with redis://"),
        (("gateway", "--scheduler", "a:1"), "Missing option '--model'"),
    ],
)
def test_what_the_config_refuses_is_a_usage_error(arguments: tuple[str, ...], complaint: str) -> None:
    result = tessera(*arguments)
    assert result.returncode == 2, result.stderr
    assert complaint in result.stderr


@pytest.mark.parametrize("role", ["worker", "scheduler", "gateway"])
def test_a_role_that_is_told_to_end_while_it_is_imported_ends_as_asked(role: str, tmp_path: Path) -> None:
    """Its own modules hang here until the signal has come."""
    (tmp_path / "hanging.py").write_text(
        f"""
import signal, sys
from services.cli import {role}_command, role_process
class Hang:
    def find_spec(self, name, path=None, target=None):
        if name == "services.{role}.main":
            print("importing", flush=True)
            signal.pause()
sys.meta_path.insert(0, Hang())
{role}_command.command()
"""
    )
    own = {
        "worker": ("--model", "deterministic"),
        "scheduler": ("--worker", "a:1", "--redis", "redis://a:1"),
        "gateway": ("--model", "deterministic", "--scheduler", "a:1"),
    }
    command = [sys.executable, str(tmp_path / "hanging.py"), *own[role]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
