"""Training state on disk, keyed by global names: what is written by any number of partitions is read by any other.

A checkpoint is a folder `checkpoints/step_00000123`: one safetensors file per stage and `index.json` with sizes,
checksums and the position in the run. Nothing is ever unpickled. It is written beside its final name, fsynced and
renamed: a reader finds the old one or the new one, never half of one.

Tensor names: `model/<parameter or buffer>`, `optimizer/<parameter>/<state>`, `ema/<parameter or buffer>`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gpipe_cli.files import write_whole

FORMAT = 2
_PREFIX = "step_"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: the next mini-batch is number `position` of epoch `epoch`, and `step` have been done."""

    step: int
    epoch: int
    position: int
    seed: int
    batch_size: int | None
    batch_tokens: int | None
    steps_per_epoch: int  # 0: the data was not open yet
    ema_updates: int
    best_score: float | None  # top-1, or of text the loss with a minus: more is better
    best_step: int | None


@dataclass(frozen=True)
class WrittenFile:
    """One stage's file as the index lists it."""

    name: str
    bytes: int
    sha256: str
    tensors: tuple[str, ...]


def checkpoints_in(run_folder: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    folders = (run_folder / "checkpoints").glob(f"{_PREFIX}*")
    return sorted(folder for folder in folders if (folder / "index.json").is_file())


def find_checkpoint(run_folder: Path, which: str, setting: str) -> Path:
    """The `last` or the `best` checkpoint. Raises ValueError naming `setting` if the run has none."""
    found = checkpoints_in(run_folder)
    if not found:
        raise ValueError(
            f"{setting}={run_folder}: the run has written no checkpoint (looked in {run_folder / 'checkpoints'}); "
            "it ended before its first one, start it again"
        )
    if which == "best":
        best = read_progress(found[-1]).best_step
        for folder in found:
            if best is not None and folder.name == folder_name(best):
                return folder
    return found[-1]


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def begin_checkpoint(run_folder: Path, step: int) -> Path:
    """Make the folder that the stages write into; readers do not look at it. Raises CheckpointError."""
    draft = run_folder / "checkpoints" / f".{folder_name(step)}.writing"
    remove_drafts(run_folder)
    with writing(draft):
        draft.parent.mkdir(exist_ok=True)  # without its parents: a run folder that was deleted does not come back
        draft.mkdir()
    return draft


def remove_drafts(run_folder: Path) -> None:
    """Remove what a run that has ended while it wrote a checkpoint has left of it."""
    for abandoned in (run_folder / "checkpoints").glob(f".{_PREFIX}*.writing"):
        shutil.rmtree(abandoned, ignore_errors=True)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written; those before it are as they were."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around writing part of a checkpoint. Raises CheckpointError, one line, if that cannot be done."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error).rpartition("I/O error: ")[2].partition(" (os error")[0]
        name = path.name.removeprefix(".").removesuffix(".writing")
        raise CheckpointError(f"{path.parent / name}: the checkpoint cannot be written ({why})") from error


def write_stage(draft: Path, stage: int, tensors: Mapping[str, torch.Tensor]) -> WrittenFile:
    """Write one stage's tensors and make sure they are on disk. Raises CheckpointError."""
    file = draft / f"stage_{stage}.safetensors"
    # a plain copy each: safetensors refuses strides and memory that two names share
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with writing(draft):
        save_file(copies, file)
        with file.open("rb") as written:
            os.fsync(written.fileno())
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        return WrittenFile(file.name, file.stat().st_size, digest, tuple(tensors))


def finish_checkpoint(
    draft: Path, progress: Progress, files: Iterable[WrittenFile], *, layers: Iterable[str], config: str, keep: int
) -> Path:
    """Write the index, give the folder its name, and remove old checkpoints: the newest `keep` and the best one
    stay. Raises CheckpointError."""
    index = {
        "format": FORMAT,
        **asdict(progress),
        "layers": list(layers),
        "files": [asdict(file) for file in files],
        "config": config,
    }
    final = draft.parent / folder_name(progress.step)
    best = final.name if progress.best_step is None else folder_name(progress.best_step)
    with writing(draft):
        write_whole(draft / "index.json", json.dumps(index, indent=1))
        _sync_folder(draft)
        _move_into_place(draft, final)
        _point(final.parent / "last", final.name)
        if (final.parent / best).exists():
            _point(final.parent / "best", best)
        _sync_folder(final.parent)
        for old in checkpoints_in(final.parent.parent)[:-keep]:
            if old.name != best:
                shutil.rmtree(old)
    return final


def _move_into_place(draft: Path, final: Path) -> None:
    """Give a draft its name; one of that step is replaced: a run that went on from an earlier one came by again."""
    replaced = draft.parent / f".{final.name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)  # of a run that was killed right here: nothing is renamed over it
    if final.exists():
        final.rename(replaced)
    draft.rename(final)
    shutil.rmtree(replaced, ignore_errors=True)


def adopt(source: Path, run_folder: Path) -> None:
    """Bring the last and the best checkpoint of the run that is resumed along into its new folder.

    The new run can then be resumed and evaluated by itself, from its first moment on. Raises CheckpointError.
    """
    target = run_folder / "checkpoints"
    if (source / "checkpoints").resolve() == target.resolve():
        return
    for which in ("best", "last"):
        checkpoint = find_checkpoint(source, which, "resume")
        adopted = target / checkpoint.name
        with writing(adopted):
            target.mkdir(exist_ok=True)
            if not adopted.exists():
                draft = adopted.with_name(f".{checkpoint.name}.writing")
                shutil.copytree(checkpoint, draft, copy_function=_link_or_copy)
                draft.rename(adopted)
            _point(target / which, checkpoint.name)


def _link_or_copy(source: str, target: str) -> None:
    """Checkpoints are never written to again, so two folders may share the files where the file system can."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _point(link: Path, target: str) -> None:
    """`last` and `best`, for people and scripts; replaced in one go."""
    draft = link.with_name(f".{link.name}.writing")
    draft.unlink(missing_ok=True)
    draft.symlink_to(target)
    draft.replace(link)


def read_index(checkpoint: Path) -> dict[str, Any]:
    try:
        index = json.loads((checkpoint / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{checkpoint}: the checkpoint's index.json cannot be read ({error}); use another one"
        ) from error
    if index.get("format") != FORMAT:
        raise ValueError(
            f"{checkpoint}: the checkpoint has format {index.get('format')}, this version reads format {FORMAT}; "
            "use the version of gpipe that wrote it"
        )
    return dict(index)


def read_progress(checkpoint: Path) -> Progress:
    index = read_index(checkpoint)
    return Progress(**{name: index[name] for name in Progress.__dataclass_fields__})


def read_tensors(checkpoint: Path, layers: Iterable[str], kinds: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors of some layers, of the given kinds (`model`, `optimizer`, `ema`), from whichever files hold them.

    Every file that is needed is first compared with its size and checksum. Raises ValueError if one is damaged.
    """
    wanted, kinds = set(layers), set(kinds)
    tensors: dict[str, torch.Tensor] = {}
    for file in read_index(checkpoint)["files"]:
        names = [name for name in file["tensors"] if _kind(name) in kinds and _layer(name) in wanted]
        if not names:
            continue
        path = checkpoint / file["name"]
        _verify(path, file["bytes"], file["sha256"])
        try:
            with safe_open(path, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in names}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: not readable as safetensors ({error}); use another checkpoint") from error
    return tensors


def select(tensors: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Those of one kind, without the prefix."""
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in tensors.items() if _kind(name) == kind}


def _kind(name: str) -> str:
    return name.partition("/")[0]


def _layer(name: str) -> str:
    return name.partition("/")[2].partition(".")[0]


def _verify(path: Path, size: int, digest: str) -> None:
    try:
        actual = path.stat().st_size
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(
            f"{path}: part of the checkpoint cannot be read ({error.strerror}); use another one"
        ) from error
    if actual != size or found != digest:
        raise ValueError(
            f"{path}: damaged ({actual} bytes, {size} expected; checksum {found[:12]}, {digest[:12]} expected); "
            "use another checkpoint of the run"
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
