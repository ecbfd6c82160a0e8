"""Reads and writes the program's files: completely or not at all, in folders to which one run at a time writes.

A run leaves a dozen files that other programs read while it runs, or after it was killed: none is ever half a file.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

LOCK = ".gpipe.lock"  # a file in the folder of a run or a sweep while a process works there
_OLDER_LOCK = ".lock"  # the lock of earlier versions, which may use the folder, or were killed there
_HOLDER = re.compile(rb"(process \d+ on .*\n)?")  # the content of such a file
_PARTIAL = re.compile(r"\.[0-9a-f]{32}\.partial")  # names of files that are being written
MAX_BYTES = 2**24  # limit of a text file that is read whole: a thousand times the usual size
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system's answers to a call that it does not know
# answers of file systems that do not rename, or not over a file that is there
NOT_RENAMED = (*_NOT_OFFERED, errno.EACCES, errno.EPERM, errno.EBUSY, errno.ETXTBSY, errno.EXDEV)


class FolderInUseError(Exception):
    """Another process, which the text names, is using a folder."""


def write_atomic(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> None:
    """Write or replace a file atomically: a reader finds the old content or the new. Large content comes in pieces.

    Raises:
        OSError: the file cannot be written, or is a link; the old content is still there.
    """
    # Several processes may write to a folder, even with the same pid on different machines; no reader looks for such a
    # name.
    partial = path.with_name(f".{uuid4().hex}.partial")
    with errors_name_path(path):
        try:
            with partial.open("wb") as file:
                pieces = [content.encode()] if isinstance(content, str) else content
                file.writelines([pieces] if isinstance(pieces, bytes) else pieces)
                file.flush()
                sync(file.fileno())
            replace_file(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def check_not_linked(path: Path) -> None:
    """Raises OSError for a link where this program is to write a file: somebody else has made it, so neither the link
    nor its target may be replaced. A link to a device is allowed, as nothing is lost there."""
    if path.is_symlink() and not path.is_char_device():
        raise OSError(errno.ELOOP, "is a link, and nothing is written through it", str(path))


@contextmanager
def open_to_append(path: Path) -> Iterator[FileIO]:
    """Open a file to append to it, without a buffer. Raises OSError, also for a link."""
    check_not_linked(path)
    with path.open("ab", buffering=0) as file:
        yield file


def sync(descriptor: int) -> None:
    """Have a file, or the entries of a folder, written to the disk, where the file system offers that: some network
    mounts have no fsync for folders. Raises OSError if the disk refuses."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content to the disk, without the mode and the times, which some file systems refuse to set."""
    shutil.copyfile(source, target)
    with target.open("rb+") as copy:
        sync(copy.fileno())


def replace_file(whole: Path, path: Path) -> None:
    """Rename the file `whole` to `path`. Some network mounts refuse to, at all or while another program has `path`
    open, but do let it be overwritten; then a reader may find a part, and `whole` stays. Raises OSError, also for a
    link."""
    check_not_linked(path)
    try:
        whole.replace(path)
    except OSError as error:
        if error.errno not in NOT_RENAMED:
            raise
        copy_file(whole, path)


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file to read it. Raises OSError for others: a pipe or a device may block, or never end."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        yield file


def regular_size(path: Path) -> int:
    """The size of a regular file in bytes. Raises OSError for other files, and if it cannot be read."""
    with open_regular(path) as file:
        return os.fstat(file.fileno()).st_size


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """The content of a file. Raises OSError, also if it is not a regular file or has more than `max_bytes`."""
    with errors_name_path(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # files below /proc report a size of 0, and reading a file that has nothing yet returns None
        content = (file.read(max_bytes + 1) or b"") if size <= max_bytes else b""
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes >> 20} MiB", str(path))
    return content


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The file's text without a byte-order mark. Raises OSError, also if a line, which it names, is not UTF-8."""
    content = read_bytes(path, max_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise OSError(errno.EILSEQ, f"line {line} is not UTF-8: {error.reason}", str(path)) from error


def read_json(path: Path, max_bytes: int = 2**28) -> Any:
    """The content of a JSON file.

    Raises:
        OSError: as `read_bytes`.
        ValueError: it is not JSON, is nested too deeply, or has a number of more digits than Python reads.
    """
    try:
        return json.loads(read_bytes(path, max_bytes))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError as error:
        raise ValueError(f"a number has more than {sys.get_int_max_str_digits()} digits") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def errors_name_path(path: Path) -> Iterator[None]:
    """Makes every OSError name `path`: the error of a full disk names no file, or the partial file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted, without hidden ones such as .ipynb_checkpoints. Raises OSError if
    it cannot be read."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def remove_partial_files(folder: Path) -> None:
    """Remove the partial files that a killed process has left."""
    for left in folder.iterdir():
        if _PARTIAL.fullmatch(left.name):
            left.unlink(missing_ok=True)


def contents(folder: Path) -> set[str]:
    """The names of what is in a folder, without the partial files and locks that processes have there, or have left
    there when they were killed."""
    return {path.name for path in folder.iterdir() if not (_PARTIAL.fullmatch(path.name) or _is_lock(path))}


def _is_lock(path: Path) -> bool:
    if path.name not in (LOCK, _OLDER_LOCK):
        return False
    with suppress(OSError):
        return _HOLDER.fullmatch(read_bytes(path, 256)) is not None
    return False


class FolderLock:
    """An exclusive lock on a folder, until `release` or the end of this process.

    The kernel keeps the lock, so a killed process holds none; the lock file names the process that holds it.
    """

    def __init__(self, folder: Path, timeout_seconds: float = 0.0) -> None:
        """Lock an existing folder, waiting up to `timeout_seconds` for a holder that may be ending.

        Raises:
            FolderInUseError: another process holds the lock.
            OSError: the folder cannot be written to, or it has a file of that name which is not a lock.
        """
        self._path = folder / LOCK
        until = time.monotonic() + timeout_seconds
        while True:
            try:
                _check_older_lock(folder / _OLDER_LOCK)
                self.descriptor = _open_locked(self._path)  # a child that inherits it also holds the lock
                break
            except FolderInUseError:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)
        os.truncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        with suppress(OSError):  # it was removed, with the folder
            if os.path.samestat(os.fstat(self.descriptor), self._path.lstat()):
                self._path.unlink()
        os.close(self.descriptor)


def _open_locked(path: Path) -> int:
    """A descriptor of the lock file, locked. Raises FolderInUseError or OSError."""
    while True:
        if path.is_symlink():
            raise OSError(errno.ELOOP, f"{path} is a link, and nothing is written through it; remove it")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            holder = os.pread(descriptor, 256, 0)
            if not _HOLDER.fullmatch(holder):
                raise OSError(errno.EEXIST, f"{path} is a file of somebody else's; rename it")
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _in_use(holder) from None
            except OSError:  # a file system without locks
                return descriptor
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the last holder has released the lock meanwhile, and removed this file


def _check_older_lock(path: Path) -> None:
    """Raises FolderInUseError if a process of an earlier version is using the folder."""
    with suppress(OSError), open_regular(path) as file:
        holder = file.read(256) or b""
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the file is closed
        except BlockingIOError:
            if _HOLDER.fullmatch(holder):
                raise _in_use(holder) from None


def _in_use(holder: bytes) -> FolderInUseError:
    return FolderInUseError(f"{holder.decode(errors='replace').strip() or 'another process'} is using this folder")
