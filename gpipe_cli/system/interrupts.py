"""The signals that end a command as soon as it has cleaned up: Ctrl-C and SIGHUP (a closed terminal), SIGTERM and
SIGUSR1 (SLURM, torchrun). A training that SIGTERM or SIGUSR1 ends writes a checkpoint first.
"""

import gc
import importlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequested(KeyboardInterrupt):
    """The command was asked to end by SIGTERM or SIGUSR1."""


class Interrupt:
    """Remembers whether the command was asked to end, as an exception can be lost in a library's callback."""

    def __init__(self, immediately: bool, on_stop: Callable[[], None] | None) -> None:
        self._asked: type[KeyboardInterrupt] | None = None
        self._immediately, self._on_stop = immediately, on_stop

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number in STOP_SIGNALS and self._on_stop is not None:
            self._on_stop()
            return
        self._asked = StopRequested if number in STOP_SIGNALS else KeyboardInterrupt
        if self._immediately:
            raise self._asked

    def check(self) -> None:
        """Raise KeyboardInterrupt if the command was asked to end, even if an earlier exception was lost."""
        if self._asked is not None:
            raise self._asked


@contextmanager
def catch_interrupts(*, immediately: bool = True, on_stop: Callable[[], None] | None = None) -> Iterator[Interrupt]:
    """While active, each signal raises KeyboardInterrupt, `immediately` or only in `check`; it is raised again if a
    library turned it into another exception. SIGTERM and SIGUSR1 raise its subclass StopRequested or, with `on_stop`,
    call that instead.
    """
    interrupt = Interrupt(immediately, on_stop)
    # A shell without job control starts `gpipe ... &` with SIGINT ignored; `kill -INT` must still end it. nohup, which
    # ignores SIGHUP so that the command continues, is respected.
    numbers = [signal.SIGINT, *STOP_SIGNALS]
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
def defer_signals() -> Iterator[Callable[[], None]]:
    """Around a fork: defers signals to its end. An exception raised by a handler in an at-fork callback (such as
    logging's) would be printed and lost. Yields a function that ends the deferral, which the child must call.

    A signal mask would not do: it covers a single thread, and the kernel would hand the signal to NumPy's threads.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, *STOP_SIGNALS)}
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
