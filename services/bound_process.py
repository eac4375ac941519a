"""Start a program that the kernel kills when its parent is gone, whatever ends the parent, SIGKILL included.

Run as a file of its own, `python -I -S bound_process.py PARENT_PID PROGRAM ARGUMENT...`: it asks for the signal and
then becomes the program. Doing the same between fork and exec would run Python code in a forked copy of the parent,
which is not safe once that has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Tie this process to `parent`, then exec `command`. Does not return; exits 1 when the parent is gone already."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        sys.exit("prctl(PR_SET_PDEATHSIG) failed: this needs Linux")
    if os.getppid() != parent:  # it died before the call above
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
