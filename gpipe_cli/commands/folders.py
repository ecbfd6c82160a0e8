"""The folders that commands write to: created if need be, locked while the command runs, and never left empty."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

from gpipe_cli.config.settings import CONFIG_FILE, TrainConfig
from gpipe_cli.distributed.torchrun_env import is_rank_zero
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.reporting.run.lines import LOG
from gpipe_cli.results.files import RESULT_FILE
from gpipe_cli.system.files import FolderInUseError, FolderLock, contents, remove_partial_files

# files that a run writes before its configuration
_BEFORE_CONFIG = {"checkpoints", "vocabulary.model", "tokenizer", "failure.txt"}
_AFTER_CONFIG = (  # and what it writes then, as patterns
    CONFIG_FILE, RESULT_FILE, LOG, "pipeline.html", "timeline.png", "timeline_trace.json", "metrics.csv",
    "loggers.json", "*tfevents*", "wandb",
)  # fmt: skip
RUN_EXIT_TIMEOUT_SECONDS = 6.0  # from the kill of a run, or of its sweep, until the run has ended at the latest


def numbered_paths(path: Path) -> Iterator[Path]:
    """`path`, `path-2`, `path-3` and so on, without end."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def check_writable(key: str, file: Path, *, alternative: str, overwrite: bool = False, is_folder: bool = False) -> None:
    """Raises InvalidSettingError if `file`, which may be a folder, cannot be written; `alternative`: what to give
    instead of a file that already exists."""
    if not file.parent.is_dir():
        raise InvalidSettingError(key, file, f"the folder {file.parent} does not exist; make it, or give another")
    if file.is_symlink():
        raise InvalidSettingError(key, file, "is a link, and nothing is written through it; give what it leads to")
    if file.exists() and not (overwrite and (file.is_dir() if is_folder else file.is_file())):
        raise InvalidSettingError(key, file, f"it is there already; give {alternative}")


def create_new_folder(path: Path) -> Path:
    """Create the first of `numbered_paths(path)` that does not exist: two commands started in the same second must not
    share a folder named by the time. Raises OSError if it cannot be created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in numbered_paths(path):
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("without end")


def new_run_path(config: TrainConfig, started: datetime, auto: Sequence[str] = (), what: str = "") -> Path:
    """A path in `output`, named by time, `what` (`bench`, ...; "" for a training), model, dataset, K, M and R."""
    model = Path(config.model.name).name  # for Hugging Face the name may be a folder, or OWNER/NAME
    stem = f"{started:%Y-%m-%d_%H-%M-%S}_{f'{what}_' if what else ''}{model}_{config.dataset.name}"
    k, m, r = ("auto" if key in auto else getattr(config, key) for key in ("partitions", "micro_batches", "replicas"))
    return Path(config.output) / f"{stem}_K{k}_M{m}{'' if r == 1 else f'_R{r}'}"


@contextmanager
def run_folder(
    config: TrainConfig, started: datetime, auto: Sequence[str] = (), what: str = "", *, may_exist: bool = False
) -> Iterator[Path]:
    """The folder of a run, `config.run_folder` or a `new_run_path`, locked inside the context and removed after it if
    it was made here and is empty.

    `auto`: settings that will be chosen later; `what`: "" for a training; `may_exist`: `run_folder` may hold an earlier
    start of this run, which may still be ending.

    Under torchrun only process 0 creates the folder; the other processes get a path that they must not write to. Raises
    InputError if it cannot be created, another process is at work there, or it is not empty and no run resumes there.
    """
    chosen = new_run_path(config, started, auto, what) if config.run_folder is None else Path(config.run_folder)
    if not is_rank_zero():
        yield chosen
        return
    resumes = config.resume is not None and chosen.resolve() == Path(config.resume).resolve()
    setting = f"output={config.output}" if config.run_folder is None else f"run_folder={config.run_folder}"
    otherwise = "choose another folder"
    if resumes and not may_exist:
        setting, otherwise = f"resume={config.resume}", "give run_folder=NEW, to go on with a copy there"
    patience = RUN_EXIT_TIMEOUT_SECONDS if may_exist else 0.0
    with lock_folder(
        chosen, setting, new=config.run_folder is None, timeout_seconds=patience, otherwise=otherwise
    ) as folder:
        if not resumes:
            _check_folder_free(folder, may_exist=may_exist)
        for name in ("checkpoints", "tokenizer"):
            if (folder / name).is_symlink():
                use = "move what it leads to in its place, or let the whole folder be a link"
                raise InputError(f"{setting}: {folder / name} is a link, and nothing is written through it; {use}")
        remove_partial_files(folder)
        yield folder


def _check_folder_free(folder: Path, *, may_exist: bool) -> None:
    """Raises InputError for a folder that is not empty; with `may_exist` it may hold an earlier start of the run."""
    names = contents(folder)
    is_run = CONFIG_FILE in names or names <= _BEFORE_CONFIG
    if names and not (may_exist and is_run):
        what, remedy = ("", f", or resume that run with resume={folder}") if is_run else (" and holds no run", "")
        use = f"choose another, or remove the setting{remedy}"
        raise InputError(f"run_folder={folder}: the folder is not empty{what}; {use}")


def contains_only_run_files(folder: Path) -> bool:
    """Whether all that is in a run's folder was written by the run; not if the folder is a link."""
    patterns = (*_BEFORE_CONFIG, *_AFTER_CONFIG)
    ours = all(any(fnmatch(name, pattern) for pattern in patterns) for name in contents(folder))
    return ours and not folder.is_symlink()


@contextmanager
def lock_folder(
    chosen: Path, setting: str, *, new: bool, timeout_seconds: float = 0.0, otherwise: str = "choose another folder"
) -> Iterator[Path]:
    """The folder `chosen`, created if need be (if it must be `new` but exists, a `numbered_paths`), and locked.

    Afterwards it is removed if it was created here and is empty, with the folders above that were created for it.
    Errors begin with `setting` and end with `otherwise`, the remedy; `timeout_seconds`: how long to wait for a command
    that may be ending. Raises InputError if the folder cannot be created, or another process is at work there.
    """
    created = list[Path]()  # outermost first
    try:
        _create(chosen.parent if new else chosen, created)
        folder = chosen
        if new:
            folder = create_new_folder(chosen)
            created.append(folder)
        lock = FolderLock(folder, timeout_seconds)
    except FolderInUseError as error:
        raise InputError(f"{setting}: {error}; wait for its end, or {otherwise}") from error
    except OSError as error:
        raise InputError(f"{setting}: nothing can be written there ({error.strerror}); {otherwise}") from error
    else:
        try:
            yield folder
        finally:
            lock.release()
    finally:
        for path in reversed(created):
            with suppress(OSError):  # it is not empty
                path.rmdir()


def _create(folder: Path, created: list[Path]) -> None:
    """Create a folder, and those above it that are missing; those that this has made are added to `created`."""
    for path in reversed([folder, *folder.parents]):
        try:
            if not path.is_dir():
                path.mkdir()
                created.append(path)
        except FileExistsError:  # somebody else has made it meanwhile
            if not path.is_dir():
                raise
