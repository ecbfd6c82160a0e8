"""Files as the whole program reads and writes them: whole or not at all, in folders that one run at a time writes to.

A run leaves a dozen files that others read while it goes on, or after it was killed: none of them is ever half a file.
"""

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LOCK = ".lock"  # in the folder of a run or a sweep, as long as a process is at work there
PARTIAL = ".*.partial"  # names of what is being written


class FolderInUseError(Exception):
    """Another process is at work in a folder; the text says which one."""


def write_whole(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file in place of what was there, a large one in pieces; whoever reads it finds the old content or the
    new.

    Raises:
        OSError: it cannot be written; then all is as it was.
    """
    # several processes may write the same file, such as a cache; no reader looks for a name like this one
    beside = path.with_name(f".{os.getpid()}.partial")
    with naming(path):
        try:
            with beside.open("wb") as file:
                pieces = [content.encode()] if isinstance(content, str) else content
                file.writelines([pieces] if isinstance(pieces, bytes) else pieces)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def regular_size(path: Path) -> int:
    """The bytes of a regular file. Raises OSError if it is none: to open a pipe or a device might never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return found.st_size


def read_json(path: Path, most_bytes: int = 2**28) -> Any:
    """What a JSON file holds.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than `most_bytes`.
        ValueError: it is not JSON, or deeper than any that this program writes.
    """
    if (size := regular_size(path)) > most_bytes:
        raise OSError(errno.EFBIG, f"{size} bytes are more than any such file has", str(path))
    try:
        return json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside, an OSError is about `path`: what a full disk raises names no file, or the one beside it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def remove_partial_files(folder: Path) -> None:
    """Remove what a process that was killed has left of files that it was writing."""
    for left in folder.glob(PARTIAL):
        left.unlink(missing_ok=True)


class FolderLock:
    """A folder that no other process may work in, until `release` or the end of this process.

    The kernel holds the lock, so a process that was killed holds none; the file names the process that has it.
    """

    def __init__(self, folder: Path, patience_seconds: float = 0.0) -> None:
        """Take the lock of a folder that exists, waiting for one that may be ending.

        Raises:
            FolderInUseError: another process has it.
            OSError: the folder cannot be written to.
        """
        self._path = folder / LOCK
        until = time.monotonic() + patience_seconds
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 256, 0).decode(errors="replace").strip()
                os.close(descriptor)
                if time.monotonic() >= until:
                    raise FolderInUseError(f"{holder or 'another process'} is at work there") from None
                time.sleep(0.1)
                continue
            except OSError:  # a file system without locks
                break
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                    break
            os.close(descriptor)  # the one before us has released it meanwhile, and removed this file
        self.descriptor = descriptor  # a child that inherits it holds the lock, too
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        with suppress(OSError):  # it was removed, with the folder
            self._path.unlink()
        os.close(self.descriptor)
