"""Loading overlapped with the step: workers decode and augment the next mini-batches while the pipeline computes.

The paper's throughput assumes that the accelerators never wait for images. One DataLoader serves the whole run, across
epochs: a loader per epoch would empty its queue at every border and the first step of each epoch would wait.

Workers are forked, which takes milliseconds: where the process has neither threads nor connections nor a CUDA context
yet. Gloo's threads may hold locks, and an open CUDA context does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpipe_cli.data.batches import Batches, Key, Split
from gpipe_cli.data.photographs import DECODED
from gpipe_cli.system.parent_death import end_with_parent

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LoadedBatches", "default_workers", "load_batches"]


Keys = tuple[list[Key], tuple[int, ...]]


def default_workers(name: str, cores: int) -> int:
    """How many loader processes suit the data set `name` on a machine with `cores` cores.

    Decoding files is the work of several cores at full speed; 8 is where more rarely helps one accelerator's host.
    Images in memory need one process, enough to overlap with the step.
    """
    return max(1, min(cores, 8)) if name in DECODED else 1


def load_batches(
    split: Split,
    mini_batches: Batches,
    start_epoch: int,
    start_position: int,
    epochs: int,
    workers: int,
    pin_memory: bool = False,
) -> LoadedBatches:
    """Start loading the mini-batches of `mini_batches.stream(start_epoch, start_position, epochs)`, in that order.

    workers: processes, forked here; 0 loads in this process, each batch when it is asked for. pin_memory: page-locked
    batches, for asynchronous copies to a GPU. An evaluation is one epoch of mini-batches that are not shuffled.

    Raises ValueError for a negative number of workers.
    """
    if workers < 0:
        raise ValueError(f"data_workers={workers}: must be 0 (load in the training process) or more")
    assert mini_batches.samples == len(split), (mini_batches.samples, len(split))
    return LoadedBatches(split, _Keys(mini_batches, start_epoch, start_position, epochs), workers, pin_memory)


class LoadedBatches:
    """Iterator over what the first stage is given, a tuple of (N, ...) each.

    Close it, or use it as a context manager, to end its workers.

    `next` raises ValueError, in one line that names the file, where an image cannot be read; loading then has ended.
    """

    def __init__(self, split: Split, keys: Iterable[Keys], workers: int, pin_memory: bool) -> None:
        import torch
        from torch.utils.data import DataLoader

        loader: DataLoader[Any] = DataLoader(
            _Batches(split),  # type: ignore[arg-type]  # any object with __getitem__ is a map-style data set
            batch_size=None,  # a key stands for a whole mini-batch
            sampler=keys,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=_settle_worker,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # otherwise the loader draws a number from the run's default generator
        )
        # torch's handler of SIGCHLD raises that a worker died wherever this process is, be it in a step; without it
        # that is found out where a batch is asked for.
        before = signal.getsignal(signal.SIGCHLD)
        self._batches: Iterator[Any] | None = iter(loader)
        signal.signal(signal.SIGCHLD, before)
        self._peeked: tuple[Tensor, ...] | None = None

    def __iter__(self) -> LoadedBatches:
        return self

    def peek(self) -> tuple[Tensor, ...]:
        """What `next` will return."""
        self._peeked = next(self)
        return self._peeked

    def __next__(self) -> tuple[Tensor, ...]:
        if self._peeked is not None:
            batch, self._peeked = self._peeked, None
            return batch
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except BaseException as error:  # the end, a worker that died, Ctrl-C: in any case nothing more comes
            died = any(worker.exitcode for worker in getattr(self._batches, "_workers", ()))
            self.close()
            if died or isinstance(error, ConnectionError | EOFError):  # perhaps with a batch half handed over
                text = "a data loading process died; is the machine out of memory or shared memory?"
                raise RuntimeError(text) from error
            raise
        if isinstance(batch, _Unreadable):
            self.close()
            raise ValueError(batch.message)
        return tuple(batch)

    def close(self) -> None:
        """End the workers and wait for them; harmless when repeated."""
        batches, self._batches = self._batches, None
        # The last reference would do it too, but a traceback may hold one for as long as it lives.
        shut_down = getattr(batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
            for worker in batches._workers:  # type: ignore[union-attr]  # of the same iterator
                worker.kill()  # one that is stopped has heard nothing

    def __enter__(self) -> LoadedBatches:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class _Keys:
    """The (epoch, index) keys of each mini-batch and what it is padded to, up to the end of the run."""

    mini_batches: Batches
    start_epoch: int
    start_position: int
    epochs: int

    def __iter__(self) -> Iterator[Keys]:
        for epoch, position in self.mini_batches.stream(self.start_epoch, self.start_position, self.epochs):
            keys = [(epoch, index) for index in self.mini_batches.indices(epoch, position).tolist()]
            yield keys, self.mini_batches.lengths(epoch, position)


@dataclass(frozen=True)
class _Unreadable:
    """Travels in place of a batch: an exception raised in a worker would arrive as the text of its traceback."""

    message: str


@dataclass(frozen=True, eq=False)
class _Batches:
    """The data set as the DataLoader sees it: a list of keys in, a mini-batch out."""

    split: Split

    def __getitem__(self, keys: Keys) -> tuple[Tensor, ...] | _Unreadable:
        try:
            return self.split.inputs(*keys)
        except ValueError as error:
            return _Unreadable(str(error))


def _settle_worker(worker: int) -> None:
    """In each worker, before its first batch: one thread, deaf to Ctrl-C, gone when the process it serves is gone."""
    import torch

    torch.set_num_threads(1)  # the cores belong to the workers' number and to the pipeline
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process it serves hears it too, and ends its workers
    sys.excepthook = _quiet_about_lost_connections
    served = multiprocessing.parent_process()
    assert served is not None
    assert served.pid is not None
    end_with_parent(served.pid)


def _quiet_about_lost_connections(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """A batch that was on its way when the trainer was interrupted is nothing to tell of, over its summary."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
