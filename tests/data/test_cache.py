"""The cache: made once, whoever asks; noticed when damaged; never half a file."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from gpipe_cli.data.cache import read_or_make


def refuse() -> bytes:
    raise AssertionError("made a second time")


def test_made_once_and_read_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    assert read_or_make(folder, "a", lambda: b"content") == b"content"
    assert read_or_make(folder, "a", refuse) == b"content"
    with pytest.raises(AssertionError):
        read_or_make(folder, "b", refuse)  # failing to make it leaves nothing
    assert read_or_make(folder, "b", lambda: b"") == read_or_make(folder, "b", refuse) == b""
    assert sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock")) == ["a", "b"]


def test_a_file_of_the_name_of_a_lock_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / ".a.lock").write_text("mine")
    read_or_make(tmp_path, "a", lambda: b"content")
    assert (tmp_path / ".a.lock").read_text() == "mine"


def test_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    read_or_make(tmp_path, "a", lambda: b"0123456789" * 10)
    stored = (tmp_path / "a").read_bytes()
    for damaged in (stored[:-7], stored[:40] + b"x" + stored[41:], b""):
        (tmp_path / "a").write_bytes(damaged)
        assert read_or_make(tmp_path, "a", lambda: b"new") == read_or_make(tmp_path, "a", refuse) == b"new"


def test_several_processes_make_it_once(tmp_path: Path) -> None:
    """Each of them would make different content; all get the first one's."""

    def make() -> bytes:
        time.sleep(0.1)
        return str(os.getpid()).encode()

    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    for _ in range(4):
        context.Process(target=lambda: found.put(read_or_make(tmp_path, "a", make))).start()
    assert len({found.get() for _ in range(4)}) == 1
    for process in multiprocessing.active_children():
        process.join()
