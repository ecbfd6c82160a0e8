"""The signals that end a command as soon as it has cleaned up: Ctrl-C, and SIGTERM, SIGUSR1 (SLURM, torchrun) and
SIGHUP (a closed terminal). A training that they end writes a checkpoint first: `launch/supervisor.py` passes them on.
"""

import gc
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


class StopRequested(KeyboardInterrupt):
    """The command was asked to end by one of STOP_SIGNALS."""


class Interrupt:
    """Remembers whether the command was asked to end, as an exception can be lost in a library's callback."""

    def __init__(self, takes: Callable[[int], bool]) -> None:
        self._asked: type[KeyboardInterrupt] | None = None
        self._takes = takes

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._takes(number):
            self._asked = exception_of(number)
            raise self._asked

    def check(self) -> None:
        """Raise KeyboardInterrupt if the command was asked to end, even if an earlier exception was lost."""
        if self._asked is not None:
            raise self._asked


def exception_of(number: int) -> type[KeyboardInterrupt]:
    """What signal `number` raises."""
    return StopRequested if number in STOP_SIGNALS else KeyboardInterrupt


def handled_signals() -> list[signal.Signals]:
    """The signals that end this command.

    A shell without job control starts `gpipe ... &` with SIGINT ignored; `kill -INT` must still end it. nohup, which
    ignores SIGHUP so that the command continues, is respected.
    """
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in (signal.SIGINT, *STOP_SIGNALS) if not (number == signal.SIGHUP and ignores_hangup)]


@contextmanager
def catch_interrupts(takes: Callable[[int], bool] = lambda number: False) -> Iterator[Interrupt]:
    """While active, each signal raises KeyboardInterrupt, those of STOP_SIGNALS its subclass StopRequested, unless
    `takes(number)` returns True, as it has handled the signal. The exception is raised again if a library turned it
    into another one.
    """
    interrupt = Interrupt(takes)
    before = [(number, signal.signal(number, interrupt)) for number in handled_signals()]
    try:
        yield interrupt
    except Exception:
        interrupt.check()
        raise
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def defer_signals() -> Iterator[Callable[[], None]]:
    """Around a fork: defers signals to its end. An exception raised by a handler in an at-fork callback (such as
    logging's) would be printed and lost. Yields a function that ends the deferral, which the child must call.

    A signal mask would not do: it covers a single thread, and the kernel would hand the signal to NumPy's threads.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *STOP_SIGNALS)}
    ours = {number: handler for number, handler in handlers.items() if callable(handler)}
    waiting: list[int] = []

    def restore() -> None:
        for number, handler in ours.items():
            signal.signal(number, handler)
        while waiting:
            signal.raise_signal(waiting.pop(0))

    for number in ours:
        signal.signal(number, lambda received, frame: waiting.append(received))
    try:
        yield restore
    finally:
        restore()


def import_in_thread(*modules: str) -> None:
    """Import modules, and with them torch, in a thread, so that an interrupt takes effect here, immediately.

    Raised in an import, a KeyboardInterrupt can end in an abort of torch's C++ with pages of traceback, become an
    ImportError of NumPy's, or a warning of torch's after which the run begins. The garbage collector is off meanwhile:
    it would scan imported objects, which are never garbage, some hundred times.
    """
    errors: list[BaseException] = []

    def import_all() -> None:
        try:
            for name in modules:
                importlib.import_module(name)
        except BaseException as error:
            errors.append(error)

    if all(name in sys.modules for name in modules):
        return
    gc.disable()
    try:
        thread = threading.Thread(target=import_all, name="gpipe-import", daemon=True)
        thread.start()
        thread.join()
    finally:
        gc.freeze()
        gc.unfreeze()  # moves all objects to the oldest generation
        gc.enable()
    for error in errors:
        raise error
