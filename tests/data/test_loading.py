"""Loading: the same batches from any number of workers and any starting point; nothing left behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gpipe_cli.data.augmentation import Augmentation
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.images import ImageSplit, open_images
from gpipe_cli.data.loading import default_workers, load_batches

EVERYTHING = Augmentation(random_resized_crop=(0.2, 1.0), horizontal_flip=True, cutout=3, shift=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, 5 + 6 training images and one test image each."""
    rng = np.random.default_rng(0)
    training = [*(f"train/a/{n}.png" for n in range(5)), *(f"train/b/{n}.jpg" for n in range(6))]
    for place in [*training, "test/a/0.png", "test/b/0.png"]:
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (24, 30, 3), dtype=np.uint8)).save(path)
    return tmp_path


def open_folder(root: Path) -> tuple[ImageSplit, ImageSplit]:
    return open_images("image_folder", root=root, image_size=12, num_classes=2, seed=3, augmentation=EVERYTHING)


def same(one: list[tuple[torch.Tensor, ...]], other: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for (a,), (b,) in zip(one, other, strict=True))


def test_batches_are_the_samples_of_the_mini_batches(folder: Path) -> None:
    train, _ = open_folder(folder)
    mini_batches = MiniBatches(len(train), 4, seed=1, shuffle=True)
    loaded = list(load_batches(train, mini_batches, 0, 0, 2, workers=0))
    assert [tuple(images.shape) for (images,) in loaded] == [
        (n, 3, 12, 12) for n in (4, 4, 3, 4, 4, 3)
    ]  # short last ones
    for (images,), (epoch, position) in zip(loaded, mini_batches.stream(0, 0, 2), strict=True):
        for image, index in zip(images, mini_batches.indices(epoch, position).tolist(), strict=True):
            assert torch.equal(image, train[epoch, index])


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing_and_end_with_the_run(folder: Path, workers: int) -> None:
    train, _ = open_folder(folder)
    mini_batches = MiniBatches(len(train), 4, seed=1, shuffle=True)
    state = torch.get_rng_state()
    expected = list(load_batches(train, mini_batches, 0, 0, 3, workers=0))
    batches = load_batches(train, mini_batches, 0, 0, 3, workers=workers)
    assert len(multiprocessing.active_children()) == workers
    assert same(list(batches), expected)
    assert multiprocessing.active_children() == []
    assert next(batches, None) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_stream_is_the_tail_of_the_whole(folder: Path, workers: int) -> None:
    train, _ = open_folder(folder)
    whole = list(load_batches(train, MiniBatches(len(train), 4, seed=1, shuffle=True), 0, 0, 3, workers=0))
    resumed = MiniBatches(len(train), 4, seed=1, shuffle=True)
    assert same(list(load_batches(train, resumed, 1, 2, 3, workers=workers)), whole[5:])


def test_evaluation_is_one_pass_in_order() -> None:
    _, test = open_images("digits", image_size=8, num_classes=10, seed=0, augmentation=EVERYTHING)
    mini_batches = MiniBatches(len(test), 100, seed=0, shuffle=False)
    with load_batches(test, mini_batches, 0, 0, 1, workers=1) as batches:
        images = torch.cat([images for (images,) in batches])
    torch.testing.assert_close(images, test.source.images * 2 - 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_image_reaches_the_consumer_as_one_line(folder: Path, workers: int) -> None:
    path = folder / "train/b/3.jpg"
    path.write_bytes(path.read_bytes()[:200])
    train, _ = open_folder(folder)
    mini_batches = MiniBatches(len(train), 2, seed=0, shuffle=False)  # the file is sample 8, so in batch 4
    batches = load_batches(train, mini_batches, 0, 0, 1, workers=workers)
    for _ in range(4):
        (images,) = next(batches)
        assert images.shape == (2, 3, 12, 12)
    with pytest.raises(ValueError, match=r"^image file '[^\n]*train/b/3\.jpg': cannot be read [^\n]*$"):
        next(batches)
    assert multiprocessing.active_children() == []


def test_closing_early_ends_the_workers(folder: Path) -> None:
    train, _ = open_folder(folder)
    mini_batches = MiniBatches(len(train), 1, seed=0, shuffle=True)
    with load_batches(train, mini_batches, 0, 0, 1000, workers=2) as batches:
        next(batches)
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)


def test_a_worker_that_dies_is_an_error_not_a_wait(folder: Path) -> None:
    train, _ = open_folder(folder)
    mini_batches = MiniBatches(len(train), 1, seed=0, shuffle=True)
    with load_batches(train, mini_batches, 0, 0, 10**6, workers=1) as batches:
        next(batches)
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=r"worker|data loading process died"):
            for _ in batches:
                pass


CONSUMER = """
import sys, time
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.images import open_images
from gpipe_cli.data.loading import load_batches

if __name__ == "__main__":
    train, _ = open_images("synthetic_images", image_size=8, num_classes=2, seed=0, train_samples=64, test_samples=1)
    batches = load_batches(train, MiniBatches(64, 4, 0, True), 0, 0, 10**6, workers=2)
    next(batches), next(batches)  # one of each worker: both have settled
    print("loading", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_consumer_leaves_no_process_behind(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "consumer.py"
    script.write_text(CONSUMER)
    # Workers, fork server and resource tracker inherit the pipe, so it ends when the last of them has gone.
    consumer = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert consumer.stdout is not None
    try:
        assert consumer.stdout.readline() == "loading\n"
        if number == signal.SIGINT:
            os.killpg(consumer.pid, number)  # as a terminal does: to every process of the group
        else:
            consumer.send_signal(number)
        _, errors = consumer.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(consumer.pid, signal.SIGKILL)
    # 1: Python forgets that it was interrupted where a library runs code of its own at the exit
    assert consumer.returncode in ((-number, 1) if number == signal.SIGINT else (-number,))
    assert errors.count("Traceback") == (1 if number == signal.SIGINT else 0), errors  # the consumer's own, no worker's


def test_default_workers() -> None:
    assert [default_workers("image_folder", cores) for cores in (1, 2, 8, 64)] == [1, 2, 8, 8]
    assert {default_workers(name, 64) for name in ("digits", "cifar10", "cifar100", "synthetic_images")} == {1}


def test_negative_workers_are_refused(folder: Path) -> None:
    train, _ = open_folder(folder)
    with pytest.raises(ValueError, match=r"^data_workers=-1: "):
        load_batches(train, MiniBatches(len(train), 4, 0, True), 0, 0, 1, workers=-1)
