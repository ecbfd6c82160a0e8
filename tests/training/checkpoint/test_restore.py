"""What a checkpoint is refused for, and what may differ between the run that wrote it and the one that reads it."""

import hashlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import (
    NAMED,
    SMALL,
    assert_same_tensors,
    command,
    configure,
    final_tensors,
    pipeline_of,
    source_of,
    state_of,
    train_here,
)

import gpipe_cli
from gpipe_cli.errors import InputError
from gpipe_cli.results.files import read_result
from gpipe_cli.training.checkpoint import files
from gpipe_cli.training.checkpoint.files import find_checkpoint, list_checkpoints
from gpipe_cli.training.checkpoint.restore import restore
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.fine_tuning import fine_tune

SETTINGS = [*SMALL, "executor=in_process", "epochs=1", "ema_decay=0.9", "max_steps=1"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after each of two steps, the second of which is the best."""
    folder = tmp_path_factory.mktemp("two")
    train_here(configure(*SETTINGS, "max_steps=2", "checkpoint.every_steps=1", "partitions=2"), folder)
    return folder


def restored(run: Path, *settings: str) -> Engine:
    engine = pipeline_of(configure(*SETTINGS, *settings))
    restore(engine, find_checkpoint(run, "last", "run"), optimizer=True)
    return engine


def test_everything_comes_back_under_its_name(two: Path) -> None:
    engine = restored(two, "partitions=3", "seed=99")
    assert_same_tensors(state_of(engine), final_tensors(two))
    assert [average.updates for average in engine.averages.values()] == [2] * 3


def test_a_run_may_begin_to_average_later(tmp_path: Path) -> None:
    train_here(configure(*SETTINGS, "ema_decay=0", "partitions=1"), tmp_path)
    state = state_of(restored(tmp_path, "partitions=1"))
    averages = {name: tensor for name, tensor in state.items() if name.startswith("ema/")}
    assert averages
    assert averages.keys().isdisjoint(final_tensors(tmp_path))
    for name, tensor in averages.items():
        assert torch.equal(tensor, state[name.replace("ema/", "model/", 1)]), name


def test_a_process_hashes_each_file_once(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage hashed the files that it reads: four stages of a process hashed a checkpoint of one file four times.
    `load` hashed all files when it looked for a checkpoint, and again when it read it."""
    hashed: list[str] = []
    digest = files._digest

    def watched(path: Path) -> str:
        hashed.append(path.name)
        return digest(path)

    monkeypatch.setattr(files, "_digest", watched)
    every = ["stage_0.safetensors", "stage_1.safetensors"]
    engine = pipeline_of(configure(*SETTINGS, "partitions=4"))
    restore(engine, find_checkpoint(two, "last", "run"), optimizer=True)
    assert sorted(hashed) == sorted(2 * every), "once by the parent, and once by the process of the stages"
    hashed.clear()
    fine_tune(pipeline_of(configure(*SETTINGS, "partitions=4", f"init_from={two}")), source(f"init_from={two}"))
    assert sorted(hashed) == sorted(2 * every)
    hashed.clear()
    gpipe_cli.load(str(two), target="custom_models:small")
    assert sorted(hashed) == every


def test_another_optimizer_is_refused(two: Path) -> None:
    """What other models are refused for is in test_fine_tuning.py."""
    with pytest.raises(InputError, match=r"^optimizer=adam: needs exp_avg, exp_avg_sq of every .*remove the optimizer"):
        source(f"resume={two}", "optimizer=adam")
    with pytest.raises(InputError, match=r"resume=.*: step_\d+ is of another model"):
        source(f"resume={two}", "model.target=custom_models:flattens")


def source(*settings: str) -> Path:
    """The checkpoint that a run with these settings would resume, or load weights from."""
    found = source_of(configure(*SETTINGS, *settings))
    assert found is not None
    return found


def index_with(**values: object) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        index = json.loads((checkpoint / "index.json").read_text())
        (checkpoint / "index.json").write_text(json.dumps(index | values))

    return edit


def change_file(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    """Another file, which the index describes as it is."""

    def edit(checkpoint: Path) -> None:
        index, file = json.loads((checkpoint / "index.json").read_text()), checkpoint / "stage_0.safetensors"
        tensors = change(load_file(file))
        save_file(tensors, file)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        index["files"][0] |= {"bytes": file.stat().st_size, "sha256": digest, "tensors": list(tensors)}
        index_with(files=index["files"])(checkpoint)

    return edit


def without_state(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if not name.startswith("optimizer/")}


def doubled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def pipe(name: str) -> Callable[[Path], None]:
    def edit(checkpoint: Path) -> None:
        (checkpoint / name).unlink()
        os.mkfifo(checkpoint / name)

    return edit


def flip(checkpoint: Path) -> None:
    content = bytearray((checkpoint / "stage_0.safetensors").read_bytes())
    content[-1] ^= 64
    (checkpoint / "stage_0.safetensors").write_bytes(content)


def cut_off(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: os.truncate(checkpoint / name, (checkpoint / name).stat().st_size - 4)


EVIL = {"name": "../evil.safetensors", "bytes": 1, "sha256": "0", "tensors": []}
DAMAGE = {
    "not JSON": (cut_off("index.json"), "index.json: is not the index of a checkpoint"),
    "no format": (index_with(format=None), "it has format null, this version of gpipe reads format 2"),
    "a text as a step": (index_with(step="two"), "step=two: must be a whole number"),
    "beyond the epoch": (index_with(position=4, steps_per_epoch=3), "step=2: is not mini-batch 4 of epoch 0, of 3"),
    "more right than there were": (
        index_with(epoch_totals={"elements": 8, "loss": 1.0, "cross_entropy": 1.0, "top1": 9.0, "top5": 9.0}),
        "epoch_totals.top1=9.0: of 8 elements",
    ),
    "a file elsewhere": (index_with(files=[EVIL]), "files: a name is not a stage's"),
    "a pipe as the index": (pipe("index.json"), "index.json: is not the index of a checkpoint (is not a regular file)"),
    "a pipe as a file": (pipe("stage_0.safetensors"), "stage_0.safetensors: part of the checkpoint cannot be read"),
    "a file that is cut off": (cut_off("stage_0.safetensors"), "stage_0.safetensors: damaged ("),
    "a flipped bit": (flip, "stage_0.safetensors: damaged (checksum"),
    "float64": (change_file(doubled), "is ('F64', "),
    "no optimizer": (change_file(without_state), "optimizer/0.weight/step is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_replaced_by_the_newest_intact_one(
    damage: str, two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong types were tracebacks, float64 and missing states were taken, and a pipe was read for ever."""
    edit, said = DAMAGE[damage]
    run = tmp_path / "run"
    shutil.copytree(two, run, symlinks=True)
    edit(run / "checkpoints" / "step_00000002")
    signal.setitimer(signal.ITIMER_REAL, 20)  # ends the tests if a pipe is opened
    try:
        assert source(f"resume={run}").name == "step_00000001"
        line = capsys.readouterr().err
        assert said in line
        assert line.count("\n") == 1
        assert "; step_00000001 is taken" in line
        shutil.rmtree(run / "checkpoints" / "step_00000001")
        with pytest.raises(InputError, match="none of its checkpoints is intact") as caught:
            source(f"resume={run}")
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_the_same_for_weights_to_begin_with_and_for_an_evaluation(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(two, run, symlinks=True)
    change_file(doubled)(run / "checkpoints" / "step_00000002")
    assert source(f"init_from={run}").name == "step_00000001"
    assert "is ('F64', " in capsys.readouterr().err
    assert command("evaluate", f"run={run}", NAMED, "checkpoint=last") == 0
    assert "; step_00000001 is taken" in capsys.readouterr().err
    assert read_result(run, "evaluate.json")["checkpoint"].endswith("step_00000001")
    flip(run / "checkpoints" / "step_00000001")
    for arguments in (["evaluate", f"run={run}", NAMED], ["train", *SETTINGS, f"init_from={run}"]):
        assert command(*arguments) == 2
        captured = capsys.readouterr()
        assert "loss" not in captured.out
        assert re.fullmatch(rf"gpipe \w+: (run|init_from)={run}: none of its checkpoints .*\n", captured.err)


def test_what_lies_behind_a_damaged_checkpoint_is_done_again(two: Path, tmp_path: Path) -> None:
    """The damaged one would stay the last one for ever."""
    run = tmp_path / "run"
    shutil.copytree(two, run, symlinks=True)
    flip(run / "checkpoints" / "step_00000002")
    (run / "checkpoints" / "step_00000002").rename(run / "checkpoints" / "step_00000003")
    train_here(configure(*SETTINGS, "max_steps=2", f"resume={run}"), run)
    assert [folder.name for folder in list_checkpoints(run)] == ["step_00000001", "step_00000002"]
    assert_same_tensors(final_tensors(run), final_tensors(two))
