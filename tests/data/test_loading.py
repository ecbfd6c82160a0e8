"""Loading: the same batches from any number of workers and any starting point; nothing left behind."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from image_files import EVERYTHING, opened, write_images
from training_runs import configure

from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.images import ImageSplit
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.errors import InputError
from gpipe_cli.training.data_feed import workers_of


@pytest.fixture
def train(tmp_path: Path) -> ImageSplit:
    """Two classes with 5 + 6 images."""
    training = [*(f"train/a/{n}.png" for n in range(5)), *(f"train/b/{n}.jpg" for n in range(6))]
    write_images(tmp_path, *training, "test/a/0.png", "test/b/0.png")
    return opened("image_folder", tmp_path, seed=3, image_size=12, num_classes=2, augmentation=EVERYTHING)[0]


def assert_same(found: Iterable[tuple[torch.Tensor]], expected: list[tuple[torch.Tensor]]) -> None:
    torch.testing.assert_close(list(found), expected, rtol=0, atol=0)


def test_workers_change_nothing_and_end_with_the_run_or_before(train: ImageSplit) -> None:
    mini_batches = MiniBatches(train.catalogue, batch_size=4, seed=1, shuffle=True)
    state = torch.get_rng_state()
    whole = list(LoadedBatches(train, mini_batches, 0, 0, 3, workers=0))
    assert [tuple(images.shape) for (images,) in whole[:3]] == [(n, 3, 12, 12) for n in (4, 4, 3)]
    for (images,), (epoch, position) in zip(whole, mini_batches.stream(0, 0, 3), strict=True):
        indices = mini_batches.indices(epoch, position).tolist()
        assert torch.equal(images, torch.stack([train[epoch, index] for index in indices]))
    batches = LoadedBatches(train, mini_batches, 0, 0, 3, workers=2)
    assert len(multiprocessing.active_children()) == 2
    assert_same(batches, whole)
    assert multiprocessing.active_children() == []
    assert next(batches, None) is None
    assert torch.equal(torch.get_rng_state(), state)
    for workers in (0, 1):  # a resumed stream is the tail of the whole
        assert_same(LoadedBatches(train, mini_batches, 1, 2, 3, workers=workers), whole[5:])
    early = LoadedBatches(train, mini_batches, 0, 0, 1000, workers=2)
    next(early)
    for _ in range(2):
        early.close()
        assert multiprocessing.active_children() == []
    assert next(early, None) is None


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_image_reaches_the_consumer_as_one_line(train: ImageSplit, tmp_path: Path, workers: int) -> None:
    path = tmp_path / "train/b/3.jpg"
    path.write_bytes(path.read_bytes()[:200])
    mini_batches = MiniBatches(train.catalogue, batch_size=2, seed=1, shuffle=False)  # it is sample 8, so in batch 4
    batches = LoadedBatches(train, mini_batches, 0, 0, 1, workers=workers)
    for _ in range(4):
        (images,) = next(batches)
        assert images.shape == (2, 3, 12, 12)
    with pytest.raises(InputError, match=r"^image file '[^\n]*train/b/3\.jpg': cannot be read [^\n]*$"):
        next(batches)
    assert multiprocessing.active_children() == []


CONSUMER = """
import signal, sys, time
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.training.data_feed import workers_of
from gpipe_cli.data.text import SyntheticText

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    train = SyntheticText(samples=64, length=8, vocabulary_size=9, seed=0, pairs=False)
    mini_batches = MiniBatches(train.catalogue, batch_size=4, seed=0, shuffle=True)
    batches = LoadedBatches(train, mini_batches, 0, 0, 10**6, workers=2)
    next(batches), next(batches)  # one of each worker: both are set up
    print("loading", flush=True)
    time.sleep(600)
"""


def test_a_killed_consumer_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "consumer.py"
    script.write_text(CONSUMER)
    # Workers, fork server and resource tracker inherit the pipes, so they end when the last of them has gone.
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    consumers = [subprocess.Popen([sys.executable, str(script)], **pipes, start_new_session=True) for _ in range(2)]
    try:
        assert [consumer.stdout.readline() for consumer in consumers] == ["loading\n"] * 2
        killed, interrupted = consumers
        killed.kill()
        os.killpg(interrupted.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        errors = [consumer.communicate(timeout=60)[1] for consumer in consumers]
    finally:
        for consumer in consumers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(consumer.pid, signal.SIGKILL)
    assert killed.returncode == -signal.SIGKILL
    # 1: Python forgets that it was interrupted where a library runs code of its own at the exit
    assert interrupted.returncode in (-signal.SIGINT, 1)
    assert [text.count("Traceback") for text in errors] == [0, 1], errors  # the interrupted one's own, no worker's


def test_decoding_files_has_several_workers_and_images_in_memory_one(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = configure("dataset=image_folder", "dataset.root=nowhere", "dataset.num_classes=2")
    for cores, workers in ((1, 1), (2, 2), (64, 8)):
        monkeypatch.setattr("gpipe_cli.training.data_feed.usable_cores", lambda cores=cores: cores)
        assert [workers_of(folders), workers_of(configure())] == [workers, 1]
