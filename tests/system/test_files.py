"""Files are whole or as they were, those of users have a limit, and one process at a time works in a folder."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from uuid import uuid4

import pytest

from gpipe_cli.system.files import (
    LOCK,
    FolderInUseError,
    FolderLock,
    contents,
    open_to_append,
    read_bytes,
    read_text,
    remove_partial_files,
    write_atomic,
)

MEMORY_EFFECTS = """
import sys, time
from pathlib import Path
from gpipe_cli.system.files import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("mine", flush=True)
time.sleep(60)
"""


def test_what_cannot_be_written_leaves_all_as_it_was(tmp_path: Path) -> None:
    """The line names the file itself, not the one next to it."""
    file = tmp_path / "page.html"
    write_atomic(file, "old")
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError, match="taken'"):
        write_atomic(tmp_path / "taken", "new")
    with pytest.raises(FileNotFoundError, match=r"gone/page\.html'"):
        write_atomic(tmp_path / "gone" / "page.html", "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "taken"]
    write_atomic(file, b"new")
    assert file.read_text() == "new"
    (tmp_path / f".{uuid4().hex}.partial").write_text("half")  # of a process that was killed
    (tmp_path / ".mine.partial").write_text("of another program")
    assert contents(tmp_path) == {"page.html", "taken", ".mine.partial"}
    remove_partial_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.partial", "page.html", "taken"]


def test_nothing_is_written_through_a_link_or_in_its_place(tmp_path: Path) -> None:
    """But to a device, where nothing is lost."""
    file, link = tmp_path / "mine", tmp_path / "link"
    file.write_text("mine")
    for target in (file, tmp_path / "gone"):
        link.symlink_to(target)
        for write in (partial(write_atomic, content="new"), lambda path: open_to_append(path).__enter__()):
            with pytest.raises(OSError, match=r"is a link.*link'"):
                write(link)
        assert link.is_symlink()
        link.unlink()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine", "mine")]
    link.symlink_to("/dev/full")
    with open_to_append(link) as full, pytest.raises(OSError, match="No space left"):
        full.write(b"x")


def test_a_file_that_another_program_has_open_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network mount that renames nothing over it, or nothing at all, would end the run."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    write_atomic(tmp_path / "page.html", "old and longer")
    monkeypatch.setattr(os, "replace", refuse)
    for name in ("page.html", "first.html"):
        write_atomic(tmp_path / name, "new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"page.html": "new", "first.html": "new"}


def test_two_files_can_be_written_at_once(tmp_path: Path) -> None:
    """Two processes of the same number, on two machines with a common folder, wrote to one temporary file."""

    def pieces() -> Iterator[bytes]:
        yield b"one"
        write_atomic(tmp_path / "second", "two")

    write_atomic(tmp_path / "first", pieces())
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"first": "one", "second": "two"}


def test_a_file_of_a_user_is_regular_text_of_some_size(tmp_path: Path) -> None:
    """A named pipe held up a command for ever, and /dev/zero filled the memory."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    (tmp_path / "nothing").symlink_to("gone")
    (tmp_path / "text").write_bytes("\N{BOM}one\ntwo ü\n".encode())
    (tmp_path / "latin").write_bytes("one\ntwo ü\n".encode("latin-1"))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**40)
    for name, why in (
        ("pipe", "is not a regular file"),
        ("device", "is not a regular file"),
        (".", "Is a directory"),
        ("nothing", "No such file or directory"),
        ("sparse", "has more than 16 MiB"),
        ("latin", "line 2 is not UTF-8: invalid start byte"),
    ):
        with pytest.raises(OSError, match=re.escape(why)) as error:
            read_text(tmp_path / name)
        assert (error.value.strerror, error.value.filename) == (why, str(tmp_path / name))
    assert read_text(tmp_path / "text") == "one\ntwo ü\n"
    assert read_bytes(tmp_path / "text", 14) == (tmp_path / "text").read_bytes()
    with pytest.raises(OSError, match="has more than"):
        read_bytes(tmp_path / "text", 13)


def test_a_folder_is_one_process_s_until_that_ends(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", MEMORY_EFFECTS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(FolderInUseError, match=rf"^process {other.pid} on .* is using this folder$"):
            FolderLock(tmp_path)
    finally:
        other.send_signal(signal.SIGKILL)  # which leaves the file, and not the lock
        other.communicate()
    assert (tmp_path / LOCK).exists()
    lock = FolderLock(tmp_path)
    assert f"process {os.getpid()} on " in (tmp_path / LOCK).read_text()
    with pytest.raises(FolderInUseError):
        FolderLock(tmp_path)
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_is_none_of_the_user_s_files(tmp_path: Path) -> None:
    """Any file .lock was emptied, and then removed."""
    (tmp_path / ".lock").write_text("mine")
    lock = FolderLock(tmp_path)
    assert contents(tmp_path) == {".lock"}
    lock.release()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(".lock", "mine")]
    (tmp_path / LOCK).write_text("mine, too")
    with pytest.raises(OSError, match="is a file of somebody else's"):
        FolderLock(tmp_path)
    assert (tmp_path / LOCK).read_text() == "mine, too"
    (tmp_path / LOCK).rename(tmp_path / "other")
    (tmp_path / LOCK).symlink_to("other")
    with pytest.raises(OSError, match=rf"{tmp_path / LOCK} is a link, .*; remove it$"):
        FolderLock(tmp_path)
    assert (tmp_path / "other").read_text() == "mine, too"


def test_a_lock_of_an_earlier_version_is_respected_and_left(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w+") as older:
        older.write("process 7 on here\n")
        older.flush()
        fcntl.flock(older, fcntl.LOCK_EX)
        with pytest.raises(FolderInUseError, match=r"^process 7 on here is using this folder$"):
            FolderLock(tmp_path)
    lock = FolderLock(tmp_path)  # of a process that was killed
    assert contents(tmp_path) == set()
    lock.release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
