"""Whole trees of processes are stopped, and go on."""

import subprocess
import sys

import psutil

from tests.benchmarks.peers.processes import children, resume, stop

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; print('there', flush=True); sys.stdin.read()"], stdin=subprocess.PIPE)
child.wait()
"""


def test_all_below_a_process_is_stopped_and_goes_on() -> None:
    before = children()
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"there\n"
        started = children() - before
        assert {process.pid for process in started} == {parent.pid}
        tree = [*started, *psutil.Process(parent.pid).children()]
        assert len(tree) == 2
        stop(started)
        assert {process.status() for process in tree} == {psutil.STATUS_STOPPED}
        resume(started)
        assert psutil.STATUS_STOPPED not in {process.status() for process in tree}
    finally:
        for process in psutil.Process(parent.pid).children(recursive=True):
            process.kill()
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_a_process_that_has_ended_is_none_to_stop() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    process = psutil.Process(ended.pid)
    ended.wait()
    stop([process])
    resume([process])
