"""The file that TensorBoard reads: events, appended in the parent process.

torch's SummaryWriter gives events to a thread. A disk that is full for a moment ends that thread: what comes later is
lost, and its traceback goes to stderr. Here an event that cannot be written waits, and is tried again.
"""

import io
import os
import socket
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.system.files import naming

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

FLUSH_SECONDS = 10.0  # a run that is killed loses no more than this
_numbers = count()  # of the files of this process, whose names differ in nothing else within a second


class EventFile:
    """A new event file in ``folder``, made when the first events are written."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """``first_step`` is the next one; of a run that is resumed, readers drop older events from there on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._path = folder / name
        self._waiting = bytearray()
        self._tried = 0.0
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(session_log=SessionLog(status=SessionLog.START)), first_step)

    def add(self, summary: "Summary", step: int | None = None) -> None:
        """Adds what is to be shown. Raises OSError if events have waited for FLUSH_SECONDS and cannot be written."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._add(Event(summary=summary), step)
        if time.monotonic() - self._tried >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what waits. Raises OSError; then what is not written yet waits on."""
        self._tried = time.monotonic()
        with naming(self._path), self._path.open("ab", buffering=0) as file:
            while self._waiting:
                del self._waiting[: file.write(self._waiting)]

    def _add(self, event: "Event", step: int | None = None) -> None:
        event.wall_time = time.time()
        if step is not None:
            event.step = step
        self._waiting += record(event)


def record(event: "Event") -> bytes:
    """An event as it stands in a file, with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()
