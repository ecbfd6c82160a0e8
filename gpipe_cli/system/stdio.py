"""The program's stdout and stderr, such that a run continues when they cannot be written (a full disk, closed).

Output that cannot be written is dropped; the command finishes, reports in one line that output was lost, and ends with
exit code 1. A pipe whose reader has ended (`| head`) still raises BrokenPipeError.
"""

import io
import os
import sys


class _Stream(io.FileIO):
    """A file whose writes raise no error except BrokenPipeError; `error` is the first other error."""

    error: OSError | None = None

    def write(self, data: bytes, /) -> int | None:  # type: ignore[override]  # any buffer, which has no type in 3.11
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.error = self.error or error
            return memoryview(data).nbytes


def make_stdio_robust() -> None:
    """Replace stdout and stderr. Closed ones are opened on /dev/null, or the next file would get their descriptors."""
    closed = [_open_if_closed(number) for number in (0, 1, 2)]
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        stream = _Stream(number, "w", closefd=False)
        stream.error = closed[number]
        encoding, errors = (None, None) if before is None else (before.encoding, before.errors)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(stream), encoding, errors, line_buffering=True))


def lost_output() -> OSError | None:
    """The first error that lost output to stdout; None if nothing was lost."""
    stream = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(stream, _Stream) or stream.error is None:
        return None
    return OSError(stream.error.errno, stream.error.strerror, "stdout")


def _open_if_closed(number: int) -> OSError | None:
    try:
        os.fstat(number)
    except OSError as error:
        os.open(os.devnull, os.O_RDWR)  # gets the smallest free descriptor, which is `number`
        return error
    return None
