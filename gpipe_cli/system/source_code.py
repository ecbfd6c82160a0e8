"""Looks up which commit a source file is at, if it is in a git working tree."""

import os
import subprocess
from pathlib import Path
from typing import TypedDict

_GIT_TIMEOUT_SECONDS = 1.0  # limit of each call of git: the disk may be slow, and no run should wait for it


class Commit(TypedDict):
    commit: str
    changed: bool | None  # whether tracked files differ from the commit; None if git took too long


def commit_of(file: Path) -> Commit | None:
    """The commit that is checked out where `file` is; None if git does not track the file (an installed package, a
    folder without git), or is not installed."""
    if _git(file, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file, "rev-parse", "HEAD")
    if not commit:  # the repository has no commit yet
        return None
    changes = _git(file, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": None if changes is None else changes != ""}


def _git(file: Path, *arguments: str) -> str | None:
    """What git prints about the working tree of `file`; None if git failed, or took too long."""
    # GIT_DIR and others, which a hook sets, would lead to another working tree
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(file.parent), *arguments],
            env=environment | {"GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
