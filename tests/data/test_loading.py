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
from training_runs import SMALL, assert_same_tensors, configure, final_tensors, train_here

from gpipe_cli.assembly.build import open_data
from gpipe_cli.data.batches import MiniBatches, Split
from gpipe_cli.data.images import ImageSplit
from gpipe_cli.data.loading import PrefetchedBatches, UnreadableError, batch_requests
from gpipe_cli.data.text import SyntheticText
from gpipe_cli.errors import InputError
from gpipe_cli.planner.process_layout import layout_of
from gpipe_cli.schedule.schedule import Action, Kind
from gpipe_cli.training import data_feed

FOLDERS = [
    *(setting for setting in SMALL if not setting.startswith(("dataset", "batch_size", "micro_batches"))),
    "dataset=image_folder", "dataset.image_size=16", "dataset.num_classes=4", "batch_size=4", "micro_batches=2",
    "epochs=2", "partitions=1", "executor=in_process",
]  # fmt: skip


@pytest.fixture
def train(tmp_path: Path) -> ImageSplit:
    """Two classes with 5 + 6 images."""
    training = [*(f"train/a/{n}.png" for n in range(5)), *(f"train/b/{n}.jpg" for n in range(6))]
    write_images(tmp_path, *training, "test/a/0.png", "test/b/0.png")
    return opened("image_folder", tmp_path, seed=3, image_size=12, num_classes=2, augmentation=EVERYTHING)[0]


def loaded(
    train: Split, mini_batches: MiniBatches, epoch: int, position: int, epochs: int, *, workers: int
) -> PrefetchedBatches:
    """All mini-batches of a training from there on."""
    order = batch_requests("training", mini_batches, mini_batches.stream(epoch, position, epochs))
    return PrefetchedBatches({"training": train}, order, workers)


def assert_same(found: Iterable[tuple[torch.Tensor]], expected: list[tuple[torch.Tensor]]) -> None:
    torch.testing.assert_close(list(found), expected, rtol=0, atol=0)


def test_workers_change_nothing_and_end_with_the_run_or_before(train: ImageSplit) -> None:
    mini_batches = MiniBatches(train.split_index, batch_size=4, seed=1, shuffle=True)
    state = torch.get_rng_state()
    whole = list(loaded(train, mini_batches, 0, 0, 3, workers=0))
    assert [tuple(images.shape) for (images,) in whole[:3]] == [(n, 3, 12, 12) for n in (4, 4, 3)]
    for (images,), (epoch, position) in zip(whole, mini_batches.stream(0, 0, 3), strict=True):
        indices = mini_batches.indices(epoch, position).tolist()
        assert torch.equal(images, torch.stack([train[epoch, index] for index in indices]))
    batches = loaded(train, mini_batches, 0, 0, 3, workers=2)
    assert len(multiprocessing.active_children()) == 2
    assert_same(batches, whole)
    assert multiprocessing.active_children() == []
    assert next(batches, None) is None
    assert torch.equal(torch.get_rng_state(), state)
    for workers in (0, 1):  # a resumed stream is the tail of the whole
        assert_same(loaded(train, mini_batches, 1, 2, 3, workers=workers), whole[5:])
    early = loaded(train, mini_batches, 0, 0, 1000, workers=2)
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
        loaded(train, MiniBatches(train.split_index, batch_size=4, seed=1, shuffle=True), 0, 0, 3, workers=2)


def test_shared_memory_without_room_for_a_batch_is_not_needed(
    train: ImageSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1 MiB at /dev/shm, a training failed at its first step, or at the first large batch."""

    def full(*_: object) -> None:
        raise RuntimeError("No space left on device")

    mini_batches = MiniBatches(train.split_index, batch_size=4, seed=1, shuffle=True)
    whole = list(loaded(train, mini_batches, 0, 0, 3, workers=0))
    for name in ("share_memory_", "untyped_storage"):
        monkeypatch.setattr(torch.Tensor, name, full)  # the loader shares storages
    assert_same(loaded(train, mini_batches, 0, 0, 3, workers=1), whole)


def test_broken_image_reaches_the_consumer_as_one_line(train: ImageSplit, tmp_path: Path) -> None:
    path = tmp_path / "train/b/3.jpg"
    path.write_bytes(path.read_bytes()[:200])
    mini_batches = MiniBatches(train.split_index, batch_size=2, seed=1, shuffle=False)  # it is sample 8, so in batch 4
    batches = loaded(train, mini_batches, 0, 0, 1, workers=2)
    for _ in range(4):
        next(batches)
    with pytest.raises(InputError, match=r"^image file '[^\n]*train/b/3\.jpg': cannot be read [^\n]*$"):
        next(batches)
    assert multiprocessing.active_children() == []


def test_a_batch_that_cannot_be_read_is_known_one_ahead(train: ImageSplit, tmp_path: Path) -> None:
    """So that all processes of a training can stop before it; an evaluation continues with zeros."""
    path = tmp_path / "train/b/3.jpg"
    path.write_bytes(path.read_bytes()[:200])
    mini_batches = MiniBatches(train.split_index, batch_size=2, seed=1, shuffle=False)
    for gives_zeros, error in ((False, InputError), (True, UnreadableError)):
        batches = loaded(train, mini_batches, 0, 0, 1, workers=0)
        batches.gives_zeros = gives_zeros
        for position in range(4):
            assert batches.unreadable == ""
            (images,) = batches.take(train, 0, position, 2)
        assert "train/b/3.jpg" in batches.unreadable
        first = loaded(train, mini_batches, 0, 4, 1, workers=0)
        first.gives_zeros = gives_zeros
        with pytest.raises(error, match=r"train/b/3\.jpg"):
            first.take(train, 0, 4, 2)
    (zeros,) = batches.take(train, 0, 4, 1)
    assert (zeros.shape, zeros.dtype, int(zeros.count_nonzero())) == ((1, *images.shape[1:]), images.dtype, 0)


def consume(out: int) -> None:
    """A process in a separate session that loads with two workers; the pipe `out` ends when all of them have ended."""
    os.setsid()
    os.dup2(out, 2)
    sys.stderr = os.fdopen(out, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where the tests run in the background
    train = SyntheticText(samples=64, length=8, vocabulary_size=9, seed=0, pairs=False)
    mini_batches = MiniBatches(train.split_index, batch_size=4, seed=0, shuffle=True)
    batches = loaded(train, mini_batches, 0, 0, 10**6, workers=2)
    next(batches), next(batches)  # one of each worker: both are set up
    print("loading", file=sys.stderr)
    time.sleep(600)


@pytest.mark.parametrize(("kill", "number", "tracebacks"), [(os.kill, 9, 0), (os.killpg, signal.SIGINT, 1)])
def test_a_killed_consumer_leaves_no_process_behind(
    kill: Callable[[int, int], None], number: int, tracebacks: int
) -> None:
    """Ctrl-C in a terminal reaches every process of the group; only the consumer reports it."""
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


def test_a_run_prepares_only_what_it_reads_next_and_what_fits_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training set and the test set had eight processes each, and each of them two whole mini-batches of float32,
    from the first second on: with ImageNet's recipe 22.6 GB of /dev/shm. Neither their number nor the way in which
    pixels travel changes a bit."""
    training = [f"train/{name}/{number}.png" for name in "abcd" for number in range(6)]
    write_images(tmp_path, *training, *(f"test/{name}/{number}.png" for name in "abcd" for number in range(2)))
    log, inputs = tmp_path / "log", ImageSplit.inputs

    def logged(split: ImageSplit, epoch: int, indices: list[int], lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        if multiprocessing.parent_process() is not None:
            with log.open("a") as file:  # a line is one write
                file.write("test\n" if split.seed is None else "training\n")
        return inputs(split, epoch, indices, lengths)

    def ran(data_workers: int, *settings: str, only_steps: bool = False) -> Path:
        folder = tmp_path / f"{data_workers}{only_steps}"
        config = configure(*FOLDERS, f"dataset.root={tmp_path}", f"data_workers={data_workers}", *settings)
        read = 0
        log.write_text("")

        def on_action(action: Action, samples: int, lengths: object) -> None:
            nonlocal read
            if action == Action(Kind.F, 0, 0):  # of a step or an evaluation
                read += 1
                loaded = log.read_text().split()
                if data_workers:
                    # none once the last batch is loaded
                    assert len(multiprocessing.active_children()) in ((2,) if read == 1 else (0, 2))
                    assert len(loaded) <= read + 3
                assert "test" not in loaded or read + 3 > 6, "the first epoch has six steps"

        train_here(config, folder, on_action, only_steps=only_steps)
        return folder

    batch_bytes = 4 * 3 * 16 * 16  # an 8-bit value of each colour
    monkeypatch.setattr(ImageSplit, "inputs", logged)
    monkeypatch.setattr(data_feed, "usable_memory_bytes", lambda: 4 * 2 * batch_bytes)
    whole = final_tensors(ran(0))
    assert_same_tensors(final_tensors(ran(8)), whole)
    assert log.read_text().split().count("test") == 2 * 2, "two mini-batches in each of two evaluations"
    ran(3, only_steps=True)
    assert "test" not in log.read_text().split()


@pytest.mark.parametrize(
    ("memory", "shared", "settings", "expected"),
    [
        (2**40, 2**40, "", (8, 2)),
        (2**40, 2**40, "data_workers=0", (0, 0)),
        (2**40, 2**40, "replicas=2", (4, 2)),  # eight cores
        (4 * 12, 2**40, "", (8, 1)),  # a quarter holds twelve mini-batches
        (2**40, 12, "data_workers=5", (5, 2)),
        (4 * 12, 2**40, "replicas=2 data_workers=64", (12, 1)),  # each has a half of every mini-batch
        (4 * 3, 2**40, "", (3, 1)),
        (0, 2**40, "", (1, 1)),
    ],
)
def test_loaders_share_the_cores_and_a_quarter_of_the_memory(
    memory: int, shared: int, settings: str, expected: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_images(tmp_path, *(f"{split}/{name}/0.png" for split in ("train", "test") for name in "abcd"))
    config = configure(*FOLDERS, f"dataset.root={tmp_path}", "data_workers=null", *settings.split())
    batch_bytes = 4 * 3 * 16 * 16
    monkeypatch.setattr(data_feed, "usable_cores", lambda: 8)
    monkeypatch.setattr(data_feed, "usable_memory_bytes", lambda: memory * batch_bytes)
    monkeypatch.setattr(data_feed, "free_shared_memory_bytes", lambda: shared * batch_bytes)
    assert data_feed.choose_loaders(config, layout_of(config), open_data(config).training) == expected
