"""Ctrl-C and SIGHUP (a closed terminal), SIGTERM and SIGUSR1 (SLURM, torchrun): each ends a command as soon as it can
clean up; a training that SIGTERM or SIGUSR1 ends writes a checkpoint first.
"""

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOPS = (signal.SIGTERM, signal.SIGUSR1)
STOPPED = 3  # the exit code of a command that one of them has ended


class Stopped(KeyboardInterrupt):
    """The command was asked to end by SIGTERM or SIGUSR1."""


class Interrupt:
    """Whether the command was asked to end; remembered: an exception can be lost in the callback of a library."""

    def __init__(self, at_once: bool, on_stop: Callable[[], None] | None) -> None:
        self._asked: type[KeyboardInterrupt] | None = None
        self._at_once, self._on_stop = at_once, on_stop

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in STOPS and self._on_stop is not None:
            self._on_stop()
            return
        self._asked = Stopped if number in STOPS else KeyboardInterrupt
        if self._at_once:
            raise self._asked

    def check(self) -> None:
        """Raise KeyboardInterrupt if the command was asked to end, whatever became of the first one."""
        if self._asked is not None:
            raise self._asked


@contextmanager
def interruptible(*, at_once: bool = True, on_stop: Callable[[], None] | None = None) -> Iterator[Interrupt]:
    """Inside, each is a KeyboardInterrupt, whatever a library makes of it; if not `at_once` by `check` only.

    SIGTERM and SIGUSR1 are Stopped or, with `on_stop`, a call of that.
    """
    interrupt = Interrupt(at_once, on_stop)
    # A shell without job control starts `gpipe ... &` with SIGINT ignored; `kill -INT` is to end it all the same. But
    # nohup has SIGHUP ignored so that the command goes on.
    numbers = [signal.SIGINT, *STOPS]
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
def held_back() -> Iterator[Callable[[], object]]:
    """Around a fork: signals are handled at its end. What a handler raises in a callback of the fork (logging has one)
    is printed and lost. Yields what lets them in again, for the forked process, which begins inside.

    A mask would not do: it is one thread's, and NumPy has others, which would take the signal.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, *STOPS)}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    waiting: list[int] = []

    def let_in() -> None:
        for number, handler in ours.items():
            signal.signal(number, handler)
        while waiting:
            signal.raise_signal(waiting.pop(0))

    for number in ours:
        signal.signal(number, lambda number, frame: waiting.append(number))
    try:
        yield let_in
    finally:
        let_in()


@contextmanager
def interruptible_import() -> Iterator[None]:
    """Around the import of torch: an interrupt takes effect at its end, after a second or two.

    Raised inside, a KeyboardInterrupt can end in an abort of torch's C++ with pages of traceback, become an ImportError
    of NumPy's, or a warning of torch's after which the run begins. Nothing that is imported is garbage, and it would be
    looked through some hundred times.
    """
    gc.disable()
    try:
        with interruptible(at_once=False) as interrupt:
            yield
            interrupt.check()
    finally:
        gc.freeze()
        gc.unfreeze()  # all that there is counts as old now
        gc.enable()
