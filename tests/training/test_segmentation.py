"""A U-Net learns the masks of images: long skips over any cut, and the metrics of pixels."""

from pathlib import Path

import pytest
from training_runs import TINY, assert_same_tensors, command, configure, final_tensors, train_here

from gpipe_cli.results.files import read_result

SETTINGS = [
    *TINY[3:], "model=unet", "model.depth=2", "model.num_convs=1", "model.base_channels=4", "model.dropout=0.2",
    "dataset.num_classes=3", "epochs=2", "ema_decay=0.9", "gradient_clipping=0.5", "label_smoothing=0.1",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train_here(configure(*SETTINGS, "partitions=1", "schedule=1f1b"), folder)
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        ("schedule=interleaved", "partitions=4", "executor=distributed", "stages_per_process=2"),
        ("schedule=zero_bubble", "partitions=5", "executor=in_process", "recompute=always"),
    ],
    ids=lambda settings: settings[0],
)
def test_the_cut_does_not_matter(settings: tuple[str, ...], whole: Path, tmp_path: Path) -> None:
    """Checkpoints are bit-identical, however many stages a skip jumps over."""
    assert command("train", *SETTINGS, *settings, f"run_folder={tmp_path / 'run'}") == 0
    assert_same_tensors(final_tensors(tmp_path / "run"), final_tensors(whole))


def test_accuracy_of_pixels_rises(tmp_path: Path) -> None:
    """With two classes 73 % of the pixels are background: more than that is learnt."""
    given = ["dataset.num_classes=2", "dataset.train_samples=64", "epochs=6", "learning_rate.peak=0.01", "ema_decay=0"]
    assert command("train", *SETTINGS, *given, "partitions=1", f"run_folder={tmp_path / 'run'}") == 0
    result = read_result(tmp_path / "run")
    assert (result["task"], result["test"]["top5"]) == ("segmentation", None)
    assert 0.85 < result["test"]["top1"] <= 1
    assert result["test"]["loss"] < 0.4


def test_an_exported_unet_gives_the_run_s_logits(whole: Path, tmp_path: Path) -> None:
    """`gpipe export` evaluates the file, and compares its loss with the run's."""
    pytest.importorskip("onnxruntime")
    assert command("export", f"run={whole}", "format=onnx", f"file={tmp_path / 'model.onnx'}") == 0
