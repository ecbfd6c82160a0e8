"""The entry point of the program: `gpipe`, or `python -m gpipe_cli`, which torchrun and SLURM jobs start."""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn

from gpipe_cli.errors import INTERRUPTED, STOPPED
from gpipe_cli.system.interrupts import handled_signals


def main() -> int:
    """Runs `gpipe` with the arguments of this process; returns the exit code."""

    def leave(number: int, _: object) -> None:
        os.write(2, b"gpipe: interrupted\n" if number == signal.SIGINT else b"gpipe: stopped\n")
        os._exit(INTERRUPTED if number == signal.SIGINT else STOPPED)

    numbers = handled_signals()
    for number in numbers:
        signal.signal(number, leave)  # while modules are still being imported, nothing needs cleaning up
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's child: it would outlive a killed torchrun
        from gpipe_cli.system.forked_call import end_with_parent

        end_with_parent(os.getppid())
    from gpipe_cli.cli import main

    code = main()
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # the process is about to exit anyway
    return code


def run() -> NoReturn:
    """Runs `gpipe` and ends this process with its exit code.

    Exit handlers run, but the interpreter is not finalized: tearing down torch and its libraries module by module takes
    over a second, to no purpose.
    """
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # for all processes: names of files are UTF-8 in any locale
        os.execv(sys.executable, sys.orig_argv)
    code = main()
    waited_for = any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())
    if "torch" not in sys.modules or waited_for or "TORCHELASTIC_RUN_ID" in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # closed, or a pipe without a reader: `gpipe_cli.cli` has handled that
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
