"""The program's stdout and stderr: when they cannot be written (a full disk, closed) a run need not die of it.

What cannot be written is dropped, and remembered: the command finishes, reports in one line that output was lost, and
ends with exit code 1. A pipe whose reader has ended (`| head`) still raises BrokenPipeError.
"""

import io
import os
import sys


class _Stream(io.FileIO):
    """Raises no error but BrokenPipeError when it writes; `error` is the first failure."""

    error: OSError | None = None

    def write(self, data: bytes, /) -> int | None:  # type: ignore[override]  # any buffer, which has no type in 3.11
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.error = self.error or error
            return memoryview(data).nbytes


def prepare_streams() -> None:
    """Replace stdout and stderr. One that is closed is opened on nothing, or the next file would take its number."""
    closed = [_open_if_closed(number) for number in (0, 1, 2)]
    for number, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        stream = _Stream(number, "w", closefd=False)
        stream.error = closed[number]
        encoding, errors = (None, None) if before is None else (before.encoding, before.errors)
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(stream), encoding, errors, line_buffering=True))


def lost_output() -> OSError | None:
    """Why something that was written to stdout was lost; None: nothing was."""
    stream = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(stream, _Stream) or stream.error is None:
        return None
    return OSError(stream.error.errno, stream.error.strerror, "stdout")


def _open_if_closed(number: int) -> OSError | None:
    try:
        os.fstat(number)
    except OSError as error:
        os.open(os.devnull, os.O_RDWR)  # takes the smallest number that is free
        return error
    return None
