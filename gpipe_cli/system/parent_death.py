"""Processes that end when the one that started them does, however that one ended (Linux).

A process that watches its parent cannot end itself while it is stopped (SIGSTOP), and a parent that is killed cannot
end anything: so the kernel does it.
"""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """This process gets signal `number` when `parent`, which forked it, ends.

    The signal is forgotten in processes that it forks, and kept by a program that it executes.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
