"""The commit of a file, asked of a real git in real working trees."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gpipe_cli.system.source_code import commit_of


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    file, other = tmp_path / "model.py", tmp_path / "installed.py"
    file.write_text("a = 1\n")
    assert commit_of(file) is None, "no git there"
    git("init")
    git("add", "model.py")
    assert commit_of(file) is None, "no commit yet"
    git("commit", "-m", "first")
    first = git("rev-parse", "HEAD")
    assert commit_of(file) == {"commit": first, "changed": False}
    other.write_text("")
    assert commit_of(other) is None, "git does not know it, as a package in an environment below the working tree"
    assert commit_of(file) == {"commit": first, "changed": False}
    file.write_text("a = 2\n")
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook
    assert commit_of(file) == {"commit": first, "changed": True}
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit_of(file) is None
