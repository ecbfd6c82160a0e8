"""Ctrl-C, SIGTERM (SLURM, torchrun) and SIGHUP (a closed terminal): each ends a command as soon as it can clean up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Whether the command was asked to end; remembered: an exception can be lost in the callback of a library."""

    def __init__(self, at_once: bool) -> None:
        self.asked = False
        self._at_once = at_once

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._at_once:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if the command was asked to end, whatever became of the first one."""
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def interruptible(*, at_once: bool = True) -> Iterator[Interrupt]:
    """Inside, each is a KeyboardInterrupt, whatever a library makes of it; if not `at_once` by `check` only."""
    interrupt = Interrupt(at_once)
    # A shell without job control starts `gpipe ... &` with SIGINT ignored; `kill -INT` is to end it all the same. But
    # nohup has SIGHUP ignored so that the command goes on.
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [(number, signal.signal(number, interrupt)) for number in numbers]
    try:
        yield interrupt
    except Exception:
        interrupt.check()
        raise
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def interruptible_import() -> Iterator[None]:
    """Around the import of torch: an interrupt takes effect at its end, after a second or two.

    Raised inside, a KeyboardInterrupt can end in an abort of torch's C++ with pages of traceback, become an ImportError
    of NumPy's, or a warning of torch's after which the run begins.
    """
    with interruptible(at_once=False) as interrupt:
        yield
        interrupt.check()
