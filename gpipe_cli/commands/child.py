"""A command run as a child of this one: its own process tree, and what it said if it failed.

Sweeps (the tables of the paper) and recipes run `gpipe` many times; each time is a fresh process, so that a failed run
keeps nothing alive, and Ctrl-C ends all of it.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType
from typing import IO

from gpipe_cli.system.parent_death import end_with_parent

GRACE_SECONDS = 3.5  # from Ctrl-C until a run that has not ended by itself is killed; a command ends within 5 s
INTERRUPTED = 130


def run_process(
    command: Sequence[str], output: IO[str] | None = None, held: Sequence[int] = (), *, without_refusal: bool = False
) -> tuple[int, str, bool]:
    """Runs the command to its end, its output shown as it comes, or, all that it prints, written to the file `output`.

    `held` are files that stay open as long as it lives, such as a lock. `without_refusal`: the line in which it refuses
    bad input is not shown; the caller has it and says it.
    Returns its exit code, its error line, and whether it was ended because we were interrupted (the code is then 130).
    """
    tail, interrupted = bytearray(), False
    # A session of its own: Ctrl-C reaches the run through us and only once, and its whole tree can be ended together.
    with (
        _interruptible(),
        subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # torchrun may have started us, as one process; it did not start this one, and will not start it again
            env={name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")},
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),  # as `kill` would end it
            pass_fds=held,
        ) as process,
    ):
        assert process.stderr is not None
        try:
            arguments = (process.stderr.fileno(), output or sys.stderr, tail, without_refusal)
            copier = threading.Thread(target=_copy, args=arguments, daemon=True)
            copier.start()
            exit_code = process.wait()
        except KeyboardInterrupt:
            interrupted, exit_code = True, INTERRUPTED
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # its whole tree has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
        copier.join(0.5)  # a process that outlives its run may hold the pipe open
    how = "interrupted" if interrupted else f"exit code {exit_code}"
    return exit_code, error_line(tail.decode(errors="replace")) or how, interrupted


def error_line(stderr: str) -> str:
    """The line of a run's stderr that says what went wrong: gpipe's own, or the last exception's, or the last one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    own = [said[1] for line in lines if (said := re.match(r"gpipe \w+: (.*)", line))]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (own or raised or lines or [""])[-1]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A closed terminal and `kill` end a sweep as Ctrl-C does: the run has a session of its own and would live on."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _copy(descriptor: int, output: IO[str], tail: bytearray, without_refusal: bool) -> None:
    """Copies what comes to `output` at once, unfinished lines included; `tail` keeps the end of it."""
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 65536):
            tail += chunk
            if without_refusal:
                chunk = re.sub(rb"(?m)^gpipe \w+: .*\n", b"", chunk)
            output.write(chunk.decode(errors="replace"))
            output.flush()
            del tail[:-8192]
