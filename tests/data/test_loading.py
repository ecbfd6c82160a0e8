"""Loading: the same batches from any number of workers and any starting point; nothing left behind."""

import errno
import multiprocessing
import multiprocessing.synchronize
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from image_files import EVERYTHING, opened, write_images

from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.images import ImageSplit
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.data.text import SyntheticText
from gpipe_cli.errors import InputError


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
    early.close()
    assert multiprocessing.active_children() == []
    assert next(early, None) is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of torch's loader, half made
def test_shared_memory_without_room_for_a_semaphore_is_named_with_the_setting(
    train: ImageSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container with 64 KiB at /dev/shm the line was "No space left on device"."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(multiprocessing.synchronize._multiprocessing, "SemLock", full)
    with pytest.raises(InputError, match=r"^data_workers=2: .*/dev/shm.* data_workers=0$"):
        LoadedBatches(train, MiniBatches(train.catalogue, batch_size=4, seed=1, shuffle=True), 0, 0, 3, workers=2)


def test_shared_memory_without_room_for_a_batch_is_not_needed(
    train: ImageSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1 MiB at /dev/shm, a training failed at its first step, or at the first large batch."""

    def full(*_: object) -> None:
        raise RuntimeError("No space left on device")

    mini_batches = MiniBatches(train.catalogue, batch_size=4, seed=1, shuffle=True)
    whole = list(LoadedBatches(train, mini_batches, 0, 0, 3, workers=0))
    for name in ("share_memory_", "untyped_storage"):
        monkeypatch.setattr(torch.Tensor, name, full)  # the loader shares storages
    assert_same(LoadedBatches(train, mini_batches, 0, 0, 3, workers=1), whole)


def test_broken_image_reaches_the_consumer_as_one_line(train: ImageSplit, tmp_path: Path) -> None:
    path = tmp_path / "train/b/3.jpg"
    path.write_bytes(path.read_bytes()[:200])
    mini_batches = MiniBatches(train.catalogue, batch_size=2, seed=1, shuffle=False)  # it is sample 8, so in batch 4
    batches = LoadedBatches(train, mini_batches, 0, 0, 1, workers=2)
    for _ in range(4):
        next(batches)
    with pytest.raises(InputError, match=r"^image file '[^\n]*train/b/3\.jpg': cannot be read [^\n]*$"):
        next(batches)
    assert multiprocessing.active_children() == []


def consume(out: int) -> None:
    """A process of its own session that loads by two workers; the pipe `out` ends when all of them have gone."""
    os.setsid()
    os.dup2(out, 2)
    sys.stderr = os.fdopen(out, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    train = SyntheticText(samples=64, length=8, vocabulary_size=9, seed=0, pairs=False)
    mini_batches = MiniBatches(train.catalogue, batch_size=4, seed=0, shuffle=True)
    batches = LoadedBatches(train, mini_batches, 0, 0, 10**6, workers=2)
    next(batches), next(batches)  # one of each worker: both are set up
    print("loading", file=sys.stderr)
    time.sleep(600)


@pytest.mark.parametrize(("kill", "number", "tracebacks"), [(os.kill, 9, 0), (os.killpg, signal.SIGINT, 1)])
def test_a_killed_consumer_leaves_no_process_behind(
    kill: Callable[[int, int], None], number: int, tracebacks: int
) -> None:
    """Ctrl-C in a terminal reaches every process of the group; only the consumer says so."""
    read, write = os.pipe()
    consumer = multiprocessing.get_context("fork").Process(target=consume, args=(write,))
    consumer.start()
    os.close(write)
    with os.fdopen(read) as text:
        assert text.readline() == "loading\n"
        assert consumer.pid is not None
        kill(consumer.pid, number)
        assert text.read().count("Traceback") == tracebacks
    consumer.join()
