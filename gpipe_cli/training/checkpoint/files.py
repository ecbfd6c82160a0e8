"""Training state on disk, keyed by global names: a checkpoint of any number of partitions is read by any other.

A checkpoint is a folder `checkpoints/step_00000123`: a safetensors file per stage and `index.json` with sizes,
checksums and the position in the run. Nothing is ever unpickled. The folder is written under another name, fsynced and
renamed: a reader finds the old checkpoint or the new one, never a part.

Tensor names: `model/<parameter or buffer>`, `optimizer/<parameter>/<state>`, `ema/<parameter or buffer>`.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated

import torch
from safetensors import SafetensorError, safe_open

from gpipe_cli.assembly.loss import NO_TOTALS, Totals
from gpipe_cli.config.schema import Range, parse_config
from gpipe_cli.errors import InputError, error_text, format_value
from gpipe_cli.system.files import (
    NOT_RENAMED,
    check_not_linked,
    copy_file,
    read_json,
    regular_size,
    replace_file,
    sync,
    write_atomic,
)
from gpipe_cli.training.events import EvalRecord

FORMAT = 2
_PREFIX = "step_"
_STEP = re.compile(rf"{_PREFIX}[0-9]{{8,12}}")
_STAGING = re.compile(rf"\.{_STEP.pattern}\.writing")
_FILE = re.compile(r"stage_[0-9]{1,5}\.safetensors")
_MAX_SHOWN_CHARACTERS = 200  # characters of an error in an index that are shown
# The names of dtypes in the header of a safetensors file.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip

NonNegativeInt = Annotated[int, Range(0, 10**12)]  # a number of steps or epochs
TensorHeader = tuple[str, tuple[int, ...]]  # a tensor's dtype, by its name in safetensors, and its shape


@dataclass(frozen=True)
class Progress:
    """Where a run stands: `step` steps are done; next is mini-batch `position` of epoch `epoch`, counted from 0."""

    step: NonNegativeInt
    epoch: NonNegativeInt
    position: NonNegativeInt
    steps_per_epoch: NonNegativeInt  # 0: not known before the data is open
    ema_updates: NonNegativeInt
    # on the validation set, or if there is none on the test set; greater is better: top-1, or for text minus the loss
    best_score: float | None
    best_step: NonNegativeInt | None
    # Evaluations are kept here, as the parent may be killed before it has reported them. None also stands for a loss
    # that is not finite.
    test: EvalRecord | None = None  # the last evaluation
    best: EvalRecord | None = None  # the best evaluation
    epoch_totals: Totals = NO_TOTALS  # over the mini-batches of this epoch so far; only process 0 keeps them


@dataclass(frozen=True)
class WrittenFile:
    """The file of a stage."""

    name: str
    bytes: Annotated[int, Range(0, 2**60)]
    sha256: str
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class Index:
    """The content of a checkpoint's index.json."""

    progress: Progress
    layers: tuple[str, ...]
    files: tuple[WrittenFile, ...]
    without_state: tuple[str, ...] = ()  # parameters without optimizer state: frozen, or never used
    classes: tuple[str, ...] | None = None  # names by output; (): the data name none; None: of an older version


class CorruptCheckpointError(InputError):
    """A checkpoint cannot be used; an older checkpoint of the run may be intact."""


def list_checkpoints(run_folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = (run_folder / "checkpoints").glob(f"{_PREFIX}*")
    complete = [folder for folder in folders if _STEP.fullmatch(folder.name) and (folder / "index.json").exists()]
    return sorted(complete, key=step_of)


def checkpoint_path(run_folder: Path, step: int) -> Path:
    return run_folder / "checkpoints" / folder_name(step)


def run_folder_of(checkpoint: Path) -> Path:
    """The folder of the run that wrote the checkpoint."""
    return checkpoint.parent.parent


def step_of(checkpoint: Path) -> int:
    """The number of steps that were done when the checkpoint was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def find_checkpoint(
    run_folder: Path,
    which: str,
    setting: str,
    check: Callable[[Path], object] = lambda checkpoint: None,
    warn: Callable[[str], None] = lambda line: None,
) -> Path:
    """The `last` or the `best` checkpoint; if it is damaged or gone, the newest intact, with a line to `warn`.

    A checkpoint is damaged if its files are not what was written, or `check` raises CorruptCheckpointError for it.
    Raises InputError, naming `setting`, if the run has no intact checkpoint, and any other error that `check` raises.
    """
    checkpoints = list_checkpoints(run_folder)[::-1]
    if not checkpoints:
        raise InputError(
            f"{setting}={run_folder}: the run has written no checkpoint (looked in {run_folder / 'checkpoints'}); "
            "it ended before its first one, start it again"
        )
    lost = ""  # why the best is not taken
    if which == "best" and (best := _find_best(checkpoints)) in checkpoints:
        checkpoints.sort(key=lambda checkpoint: checkpoint != best)
    elif which == "best":
        lost = f"{run_folder}: no checkpoint is the best, as nothing was evaluated before the last"
        if best is not None:
            lost = f"{best}: the best checkpoint no longer exists"
    damaged: list[CorruptCheckpointError] = []
    for checkpoint in checkpoints:
        try:
            check(checkpoint)
            check_files(checkpoint, read_index(checkpoint).files)  # last, as it reads all of them
        except CorruptCheckpointError as error:
            damaged.append(error)
            continue
        if lost or damaged:
            warn(f"warning: {lost or damaged[0]}; {checkpoint.name} is taken, the newest checkpoint that is intact")
        return checkpoint
    raise InputError(f"{setting}={run_folder}: none of its checkpoints is intact: {damaged[0]}; give another run")


def _find_best(newest_first: Sequence[Path]) -> Path | None:
    for checkpoint in newest_first:
        with suppress(CorruptCheckpointError):
            best = read_index(checkpoint).progress.best_step
            return None if best is None else checkpoint.with_name(folder_name(best))
    return None


def missing_best_checkpoint(last: Path) -> Path | None:
    """The best checkpoint of a run whose newest is `last`, if it no longer exists."""
    best = _find_best([last])
    return None if best is None or best.exists() else best


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def staging_dir(run_folder: Path, step: int) -> Path:
    """The folder into which stages write a checkpoint until it is complete; readers ignore it."""
    return run_folder / "checkpoints" / f".{folder_name(step)}.writing"


def clean_staging(run_folder: Path) -> None:
    """Remove incomplete checkpoints, left by a run that ended while it wrote them."""
    for abandoned in (run_folder / "checkpoints").glob(f".{_PREFIX}*"):
        if _STAGING.fullmatch(abandoned.name):
            shutil.rmtree(abandoned, ignore_errors=True)


# The message for a run folder that no longer exists.
RUN_FOLDER_MISSING = (
    "the run folder was deleted or moved; begin the run again, or continue it where it is now by resume=FOLDER"
)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written; earlier ones are unchanged."""


@contextmanager
def checkpoint_write_errors(path: Path) -> Iterator[None]:
    """For code that writes part of the checkpoint `path`: turns an OSError into a CheckpointError."""
    try:
        yield
    except OSError as error:
        name = path.name.removeprefix(".").removesuffix(".writing")
        raise CheckpointError(f"{path.parent / name}: the checkpoint cannot be written ({error.strerror})") from error


def write_stage(staging: Path, stage: int, tensors: Mapping[str, torch.Tensor]) -> WrittenFile:
    """Write and fsync a stage's tensors, which are contiguous and on the CPU. Raises CheckpointError.

    safetensors' own writer needs a second reading for the checksum, puts another file with another mode in the place of
    the one that is there, and says why it fails in words only.
    """
    parts = safetensors_parts(tensors)
    path = staging / f"stage_{stage}.safetensors"
    digest = hashlib.sha256()
    with checkpoint_write_errors(staging):
        staging.parent.mkdir(exist_ok=True)  # without parents: a deleted run folder must not reappear
        staging.mkdir(exist_ok=True)  # another stage may have created it
        check_not_linked(staging.parent)
        if path.is_file() and (staging.is_symlink() or path.is_symlink()):
            raise OSError(errno.EEXIST, "a link leads to a file that is not this run's", str(path))
        with path.open("wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
            file.flush()
            sync(file.fileno())
    return WrittenFile(path.name, sum(map(len, parts)), digest.hexdigest(), tuple(tensors))


def safetensors_parts(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> list[bytes | memoryview]:
    """The content of a safetensors file of contiguous tensors on the CPU, in pieces; tensors' memory is not copied.

    Format: https://github.com/huggingface/safetensors, "Format"
    """
    # wide types first, in the order of safetensors' own writer: every tensor is aligned to its element size
    ordered = sorted(tensors.items(), key=lambda named: (-named[1].itemsize, named[0]))
    ends = [0, *accumulate(tensor.nbytes for _, tensor in ordered)]
    entries = {
        name: {"dtype": DTYPES[tensor.dtype], "shape": tensor.shape, "data_offsets": span}
        for (name, tensor), span in zip(ordered, pairwise(ends), strict=True)
    }
    head = json.dumps({"__metadata__": dict(metadata), **entries} if metadata else entries).encode()
    head += b" " * (-len(head) % 8)
    content = (tensor.flatten().view(torch.uint8).numpy().data for _, tensor in ordered)
    return [len(head).to_bytes(8, "little"), head, *content]


def write_part(staging: Path, process: int, files: Sequence[WrittenFile]) -> None:
    """Write the list of files that `process` has written, once they are on disk. Raises CheckpointError."""
    with checkpoint_write_errors(staging):
        write_atomic(staging / f"part_{process}.json", json.dumps([asdict(file) for file in files]))


def read_part(staging: Path, process: int) -> list[WrittenFile] | None:
    """The list of files that `process` has written; None if it has not finished yet. Raises CheckpointError."""
    with checkpoint_write_errors(staging):
        try:
            return [parse_config(WrittenFile, file) for file in read_json(staging / f"part_{process}.json")]
        except FileNotFoundError:
            return None


def finish_checkpoint(staging: Path, index: Index, *, config: str, keep: int) -> Path:
    """Write the index, rename the folder to its final name, and remove old checkpoints except the newest `keep` and the
    best. Checkpoints of later steps are also removed: the run was resumed from before them, as they were damaged.

    Raises CheckpointError.
    """
    progress = index.progress
    values = asdict(index)
    values = {"format": FORMAT, **values.pop("progress"), **values, "config": config}
    final = staging.parent / folder_name(progress.step)
    best = final.name if progress.best_step is None else folder_name(progress.best_step)
    with checkpoint_write_errors(staging):
        check_not_linked(final)
        for file in index.files:  # stages may be on other machines: check that their files are visible on this machine
            regular_size(staging / file.name)
        for part in staging.glob("part_*.json"):
            part.unlink()
        write_atomic(staging / "index.json", json.dumps(values, indent=1, allow_nan=False))
        _sync_folder(staging)
        # a run resumed from an earlier checkpoint may reach this step again, and then replaces its checkpoint
        replaced = staging.parent / f".{final.name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)  # left by a run killed right here: it would block the rename
        if final.exists():
            _rename(final, replaced)
        _rename(staging, final)
        shutil.rmtree(replaced, ignore_errors=True)
        _update_symlink(final.parent / "last", final.name)
        if (final.parent / best).exists():
            _update_symlink(final.parent / "best", best)
        _sync_folder(final.parent)
        complete = list_checkpoints(final.parent.parent)
        not_later = [checkpoint for checkpoint in complete if step_of(checkpoint) <= progress.step]
        for checkpoint in complete:
            if checkpoint not in not_later[-keep:] and checkpoint.name != best:
                # a network mount keeps files that another program has open; the next checkpoint removes them
                shutil.rmtree(checkpoint, ignore_errors=True)
    return final


def _rename(folder: Path, path: Path) -> None:
    """Rename the folder of a checkpoint. Where the file system cannot rename folders, its files are copied: the index
    is copied last and removed first, as readers ignore a folder without it."""
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno not in NOT_RENAMED:
            raise
        path.mkdir(exist_ok=True)
        for file in folder.iterdir():
            if file.name != "index.json":
                copy_file(file, path / file.name)
        replace_file(folder / "index.json", path / "index.json")
        (folder / "index.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def link_checkpoint_into(last: Path, run_folder: Path) -> None:
    """Link or copy the checkpoint from which a run is resumed, and that run's best, into the new run's folder.

    The new run can then be resumed and evaluated by itself from its start. Raises CheckpointError.
    """
    target = run_folder / "checkpoints"
    best = _find_best([last])
    for link, checkpoint in (("best", best or last), ("last", last)):
        if last.parent.resolve() == target.resolve() or not checkpoint.exists():
            continue
        linked = target / checkpoint.name
        with checkpoint_write_errors(linked):
            target.mkdir(exist_ok=True)
            if not (linked / "index.json").exists():
                staging = linked.with_name(f".{checkpoint.name}.writing")
                shutil.rmtree(staging, ignore_errors=True)  # left by an earlier start
                staging.mkdir()
                for file in checkpoint.iterdir():
                    _link_or_copy(file, staging / file.name)
                _rename(staging, linked)
            _update_symlink(target / link, checkpoint.name)


def _link_or_copy(source: Path, target: Path) -> None:
    """Hard links are safe: files of a checkpoint never change, so two folders may share them."""
    try:
        target.hardlink_to(source)
    except OSError:
        copy_file(source, target)


def _update_symlink(link: Path, target: str) -> None:
    """Make the symlink `link` (`last` or `best`, for people and scripts) point to `target`, atomically; where the file
    system has no links or cannot rename over one, write a file with the target's name."""
    staging = link.with_name(f".{link.name}.writing")
    staging.unlink(missing_ok=True)
    try:
        staging.symlink_to(target)
        staging.replace(link)
    except OSError:
        staging.unlink(missing_ok=True)
        if link.is_symlink():
            link.unlink()
        write_atomic(link, f"{target}\n")


def read_index(checkpoint: Path) -> Index:
    """The index of a checkpoint. Raises CorruptCheckpointError if index.json is not what this program writes."""
    file = checkpoint / "index.json"
    try:
        values = read_json(file)
        if not isinstance(values, dict):
            raise ValueError(f"it holds {type(values).__name__}")
        if (written := values.pop("format", None)) != FORMAT:
            raise ValueError(f"it has format {format_value(written)}, this version of gpipe reads format {FORMAT}")
        if not isinstance(values.pop("config", None), str):  # for people only: `parse_config` takes no multi-line text
            raise ValueError("config: must be a text")
        for key in ("seed", "batch_size", "batch_tokens"):  # in checkpoints of before; they are settings of the run
            values.pop(key, None)
        progress = {key: values.pop(key) for key in Progress.__dataclass_fields__ if key in values}
        index = parse_config(Index, values | {"progress": progress})
        _check_index(index, checkpoint.resolve().name)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error_text(error)
        why = str(why).partition(";")[0].replace("progress.", "")
        raise CorruptCheckpointError(
            f"{file}: is not the index of a checkpoint ({why[:_MAX_SHOWN_CHARACTERS]})"
        ) from error
    return index


def _check_index(index: Index, folder: str) -> None:
    """Raises ValueError for values that are each valid but inconsistent with each other."""
    at, totals = index.progress, index.progress.epoch_totals
    names = [file.name for file in index.files]
    wrong = {
        f"step={at.step}: the folder is {folder}": folder_name(at.step) != folder,
        f"step={at.step}: is not mini-batch {at.position} of epoch {at.epoch}, of {at.steps_per_epoch}": (
            at.step != at.epoch * at.steps_per_epoch + at.position or at.position > at.steps_per_epoch
        ),
        f"best_step={format_value(at.best_step)}, best_score={format_value(at.best_score)}: do not go together": (
            (at.best_step is None) != (at.best_score is None) or (at.best_step or 0) > at.step
        ),
        f"epoch_totals.top1={totals.top1}: of {totals.elements} elements": (
            not 0 <= totals.top1 <= totals.top5 <= totals.elements
        ),
        f"ema_updates={at.ema_updates}: there were {at.step} steps": at.ema_updates > at.step,
        "files: a name is not a stage's": not all(_FILE.fullmatch(name) for name in names),
        "files: a name occurs twice": len({*names}) < len(names),
    }
    for what, is_so in wrong.items():
        if is_so:
            raise ValueError(what)


def tensor_headers(checkpoint: Path, files: Iterable[WrittenFile]) -> dict[str, TensorHeader]:
    """The dtype and shape of every tensor in `files` of a checkpoint, by name; only headers are read.

    Raises CorruptCheckpointError if a file cannot be read, or lacks tensors that the index lists.
    """
    by_name: dict[str, TensorHeader] = {}
    for file in files:
        path = checkpoint / file.name
        _check_size(path, file)
        with _corrupt_checkpoint_errors(path), safe_open(path, framework="pt") as opened:
            if {*opened.keys()} != {*file.tensors}:
                raise CorruptCheckpointError(f"{path}: does not hold the tensors that index.json lists")
            slices = {name: opened.get_slice(name) for name in file.tensors}
            by_name |= {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in slices.items()}
    return by_name


def read_tensors(
    checkpoint: Path, layers: Iterable[str], kinds: Iterable[str], intact: set[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of `layers`, of the given kinds (`model`, `optimizer`, `ema`), from whichever files hold them.

    The size and checksum of each file are checked before it is read, even if another process has checked it: it may be
    on another machine. `intact`: names of files that this process has already checked and reads without another check;
    files checked here are added. Raises CorruptCheckpointError if a file is damaged.
    """
    intact = set() if intact is None else intact
    layers, kinds = set(layers), set(kinds)
    tensors: dict[str, torch.Tensor] = {}
    for file in read_index(checkpoint).files:
        names = [name for name in file.tensors if _kind(name) in kinds and _layer(name) in layers]
        if not names:
            continue
        if file.name not in intact:
            check_files(checkpoint, [file])
            intact.add(file.name)
        path = checkpoint / file.name
        with _corrupt_checkpoint_errors(path), safe_open(path, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in names}
    return tensors


def check_files(checkpoint: Path, files: Sequence[WrittenFile]) -> None:
    """Raises CorruptCheckpointError if a file is not what was written, by the sizes of all files first, then by
    checksums."""
    paths = [checkpoint / file.name for file in files]
    for path, file in zip(paths, files, strict=True):
        _check_size(path, file)
    with ThreadPoolExecutor() as pool:
        for path, file, checksum in zip(paths, files, pool.map(_digest, paths), strict=True):
            if checksum != file.sha256:
                raise CorruptCheckpointError(f"{path}: damaged (checksum {checksum[:12]}, {file.sha256[:12]} expected)")


def _check_size(path: Path, file: WrittenFile) -> None:
    with _corrupt_checkpoint_errors(path):
        size = regular_size(path)
    if size != file.bytes:
        raise CorruptCheckpointError(f"{path}: damaged ({size} bytes, {file.bytes} expected)")


def _digest(path: Path) -> str:
    with _corrupt_checkpoint_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _corrupt_checkpoint_errors(path: Path) -> Iterator[None]:
    """For code that reads a file of a checkpoint: turns any error into a CorruptCheckpointError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        why = getattr(error, "strerror", None) or error_text(error)
        raise CorruptCheckpointError(f"{path}: part of the checkpoint cannot be read ({why})") from error


def select(tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The tensors of a kind (`model`, `optimizer`, `ema`), by name without that prefix."""
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in tensors.items() if _kind(name) == kind}


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _layer(name: str) -> str:
    return name.partition("/")[2].partition(".")[0]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
