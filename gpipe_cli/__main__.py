"""Where the program begins: `gpipe`, and `python -m gpipe_cli`, which torchrun and the runs of a sweep start."""

import os
import signal
import sys


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


if __name__ == "__main__":
    sys.exit(main())
