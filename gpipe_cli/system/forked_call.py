"""Calls functions in forks of this process, none of which outlives its call or its parent."""

import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Generic, NoReturn, TypeVar

from gpipe_cli.system.interrupts import StopRequested, defer_signals
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.system.stdio import make_stdio_robust

T = TypeVar("T")
Item = TypeVar("Item")
_KILL_TIMEOUT_SECONDS = 3.5  # from Ctrl-C until a fork is killed; a command ends within 5 s
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Fork(Generic[T]):
    """A fork of this process that calls `work`, in a new session: Ctrl-C reaches it through `wait` only, and all its
    processes can be killed together. The fork gets SIGINT when this process ends."""

    def __init__(self, work: Callable[[], T], output: int | None = None) -> None:
        """Fork, and begin. `output`: the file descriptor of the fork's stdout and stderr, if not this process's. Raises
        KeyboardInterrupt if this process is interrupted; the fork has then been ended.

        No other thread of this process may be running, and nothing may have used CUDA.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._received, sent = Pipe(duplex=False)
        with defer_signals() as restore:
            self._pid = os.fork()
            if self._pid == 0:
                _be_fork(parent, work, output, sent, restore)
            sent.close()
            try:
                restore()
            except KeyboardInterrupt:
                self._end()
                raise

    def wait(self, meanwhile: AbstractContextManager[None] | None = None) -> tuple[T | None, int]:
        """What `work` returned, and 0; without a value, None and the exit code (minus the signal that killed the fork).

        Raises KeyboardInterrupt if this process is interrupted; the fork has then been ended. `meanwhile` is entered
        here and not by the caller, so that an interrupt while it begins (it may start a thread) also ends the fork.
        """
        received: list[T] = []
        with contextlib.ExitStack() as entered:
            try:
                if meanwhile is not None:
                    entered.enter_context(meanwhile)
                received.append(self._received.recv())
            except EOFError:  # the fork has ended without sending a value
                pass
            except KeyboardInterrupt as asked:
                if isinstance(asked, StopRequested):  # the fork may have something to write
                    self._ask_to_stop()
                os.kill(self._pid, signal.SIGINT)
                with contextlib.suppress(KeyboardInterrupt):
                    wait([self._received], _KILL_TIMEOUT_SECONDS)
                raise
            finally:
                code = self._end()
        return (received[0], 0) if received else (None, code)

    def _end(self) -> int:
        """Kill the fork and all its processes that still run; returns the exit code."""
        for kill in (os.kill, os.killpg):  # killpg finds nothing before the fork has its session
            with contextlib.suppress(ProcessLookupError):
                kill(self._pid, signal.SIGKILL)
        self._received.close()
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _ask_to_stop(self) -> None:
        """Send SIGTERM to the fork, and wait until it ends or this process gets Ctrl-C."""
        os.kill(self._pid, signal.SIGTERM)
        while True:
            try:
                wait([self._received])
            except StopRequested:
                continue
            except KeyboardInterrupt:
                pass
            return


def map_in_forks(call: Callable[[Sequence[Item]], Sequence[T]], items: Sequence[Item]) -> list[T]:
    """What `call` returns for `items`, a value per item, with the items divided among forks, at most as many as there
    are cores.

    Raises RuntimeError if a fork has failed, which has then printed why.
    """
    number = min(usable_cores(), len(items))
    forks = [Fork(partial(call, items[at::number])) for at in range(number)]
    returned: dict[int, T] = {}
    for at, (values, code) in enumerate([fork.wait() for fork in forks]):  # waits for all: a failure leaves none behind
        if values is None:
            raise RuntimeError(f"a process that did part of the work ended with exit code {code}")
        returned |= dict(zip(range(at, len(items), number), values, strict=True))
    return [returned[at] for at in range(len(items))]


def _be_fork(
    parent: int, work: Callable[[], object], output: int | None, sent: Connection, restore_signals: Callable[[], None]
) -> NoReturn:
    code = 1
    try:
        restore_signals()
        os.setsid()
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # set by a shell without job control
            signal.signal(signal.SIGINT, signal.default_int_handler)
        end_with_parent(parent, signal.SIGINT)
        if output is not None:
            os.dup2(output, 1)
            os.dup2(output, 2)
            make_stdio_robust()
        value = work()
        _flush()  # first: the parent kills this process as soon as it has the value
        sent.send(value)
        code = 0
    except KeyboardInterrupt:  # the parent reports it
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)  # without exit handlers, which are the parent's


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send signal `number` to this process when its `parent` ends, for whatever reason (Linux only).

    Only the kernel can: a stopped process could not end itself, nor a killed parent its children. The signal also comes
    when the thread of `parent` that forked this process ends. Forks do not inherit this; it survives an exec.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)
