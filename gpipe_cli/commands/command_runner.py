"""How a command runs and ends: in this process, or in a fork of it.

Sweeps (the tables of the paper) and recipes run many trainings, each in a fork of a process that has imported torch
but not used it: a fork starts in milliseconds, and leaves nothing behind however it ends, be it memory, a CUDA context,
or what a user's own model code has changed. A crash ends its run, not the sweep.
"""

import contextlib
import errno
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpipe_cli.distributed.torchrun_env import is_rank_zero, read_torchrun_env
from gpipe_cli.errors import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    SIGPIPE_EXIT,
    STOPPED,
    InputError,
    InvalidSettingError,
    NothingFitsError,
    describe_error,
    error_text,
)
from gpipe_cli.launch.fork_server import temporary_folder
from gpipe_cli.system.forked_call import Fork
from gpipe_cli.system.interrupts import StopRequested, catch_interrupts, import_in_thread
from gpipe_cli.system.status_line import end_phase, phase, phases
from gpipe_cli.system.stdio import lost_output

HYDRA_COMMANDS = ("train", "bench", "plan", "check", "evaluate", "export")  # commands whose settings Hydra composes


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    exit_code: int
    error: str = ""  # a single line
    input_error: InvalidSettingError | NothingFitsError | None = None  # the error, if it is of these types


def run_guarded(work: Callable[[], int]) -> CommandResult:
    """Call `work`, which returns an exit code. Interrupts and errors of the user or system become a CommandResult;
    other exceptions are raised, and with GPIPE_FULL_ERROR=1 those errors too."""
    try:
        exit_code = work()
        sys.stdout.flush()
        if exit_code == 0 and (lost := lost_output()) is not None:
            raise lost
        return CommandResult(exit_code)
    except StopRequested:
        return CommandResult(STOPPED, "stopped")
    except KeyboardInterrupt:
        return CommandResult(INTERRUPTED, "interrupted")
    except BrokenPipeError:
        return CommandResult(SIGPIPE_EXIT)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich ends the process when nobody reads its console
            return CommandResult(SIGPIPE_EXIT)
        raise
    except (InputError, OSError) as error:
        if os.environ.get("GPIPE_FULL_ERROR") == "1":
            raise
        too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG  # a file name that the user gave
        exit_code = BAD_INPUT if isinstance(error, InputError) or too_long else FAILED
        input_error = error if isinstance(error, InvalidSettingError | NothingFitsError) else None
        return CommandResult(exit_code, error_text(error), input_error)


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Run `gpipe NAME` with its arguments in this process; returns its exit code, and raises what it raises."""
    read_torchrun_env()  # raises InputError for variables that torchrun would never set
    with phases() if is_rank_zero() else contextlib.nullcontext(), catch_interrupts():
        if name in HYDRA_COMMANDS and not any(argument.startswith("-") for argument in arguments):  # --help only prints
            phase("reading the settings")
        command = importlib.import_module(f"gpipe_cli.commands.{name}")
        if name not in (*HYDRA_COMMANDS, "help") and {"-h", "--help"} & {*arguments}:
            sys.stdout.write(command.HELP)
            return 0
        exit_code: int = command.main(arguments)
    return exit_code


@contextlib.contextmanager
def show_preparation(what: str = "") -> Iterator[None]:
    """Around slow work before any output: importing torch, starting workers. `what`: what is prepared, for `phase`."""
    if (lost := lost_output()) is not None:
        raise lost
    phase("importing torch, which computes the layers", what)
    tempfile.tempdir = str(temporary_folder())  # torch makes a folder for compiled code among the temporary files
    try:
        yield
    finally:  # in case no output has replaced the line
        end_phase()


def import_torch() -> None:
    """Import what trainings need, once for all forks."""
    if "gpipe_cli.commands.training_run" in sys.modules:
        return
    with show_preparation():
        # a training would import the last two later, which would cost every fork most of a second
        later = "torch.fx.experimental.symbolic_shapes", "gpipe_cli.reporting.plots.timeline"
        import_in_thread("gpipe_cli.commands.training_run", *later)


def fork_command(work: Callable[[], int], output: int | None = None) -> Fork[CommandResult]:
    """A fork of this process that calls `work` as a command; `output`: file descriptor for its stdout and stderr."""

    def run_contained() -> CommandResult:
        # torchrun may have started the parent, as its only process, but will not start this fork again
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        try:
            return run_guarded(work)
        except SystemExit as end:  # a user's own code calls sys.exit
            code = end.code if isinstance(end.code, int) else FAILED
            return CommandResult(code, f"exit code {code}")
        except Exception as error:
            traceback.print_exc()
            return CommandResult(FAILED, describe_error(error))

    return Fork(run_contained, output)


def wait_for(
    fork: Fork[CommandResult], meanwhile: contextlib.AbstractContextManager[None] | None = None
) -> CommandResult:
    """Wait for a command's fork, inside `meanwhile`; returns how it ended. Raises KeyboardInterrupt if interrupted."""
    result, code = fork.wait(meanwhile)
    return result or CommandResult(code, f"exit code {code}")
