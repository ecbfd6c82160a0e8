"""The cache: made once, whoever asks; noticed when damaged; never half a file."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from gpipe_cli.data.cache import cache_folder, cached, digest_of
from gpipe_cli.errors import InputError


def refuse() -> bytes:
    raise AssertionError("made a second time")


def test_made_once_and_read_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    assert cached(folder, "a", lambda: b"content") == b"content"
    assert cached(folder, "a", refuse) == b"content"
    with pytest.raises(AssertionError):
        cached(folder, "b", refuse)  # failing to make it leaves nothing
    assert cached(folder, "b", lambda: b"") == cached(folder, "b", refuse) == b""
    assert sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock")) == ["a", "b"]


def test_a_damaged_file_is_made_anew(tmp_path: Path) -> None:
    cached(tmp_path, "a", lambda: b"0123456789" * 10)
    stored = (tmp_path / "a").read_bytes()
    for damaged in (stored[:-7], stored[:40] + b"x" + stored[41:], b""):
        (tmp_path / "a").write_bytes(damaged)
        assert cached(tmp_path, "a", lambda: b"new") == cached(tmp_path, "a", refuse) == b"new"


def test_several_processes_make_it_once(tmp_path: Path) -> None:
    """Each of them would make content of its own; all get the first one's."""

    def make() -> bytes:
        time.sleep(0.1)
        return str(os.getpid()).encode()

    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()
    for _ in range(4):
        context.Process(target=lambda: found.put(cached(tmp_path, "a", make))).start()
    assert len({found.get() for _ in range(4)}) == 1
    for process in multiprocessing.active_children():
        process.join()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^dataset\.cache=[^\n]*/file/cache: cannot be written [^\n]*dataset\.cache"):
        cached(tmp_path / "file" / "cache", "a", lambda: b"content")


def test_folder_by_setting_then_environment_then_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(str(tmp_path / "own")) == tmp_path / "own"
    assert cache_folder("~/own") == tmp_path / "home" / "own"
    assert cache_folder(None) == tmp_path / "xdg" / "gpipe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder(None) == tmp_path / "home" / ".cache" / "gpipe"


def test_digest_depends_on_everything_and_on_nothing_else() -> None:
    different = [("a", [1], ["ab", "c"]), ("a", [1], ["a", "bc"]), ("a", [2], ["ab", "c"]), ("b", [1], ["ab", "c"])]
    assert len({digest_of(*given) for given in different}) == len(different)
    assert digest_of("a", {"x": 1, "y": 2}, ["é"]) == digest_of("a", {"y": 2, "x": 1}, ["é".encode()])
