"""The entry point of `gpipe COMMAND`: runs one command, and reports a user's mistake as one line.

Only the chosen command is imported, and torch only once there is something to train, so that help answers immediately.
"""

import importlib
import os
import sys
import time

from gpipe_cli import __version__
from gpipe_cli.commands.command_names import COMMANDS
from gpipe_cli.commands.command_runner import run_command, run_guarded
from gpipe_cli.config.did_you_mean import suggest_nearest
from gpipe_cli.distributed.torchrun_env import is_rank_zero, read_torchrun_env
from gpipe_cli.errors import BAD_INPUT, INTERRUPTED, SIGPIPE_EXIT, STOPPED, InputError, format_value
from gpipe_cli.system.stdio import make_stdio_robust

USAGE = "\n".join(
    [
        "GPipe: training with micro-batch pipeline parallelism.",
        "",
        "Usage: gpipe COMMAND [setting=value ...]",
        "",
        "Commands",
        *(f"  {name:<11}{line}" for name, line in COMMANDS.items()),
        "",
        "  gpipe COMMAND --help  settings and examples of a command",
        "  gpipe help TOPIC      what a setting or a word means: gpipe help micro_batches",
        "  gpipe help -k WORD    topics with a word: gpipe help -k memory",
        "  gpipe --version",
        "",
        "With GPIPE_FULL_ERROR=1 in the environment an error comes with its traceback.",
        "",
    ]
)
RANK_ZERO_GRACE_SECONDS = 5.0  # how long other ranks wait before they report an error, which rank 0 usually has too


def main(arguments: list[str] | None = None) -> int:
    """Runs `gpipe` with the given arguments (the process's if None); returns the exit code."""
    if arguments is None:
        make_stdio_robust()
    argv = sys.argv[1:] if arguments is None else arguments
    name = f"gpipe {argv[0]}" if argv and argv[0] in COMMANDS else "gpipe"
    result = run_guarded(lambda: _main(argv))
    if result.exit_code == SIGPIPE_EXIT:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python's flush at exit would raise again
    elif result.error and is_rank_zero():
        diagram = getattr(result.input_error, "diagram", "")
        sys.stderr.write(f"{name}: {result.error}\n" + (f"{diagram}\n" if diagram else ""))
    elif result.error and result.exit_code not in (INTERRUPTED, STOPPED):
        # with the same error, rank 0 exits, and torchrun ends this process
        time.sleep(RANK_ZERO_GRACE_SECONDS)
        torchrun = read_torchrun_env()
        assert torchrun is not None
        sys.stderr.write(f"{name}: process {torchrun.rank}: {result.error}\n")
    return result.exit_code


def _main(argv: list[str]) -> int:
    match argv:
        case ["-h" | "--help"]:
            sys.stdout.write(USAGE)
        case ["--version"]:
            sys.stdout.write(f"gpipe {__version__}\n")
        case ["-sc" | "--shell-completion", *rest]:
            completed = importlib.import_module("gpipe_cli.commands.completion").complete(rest, list(COMMANDS))
            return 0 if completed is None else run_command(completed[0], completed[1:])
        case ["help", command] if command in COMMANDS:
            return run_command(command, ["--help"])
        case [command, *rest] if command in COMMANDS:
            return run_command(command, rest)
        case [command, *_]:
            hint = suggest_nearest(command, list(COMMANDS)) or f"; choose one of {', '.join(COMMANDS)}"
            raise InputError(f"{format_value(command)}: no such command{hint}; see gpipe --help")
        case _:
            sys.stderr.write(USAGE)
            return BAD_INPUT
    return 0
