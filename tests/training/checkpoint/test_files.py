"""Checkpoints: complete or absent, by name, and refused if damaged."""

import errno
import fcntl
import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gpipe_cli.assembly.loss import Totals
from gpipe_cli.data.cache import read_or_make
from gpipe_cli.errors import InputError
from gpipe_cli.system.files import FolderLock
from gpipe_cli.training.checkpoint import files
from gpipe_cli.training.checkpoint.background_writer import Snapshot

KINDS = ("model", "optimizer", "ema")


def tensors(step: int) -> list[dict[str, torch.Tensor]]:
    """Two stages; dtypes, strides and shared memory as a training has them."""
    generator = torch.Generator().manual_seed(step)
    kernel = torch.randn(4, 3, 2, 2, generator=generator).to(memory_format=torch.channels_last)
    return [
        {"model/stem.weight": kernel, "ema/stem.weight": kernel, "optimizer/stem.weight/square_avg": kernel * kernel},
        {
            "model/head.weight": torch.randn(2, 6, generator=generator).t(),
            "model/head.norm.num_batches_tracked": torch.tensor(step),
            "optimizer/head.weight/step": torch.tensor(float(step)),
        },
    ]


def progress(step: int, best: int | None = None) -> files.Progress:
    totals = Totals(7, 0.1 + 0.2, 1 / 3, 2.0, 5.0)
    score = None if best is None else 0.5
    return files.Progress(step, step // 3, step % 3, 3, step, score, best, epoch_totals=totals)


def write(run: Path, step: int, *, best: int | None = None, keep: int = 9) -> Path:
    staging = files.staging_dir(run, step)
    snapshots = [Snapshot().copy_to_host(named)[0] for named in tensors(step)]
    written = [files.write_stage(staging, stage, copies) for stage, copies in enumerate(snapshots)]
    index = files.Index(progress(step, best), ("stem", "head"), tuple(written))
    return files.finish_checkpoint(staging, index, config="partitions: 2\n", keep=keep)


def test_strides_shared_memory_and_types_come_back(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 5, best=5)
    found, expected = files.read_tensors(checkpoint, ("stem", "head"), KINDS), tensors(5)[0] | tensors(5)[1]
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert files.read_index(checkpoint).progress == progress(5, 5)


def test_a_file_system_may_have_neither_links_nor_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FAT and some network mounts: a run ended at its first checkpoint, `Operation not supported`."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    for module, name in ((os, "symlink"), (os, "link"), (fcntl, "flock")):
        monkeypatch.setattr(module, name, refuse)
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    for step, best in ((4, 4), (5, 4)):
        write(first, step, best=best)
    files.link_checkpoint_into(files.find_checkpoint(first, "last", "resume"), second)
    write(second, 6, best=6, keep=1)
    for run, last, best in ((first, 5, 4), (second, 6, 6)):
        for which, step in (("last", last), ("best", best)):
            assert files.find_checkpoint(run, which, "run").name == f"step_{step:08d}"
            assert (run / "checkpoints" / which).read_text() == f"step_{step:08d}\n"
    FolderLock(first).release()
    assert [read_or_make(tmp_path / "cache", "pieces", lambda: b"learned") for _ in range(2)] == [b"learned"] * 2


def test_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    every = {f'"{number}\u00e9': torch.ones(3).to(dtype) for number, dtype in enumerate(files.DTYPES)}
    for stage, named in enumerate(({**every, "none": torch.empty(0, 2), "one": torch.tensor(7.0)}, {})):
        written = files.write_stage(tmp_path / "checkpoints" / "draft", stage, named)
        file = tmp_path / "checkpoints" / "draft" / written.name
        found = load_file(file)
        assert found.keys() == named.keys()
        for name, tensor in named.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
        assert written.bytes == file.stat().st_size
        assert written.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_only_what_is_asked_for(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, 1)
    assert set(files.read_tensors(checkpoint, ("stem",), ("model",))) == {"model/stem.weight"}
    (checkpoint / "stage_0.safetensors").unlink()  # nobody who needs only the head looks at it
    assert len(files.read_tensors(checkpoint, ("head",), KINDS)) == 3
    with pytest.raises(InputError, match=r"stage_0.safetensors: part of the checkpoint cannot be read"):
        files.read_tensors(checkpoint, ("stem",), KINDS)


def test_a_killed_writer_leaves_nothing_that_is_seen(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"resume={tmp_path}: the run has written no checkpoint"):
        files.find_checkpoint(tmp_path, "last", "resume")
    write(tmp_path, 1)
    staging = files.staging_dir(tmp_path, 2)
    files.write_stage(staging, 0, Snapshot().copy_to_host(tensors(2)[0])[0])  # and then it was killed
    assert [folder.name for folder in files.list_checkpoints(tmp_path)] == ["step_00000001"]
    assert files.find_checkpoint(tmp_path, "last", "run").name == "step_00000001"
    files.clean_staging(tmp_path)  # as the next start does
    write(tmp_path, 3)
    assert sorted(path.name for path in staging.parent.iterdir() if not path.is_symlink()) == [
        "step_00000001",
        "step_00000003",
    ]


def test_a_step_that_is_done_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    """Also after a run that was killed between the two renamings."""
    first = write(tmp_path, 1)
    shutil.copytree(first, first.with_name(f".{first.name}.replaced"))
    again = write(tmp_path, 1, best=1)
    assert files.read_index(again).progress.best_step == 1
    assert len(files.read_tensors(again, ("stem", "head"), KINDS)) == 6
    assert sorted(path.name for path in first.parent.iterdir()) == ["best", "last", "step_00000001"]


def test_links_and_what_stays(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        write(tmp_path, step, best=best, keep=2)
    folder = tmp_path / "checkpoints"
    assert [found.name for found in files.list_checkpoints(tmp_path)] == [
        "step_00000002",
        "step_00000004",
        "step_00000005",
    ]
    assert (folder / "last").readlink() == Path("step_00000005")
    assert (folder / "best").readlink() == Path("step_00000002")
    assert files.find_checkpoint(tmp_path, "best", "run").name == "step_00000002"
    write(tmp_path, 6, best=6, keep=1)
    assert [found.name for found in files.list_checkpoints(tmp_path)] == ["step_00000006"]
    assert (folder / "best").resolve() == (folder / "last").resolve() == (folder / "step_00000006").resolve()
