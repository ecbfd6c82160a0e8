"""A U-Net learns the masks of images: its metrics are over pixels, and it can be exported."""

from pathlib import Path

import numpy as np
import pytest
from image_files import write_image
from PIL import Image
from training_runs import TINY, command, configure, of_type, train_here

from gpipe_cli.assembly.build import open_data
from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.results.files import read_result
from gpipe_cli.training.data_feed import mini_batches
from gpipe_cli.training.events import Evaluated, StepDone

SETTINGS = [
    *TINY[3:], "model=unet", "model.depth=2", "model.num_convs=1", "model.base_channels=4", "model.dropout=0.2",
    "dataset.num_classes=3", "epochs=2", "ema_decay=0.9", "gradient_clipping=0.5", "label_smoothing=0.1",
]  # fmt: skip


def test_accuracy_of_pixels_rises(tmp_path: Path) -> None:
    """With two classes 73 % of the pixels are background: more than that is learnt."""
    given = ["dataset.num_classes=2", "dataset.train_samples=64", "epochs=6", "learning_rate.peak=0.01", "ema_decay=0"]
    assert command("train", *SETTINGS, *given, "partitions=1", f"run_folder={tmp_path / 'run'}") == 0
    result = read_result(tmp_path / "run")
    assert (result["task"], result["test"]["top5"]) == ("segmentation", None)
    assert 0.85 < result["test"]["top1"] <= 1
    assert result["test"]["loss"] < 0.4


def test_an_exported_unet_gives_the_run_s_logits(tmp_path: Path) -> None:
    """`gpipe export` evaluates the file, and compares its loss with the run's."""
    pytest.importorskip("onnxruntime")
    train_here(configure(*SETTINGS, "partitions=1"), tmp_path / "run")
    assert command("export", f"run={tmp_path / 'run'}", "format=onnx", f"file={tmp_path / 'model.onnx'}") == 0


def test_void_masks_count_as_zero_and_means_are_over_pixels(tmp_path: Path) -> None:
    """Mini-batches, a replica's share and micro-batches without a pixel to predict, in training and test: the first was
    said to have diverged. Means of an epoch are over pixels; they were over images."""
    void = {"train": {0, 1, 2, 3, 4}, "test": {0, 1, 3}}
    for split in void:
        for index in range(8):
            mask = np.random.default_rng(index).integers(0, 3, (16, 16), dtype=np.uint8)
            mask[: 2 * index if index not in void[split] else 16] = 255
            write_image(tmp_path / split / "images" / f"{index}.png", size=(16, 16), seed=index)
            (tmp_path / split / "masks").mkdir(exist_ok=True)
            Image.fromarray(mask).save(tmp_path / split / "masks" / f"{index}.png")
    settings = [given for given in SETTINGS if not given.startswith(("dataset.train_samples", "dataset.test_samples"))]
    settings += ["dataset=image_masks", f"dataset.root={tmp_path}", "batch_size=2", "micro_batches=1"]
    config = configure(*settings, "partitions=1", "schedule=1f1b")
    messages = train_here(config, tmp_path / "one")
    split = open_data(config).training
    batches = mini_batches(config, split.split_index, training=True)
    steps = of_type(messages, StepDone)[:4]
    pixels = [int((split.targets_of(0, batches.indices(0, at), ()) != IGNORED).sum()) for at in range(4)]
    assert 0 in pixels, "no mini-batch is void"
    for step, count in zip(steps, pixels, strict=True):
        assert (step.loss == 0) == (step.gradient_norm == 0) == (count == 0)
    losses = sum(count * step.cross_entropy for step, count in zip(steps, pixels, strict=True))
    assert steps[-1].epoch_cross_entropy == pytest.approx(losses / sum(pixels))
    assert 0.5 < of_type(messages, Evaluated)[-1].scores.loss < 2
    two = ["replicas=2", "partitions=2", f"run_folder={tmp_path / 'two'}"]
    assert command("train", *settings, *two) == 0
