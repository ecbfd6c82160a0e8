"""`gpipe <command>`: finds the command and hands the rest to it; whatever the user got wrong ends as one line.

Only the command that runs is imported, and no command imports torch before it knows that there is something to train:
help must answer at once.
"""

import errno
import importlib
import os
import signal
import sys
import time
from importlib.metadata import version

from gpipe_cli.config.typed import nearest, one_line, show
from gpipe_cli.distributed.torchrun import leads, torchrun
from gpipe_cli.system.interrupts import interruptible
from gpipe_cli.system.streams import lost_output, prepare_streams

COMMANDS = {
    "train": "train a model with GPipe, or with -m a sweep over settings",
    "bench": "measure steps: speed, bubble, memory, FLOP/s; with -m a table of settings",
    "plan": "predict a step without running it: time, bubble, memory; for this machine or another",
    "evaluate": "evaluate a run's checkpoint on its test set, with any number of partitions",
    "check": "prove on your own model that partitions, schedules and recomputation change nothing",
    "reproduce": "run a table, figure or result of the paper, at the scale that the machine allows",
    "compare": "compare runs: a table of what differs, curves, bars, and an HTML page",
}
USAGE = "\n".join(
    [
        "GPipe: training with micro-batch pipeline parallelism.",
        "",
        "Usage: gpipe COMMAND [setting=value ...]",
        "",
        "Commands",
        *(f"  {name:<11}{line}" for name, line in COMMANDS.items()),
        "",
        "  gpipe COMMAND --help    settings and examples of a command",
        "  gpipe --version",
        "",
        "With GPIPE_FULL_ERROR=1 in the environment an error comes with its traceback.",
        "",
    ]
)
FAILED = 1
BAD_INPUT = 2
SPEAKS_FIRST_SECONDS = 5.0  # the start that process 0 gets: torchrun ends all as soon as one has ended
INTERRUPTED = 130  # what shells report for a process that SIGINT ended: 128 + 2
UNREAD = 128 + signal.SIGPIPE  # likewise of one that wrote to who has gone, `gpipe ... | head`


def main(arguments: list[str] | None = None) -> int:
    """Runs `gpipe` with the given arguments (those of the process if None); returns the exit code."""
    if arguments is None:
        prepare_streams()
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # so rich ends a process to whose console nobody listens
            return UNREAD
        raise


def _main(given: list[str]) -> int:
    name = "gpipe"
    try:
        match given:
            case ["-h" | "--help"]:
                sys.stdout.write(USAGE)
                code = 0
            case ["--version"]:
                sys.stdout.write(f"gpipe {version('gpipe-cli')}\n")
                code = 0
            case ["-sc" | "--shell-completion", *rest]:
                code = _complete(rest)
            case [command, *rest] if command in COMMANDS:
                name = f"gpipe {command}"
                code = _run(command, rest)
            case [command, *_]:
                hint = nearest(command, list(COMMANDS)) or f"; choose one of {', '.join(COMMANDS)}"
                raise ValueError(f"{show(command)}: there is no such command{hint}; see gpipe --help")
            case _:
                sys.stderr.write(USAGE)
                code = BAD_INPUT
        sys.stdout.flush()  # what cannot be written, or is not read, is known here and not when Python ends
        if code == 0 and (lost := lost_output()) is not None:
            raise lost
        return code
    except KeyboardInterrupt:  # before there was anything to say
        if leads():
            sys.stderr.write(f"{name}: interrupted\n")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:  # bad input; what could not be written, or read
        if os.environ.get("GPIPE_FULL_ERROR") == "1":  # for who looks for a fault in gpipe itself
            raise
        if not leads():  # process 0 comes to the same conclusion, mostly, and torchrun ends this one with it
            time.sleep(SPEAKS_FIRST_SECONDS)
            name += f": process {os.environ['RANK']}"
        sys.stderr.write(f"{name}: {one_line(error)}\n")
        too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG  # the name of a file
        return BAD_INPUT if isinstance(error, ValueError) or too_long else FAILED


def _run(command: str, arguments: list[str]) -> int:
    torchrun()
    try:
        with interruptible():
            code: int = importlib.import_module(f"gpipe_cli.commands.{command}").main(arguments)
    except SystemExit as end:  # Hydra's --help; anything else is an error
        if end.code not in (None, 0):
            raise
        return 0
    return code


def _complete(arguments: list[str]) -> int:
    """Tab completion: Hydra's script knows no commands; it asks the bare `gpipe`, with what was typed in COMP_LINE."""
    words = os.environ.get("COMP_LINE", "gpipe train ").split(" ")
    if len(words) < 3:
        sys.stdout.write(" ".join(COMMANDS) + "\n")
        return 0
    command = words.pop(1)
    if command not in COMMANDS:
        return 0
    os.environ["COMP_LINE"] = " ".join(words)
    return _run(command, ["-sc", *arguments])
