"""Batch norm cannot train on a micro-batch of one sample: what is refused, by whom, and a remedy that works."""

import re
from pathlib import Path

import pytest
from training_runs import command, configure, of_type, train_here

from gpipe_cli.planner.model_profile import check_single_samples
from gpipe_cli.training.events import StepDone

DATA = [
    "dataset=synthetic_images", "dataset.image_size=8", "dataset.num_classes=4", "dataset.test_samples=4",
    "data_workers=0", "threads=1", "device=cpu",
]  # fmt: skip
VECTORS = [*DATA, "model=custom", "model.target=custom_models:normalizes_vectors"]


def test_a_dry_run_and_a_training_refuse_the_same_short_last_mini_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run used to accept it, and the training's advice, fewer micro_batches, could not help one sample."""
    settings = [*VECTORS, "epochs=1", "batch_size=8", "micro_batches=2", "partitions=1"]
    for samples, more in ((9, "dry_run=true"), (9, "dry_run=false"), (11, "dry_run=true")):
        assert command("train", *settings, f"dataset.train_samples={samples}", more, f"run_folder={tmp_path}/run") == 2
        line = capsys.readouterr().err.strip()
        assert line.startswith("gpipe train: dataset.drop_last=false: ")
        also = ", or micro_batches=1 " if samples == 11 else "$"
        assert re.search(f"use dataset.drop_last=true{also}", line)
    remedied = configure(*settings, "dataset.train_samples=9", "dataset.drop_last=true", "executor=in_process")
    steps = of_type(train_here(remedied, tmp_path / "remedied"), StepDone)
    assert [step.samples for step in steps] == [8]


def test_every_command_refuses_a_full_mini_batch_of_single_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*VECTORS, "dataset.train_samples=16", "batch_size=5", "micro_batches=4", f"output={tmp_path}"]
    for name in ("plan", "train", "check"):
        assert command(name, *settings) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"gpipe {name}: micro_batches=4: ")
        assert "use batch_size=8 or more, or micro_batches=2 or fewer" in line
    check_single_samples(configure(*settings, "micro_batches=2"), 5)
    check_single_samples(configure(*settings), 8)
    check_single_samples(configure(*DATA, "model.filters=4"), 4)  # whose maps are larger than a pixel
