"""What a checkpoint is refused for, and what may differ between the run that wrote it and the one that reads it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import TINY, configure, final_tensors, train_here

from gpipe_cli.training.build import build_model
from gpipe_cli.training.checkpoint import find_checkpoint
from gpipe_cli.training.engine import Engine, build_engine
from gpipe_cli.training.layout import make_layout
from gpipe_cli.training.restore import restore, state_of_stage

SETTINGS = [*TINY, "executor=in_process", "epochs=1", "ema_decay=0.9", "max_steps=1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train_here(configure(*SETTINGS, "partitions=2"), folder)
    return folder


def engine(*settings: str) -> Engine:
    config = configure(*SETTINGS, *settings)
    model = build_model(config)
    return build_engine(config, make_layout(config), 0, None, model, lambda action, samples, lengths: None, begins=True)


@pytest.mark.parametrize("partitions", [1, 3, 7])
def test_everything_comes_back_under_its_name(partitions: int, run: Path) -> None:
    restored = engine(f"partitions={partitions}", "seed=99")
    restore(restored, find_checkpoint(run, "last", "run"), "resume=run", optimizer=True)
    state: dict[str, torch.Tensor] = {}
    for stage in range(partitions):
        own = state_of_stage(restored, stage)
        assert not own.keys() & state.keys()
        state |= own
    expected = final_tensors(run)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
    assert [average.updates for average in restored.averages.values()] == [1] * partitions


def test_an_evaluation_needs_no_optimizer_state(run: Path) -> None:
    restored = engine("partitions=1")
    restore(restored, find_checkpoint(run, "last", "run"), "resume=run", optimizer=False)
    assert not any(name.startswith("optimizer/") for name in state_of_stage(restored, 0))


def test_a_run_may_begin_to_average_later(tmp_path: Path) -> None:
    train_here(replace(configure(*SETTINGS, "partitions=1"), ema_decay=0.0), tmp_path)
    assert not any(name.startswith("ema/") for name in final_tensors(tmp_path))
    restored = engine("partitions=1")
    restore(restored, find_checkpoint(tmp_path, "last", "run"), "resume=run", optimizer=True)
    state = state_of_stage(restored, 0)
    averages = {name: tensor for name, tensor in state.items() if name.startswith("ema/")}
    assert averages
    for name, tensor in averages.items():
        assert torch.equal(tensor, state[name.replace("ema/", "model/", 1)]), name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            "model.normal_cells=6",
            r"resume=run: step_\d+ is of another model \(not in it: cell_03, .*; only in it: none\)",
        ),
        ("model.filters=8", r"\S+ needs shape \(.*\), the checkpoint has shape \(.*\); give the model's settings"),
        ("dataset.num_classes=5", r"classifier\.\S+ needs shape \(5, .*\), the checkpoint has shape \(4, "),
    ],
)
def test_another_model_is_refused_by_what_differs(settings: str, message: str, run: Path) -> None:
    checkpoint = find_checkpoint(run, "last", "run")
    with pytest.raises(ValueError, match=message) as caught:
        restore(engine("partitions=1", settings), checkpoint, "resume=run", optimizer=True)
    assert str(caught.value).startswith("resume=run: ")
    assert "\n" not in str(caught.value)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    train_here(configure(*SETTINGS, "partitions=1"), tmp_path)
    checkpoint = find_checkpoint(tmp_path, "last", "run")
    file = checkpoint / "stage_0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 64
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"stage_0.safetensors: damaged"):
        restore(engine("partitions=1"), checkpoint, "resume=run", optimizer=True)
