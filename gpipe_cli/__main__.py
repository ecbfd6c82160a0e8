"""Where the program begins: `gpipe`, and `python -m gpipe_cli`, which torchrun and the runs of a sweep start."""

import os
import signal
import sys


def main() -> int:
    """Runs `gpipe` with the arguments of this process; returns the exit code."""

    def leave(*_: object) -> None:
        os.write(2, b"gpipe: interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, leave)  # while modules are imported there is nothing to clean up
    from gpipe_cli.cli import main

    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends in any case
    return code


if __name__ == "__main__":
    sys.exit(main())
