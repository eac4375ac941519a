"""A child says when it is ready, dies loudly, ends when told, and never outlives its parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from services.cli.child import Child, PartDied

RunAsync = Callable[..., Any]


def pid_of(address: str) -> int:
    """Fake children give their process id as their address."""
    return int(address.removeprefix("pid:"))


def test_ready_gives_the_address_and_stop_ends_the_process(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    async def story() -> None:
        child = Child(make_spec("worker", "serves"))
        await child.spawn()
        pid = pid_of(await child.ready())
        assert psutil.pid_exists(pid)
        await child.stop(grace_s=10.0)
        assert not psutil.pid_exists(pid)
        await child.stop(grace_s=10.0)  # again: nothing to do

    run_async(story())


def test_a_death_before_ready_shows_the_last_log_lines(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    async def story() -> None:
        child = Child(make_spec("worker", "dies before it is ready"))
        await child.spawn()
        with pytest.raises(PartDied, match=r"worker ended with status 3; (?s:.*)weights are missing"):
            await child.ready()

    run_async(story())


def test_sigterm_ignored_is_followed_by_sigkill(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    async def story() -> None:
        child = Child(make_spec("worker", "ignores SIGTERM"))
        await child.spawn()
        pid = pid_of(await child.ready())
        await child.stop(grace_s=0.2)
        assert not psutil.pid_exists(pid)
        assert f"killed by signal {signal.SIGKILL:d}" in str(await child.ended())

    run_async(story())


def test_a_stale_ready_file_is_not_believed(run_async: RunAsync, make_spec: Callable[..., Any]) -> None:
    async def story() -> None:
        spec = make_spec("worker", "dies before it is ready")
        spec.ready_file.write_text('{"address": "of the previous run"}')
        child = Child(spec)
        await child.spawn()
        with pytest.raises(PartDied):
            await child.ready()

    run_async(story())


_PARENT = """
import asyncio, sys
from pathlib import Path
from services.cli.child import Child, ChildSpec
async def main():
    child = Child(ChildSpec("worker", tuple(sys.argv[3:]), Path(sys.argv[1]), Path(sys.argv[2])))
    await child.spawn()
    print(await child.ready(), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_a_parent_killed_with_sigkill_leaves_no_child(make_spec: Callable[..., Any]) -> None:
    spec = make_spec("worker", "ignores SIGTERM")
    command = [sys.executable, "-c", _PARENT, str(spec.log), str(spec.ready_file), *spec.command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(pid_of(parent.stdout.readline().strip()))
        parent.kill()
    child.wait(timeout=10)  # raises TimeoutExpired for one that lives on
    assert not child.is_running()


def test_a_child_whose_parent_is_gone_already_does_not_start(make_spec: Callable[..., Any]) -> None:
    from services import bound_process

    command = [sys.executable, "-I", "-S", bound_process.__file__, str(os.getpid() + 1), sys.executable, "-c", "print('ran')"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
