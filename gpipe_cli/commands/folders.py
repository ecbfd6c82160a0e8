"""The folders that commands write to: made for one command, kept from others while it is at work, never left empty."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from gpipe_cli.config.settings import CONFIG, TrainConfig
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.distributed.torchrun import leads
from gpipe_cli.errors import InputError
from gpipe_cli.system.files import LOCK, PARTIAL, FolderInUseError, FolderLock, remove_partial_files

_BEFORE_CONFIG = {"checkpoints", "vocabulary.model", "failure.txt"}  # files that a run writes before its configuration
ENDING_SECONDS = 6.0  # a run that was killed, or whose sweep was, ends within these


def numbered(path: Path) -> Iterator[Path]:
    """`path`, `path-2`, `path-3` and so on, without end."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def refuse_file(key: str, file: Path, *, taken: str, overwrite: bool = False) -> None:
    """Raises RefusedError for a place where no file can be written; `taken` says what to give where one lies."""
    if not file.parent.is_dir():
        raise RefusedError(key, file, f"there is no folder {file.parent}; make it, or give another")
    if os.path.lexists(file) and not (overwrite and file.is_file()):
        raise RefusedError(key, file, f"it is there already; give {taken}")


def make_new(path: Path) -> Path:
    """Makes the first of `numbered(path)` that is not there: two commands of one second must not share a folder that is
    named by the time. Raises OSError if it cannot be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in numbered(path):
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("without end")


def new_run(config: TrainConfig, now: datetime, auto: Sequence[str] = (), what: str = "") -> Path:
    """A folder in `output`, named by time, model, dataset, K, M and R; `what` is it, if it is not a training."""
    stem = f"{now:%Y-%m-%d_%H-%M-%S}_{f'{what}_' if what else ''}{config.model.name}_{config.dataset.name}"
    k, m, r = ("auto" if key in auto else getattr(config, key) for key in ("partitions", "micro_batches", "replicas"))
    return Path(config.output) / f"{stem}_K{k}_M{m}{'' if r == 1 else f'_R{r}'}"


@contextmanager
def run_folder(
    config: TrainConfig, now: datetime, auto: Sequence[str] = (), what: str = "", *, again: bool = False
) -> Iterator[Path]:
    """The folder of a run: `run_folder`, or a `new_run`.

    `auto` are settings that will be chosen later; `what` is it, if it is not a training; `again`: what lies in
    `run_folder` may be of an earlier start of this run, which may be ending. Inside, no other run may work there.
    Refused or interrupted before anything was written, nothing is left behind.

    Under torchrun only process 0 makes it; what the others get does not exist, and is not theirs to write to. Raises
    InputError if it cannot be made, another process is at work there, or it holds something and no run that goes on.
    """
    chosen = new_run(config, now, auto, what) if config.run_folder is None else Path(config.run_folder)
    if not leads():
        yield chosen
        return
    goes_on = config.resume is not None and chosen.resolve() == Path(config.resume).resolve()
    setting = f"output={config.output}" if config.run_folder is None else f"run_folder={config.run_folder}"
    patience = ENDING_SECONDS if again else 0.0
    with locked_folder(chosen, setting, new=config.run_folder is None, patience_seconds=patience) as folder:
        if not goes_on:
            refuse_content(folder, again=again)
        remove_partial_files(folder)
        yield folder


def refuse_content(folder: Path, *, again: bool) -> None:
    """Raises InputError for a folder that is not empty; it may hold an earlier start of the run that begins `again`.
    Raises OSError for what is no folder."""
    left = {path.name for path in folder.iterdir() if not path.match(PARTIAL)} - {LOCK}
    is_run = CONFIG in left or left <= _BEFORE_CONFIG
    if left and not (again and is_run):
        what, go_on = ("", f", or go on with that run by resume={folder}") if is_run else (" and holds no run", "")
        use = f"choose another, or leave the setting out{go_on}"
        raise InputError(f"run_folder={folder}: the folder is not empty{what}; {use}")


@contextmanager
def locked_folder(chosen: Path, setting: str, *, new: bool, patience_seconds: float = 0.0) -> Iterator[Path]:
    """The folder `chosen`, made if need be, and if it must be `new` one beside it; no other command may work there.

    Afterwards it is removed if it is empty, with those above that were made for it. Errors begin with `setting`;
    `patience_seconds`: how long to wait for a command that may be ending. Raises InputError if it cannot be made, or
    another process is at work there.
    """
    above = [parent for parent in chosen.parents if not parent.exists()]  # the lowest comes first
    try:
        folder = make_new(chosen) if new else chosen
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, patience_seconds)
    except FolderInUseError as error:
        raise InputError(f"{setting}: {error}; wait for its end, or choose another folder") from error
    except OSError as error:
        raise InputError(f"{setting}: no folder can be made there ({error.strerror}); choose another") from error
    try:
        yield folder
    finally:
        lock.release()
        for ours in (folder, *above):
            with suppress(OSError):  # it is not empty
                ours.rmdir()
