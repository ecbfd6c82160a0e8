"""Folders named by time, which two commands of one second must not share."""

from pathlib import Path


def make_new(path: Path) -> Path:
    """Makes the folder `path`, or `path-2` and so on if there is one; returns what was made.

    Raises:
        OSError: it cannot be made.
    """
    folder, count = path, 1
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            count += 1
            folder = path.with_name(f"{path.name}-{count}")
