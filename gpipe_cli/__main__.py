"""Where the program begins: `gpipe`, and `python -m gpipe_cli`, which torchrun and the runs of a sweep start."""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import NoReturn


def main() -> int:
    """Runs `gpipe` with the arguments of this process; returns the exit code."""

    def leave(number: int, _: object) -> None:
        os.write(2, b"gpipe: interrupted\n" if number == signal.SIGINT else b"gpipe: stopped\n")
        os._exit(130 if number == signal.SIGINT else 3)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    for number in numbers:
        signal.signal(number, leave)  # while modules are imported there is nothing to clean up
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has started this process, and cannot end it once it is killed
        from gpipe_cli.system.forked_call import end_with_parent

        end_with_parent(os.getppid())
    from gpipe_cli.cli import main

    code = main()
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # it ends in any case
    return code


def run() -> NoReturn:
    """Runs `gpipe` and ends this process with its exit code.

    What is registered for the end is done, and the rest ends at once: Python would take torch and its libraries apart,
    module by module, which takes longer than a second and is of use to nobody.
    """
    code = main()
    if "torch" not in sys.modules or threading.active_count() > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    with suppress(OSError, ValueError):  # closed, or nobody reads it: `gpipe_cli.cli` has said so
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
