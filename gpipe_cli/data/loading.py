"""Loading overlapped with the step: workers decode and augment the next mini-batches while the pipeline computes.

The paper's throughput assumes that the accelerators never wait for images. One DataLoader serves the whole run, across
epochs and evaluations, in the order in which the run reads mini-batches: a loader for each epoch would start with an
empty queue, and its first step would wait; a loader for each split would hold batches that nothing reads for an epoch.

Workers are forked, which takes milliseconds, before the process has threads, connections or a CUDA context: Gloo's
threads may hold locks, and an open CUDA context does not survive a fork.
"""

import errno
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from gpipe_cli.data.batches import MiniBatches, Split
from gpipe_cli.data.splits import SplitName
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.system.forked_call import end_with_parent
from gpipe_cli.system.interrupts import STOP_SIGNALS

_WITHOUT_SHARED_MEMORY = "make it larger (docker run --shm-size=1g), or use data_workers=0"


class LoaderDiedError(RuntimeError):
    """A data loading process was killed."""


class UnreadableError(RuntimeError):
    """A mini-batch of a training that has begun cannot be read."""


class BatchRequest(NamedTuple):
    """Mini-batch `position` of `epoch` of a split, which a run will read: this replica's samples of it."""

    split: SplitName
    epoch: int
    position: int
    indices: list[int]
    lengths: tuple[int, ...]


def batch_requests(
    split: SplitName, batches: MiniBatches, places: Iterable[tuple[int, int]] | None = None
) -> Iterator[BatchRequest]:
    """The mini-batches at `places`, (epoch, position), of which this replica has samples; None: all of epoch 0."""
    for epoch, position in batches.stream(0, 0, 1) if places is None else places:
        if (shard := batches.shard(epoch, position)).sizes:
            indices = batches.indices(epoch, position)[shard.samples].tolist()
            yield BatchRequest(split, epoch, position, indices, batches.lengths(epoch, position))


class PrefetchedBatches:
    """Iterator over the first stage's inputs: a tuple of tensors (n, ...) for each mini-batch of which this replica has
    n > 0 samples. Loading ends when `next` raises InputError (unreadable image) or LoaderDiedError (dead worker)."""

    def __init__(
        self, splits: Mapping[SplitName, Split], order: Iterable[BatchRequest], workers: int, prefetch: int = 2
    ) -> None:
        """Start loading the mini-batches of `splits` in `order`.

        workers: number of processes, forked here; 0: this process loads each batch when it is requested. prefetch:
        number of mini-batches that each worker prepares before they are requested.
        """
        self._splits = splits
        self._requested: deque[BatchRequest] = deque()  # of workers, in the order of `order`
        self._current: BatchRequest | None = None  # what `next` has returned, or is to return after a `peek`
        # Without pin_memory=True: the loader would ask CUDA for GPUs before it forks, and pin in a thread that opens a
        # context on GPU 0 as long as this process has none on its own GPU. `accelerator.to_device` pins batches.
        loader: DataLoader[Any] = DataLoader(
            _Batches(self._splits),  # type: ignore[arg-type]  # any object with __getitem__ is a map-style data set
            batch_size=None,  # a key of the sampler stands for a whole mini-batch
            sampler=self._record_order(order),
            collate_fn=lambda batch: batch,  # torch's default would make tensors of arrays
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=partial(_set_up_worker, os.getpid()),
            generator=torch.Generator(),  # otherwise the loader draws a number from the run's default generator
        )
        # torch's SIGCHLD handler would raise the death of a worker anywhere, even within a step; without the handler
        # the next request for a batch raises it.
        earlier_handler = signal.getsignal(signal.SIGCHLD)
        try:
            self._batches: Any = iter(loader)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOMEM):  # no process can be forked
                raise
            why = f"these processes need semaphores in /dev/shm ({error.strerror}); {_WITHOUT_SHARED_MEMORY}"
            raise InvalidSettingError("data_workers", workers, why) from error
        signal.signal(signal.SIGCHLD, earlier_handler)
        for worker in getattr(self._batches, "_workers", ()):
            worker._popen.terminate = worker._popen.kill  # at an exit; a worker ignores SIGTERM
        self._peeked: tuple[Tensor, ...] | None = None
        self._forms: tuple[Tensor, ...] = ()  # of no samples, otherwise like the last batch taken
        self.unreadable = ""  # why the next batch cannot be read; "" if it can
        self.gives_zeros = False  # whether `take` is to return zeros instead of it
        self.gave_zeros = False

    def _record_order(self, order: Iterable[BatchRequest]) -> Iterator[BatchRequest]:
        for batch in order:
            self._requested.append(batch)
            yield batch

    def __iter__(self) -> Self:
        return self

    def take(self, split: Split | None, epoch: int, position: int, samples: int) -> tuple[Tensor, ...]:
        """The inputs of a mini-batch of `samples` samples, which must be the next in order: steps and evaluations share
        the loader. Raises InputError, in a training UnreadableError, if it cannot be read.

        The batch after it is loaded before this returns, so that other processes can be told in time that it is
        `unreadable`; if this `gives_zeros` instead of raising, an evaluation ends in all processes in the same way.
        """
        if self.unreadable and not self.gives_zeros:
            raise InputError(self.unreadable)
        if self.unreadable:
            self.gave_zeros = True
            return tuple(form.new_zeros(samples, *form.shape[1:]) for form in self._forms)
        try:
            batch = self.peek()
        except InputError as error:  # from the first batch
            raise (UnreadableError if self.gives_zeros else InputError)(str(error)) from error
        assert self._current is not None
        assert self._splits[self._current.split] is split, "another split is next"
        assert self._current[1:3] == (epoch, position), self._current[1:3]
        self._peeked = None
        self._forms = tuple(tensor.new_empty(0, *tensor.shape[1:]) for tensor in batch)
        try:
            self.peek()
        except StopIteration:  # it is the last batch
            pass
        except InputError as error:
            self.unreadable = str(error)
        return batch

    def peek(self) -> tuple[Tensor, ...]:
        """The batch that `next` will return; it is not consumed."""
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
        except BaseException as error:  # the end, a dead worker, Ctrl-C: no batch follows
            died = any(worker.exitcode for worker in getattr(self._batches, "_workers", ()))
            self.close()
            if died or isinstance(error, ConnectionError | EOFError):  # died, perhaps while it sent a batch
                text = "a data loading process died: the machine may be out of memory, or /dev/shm may be full; "
                raise LoaderDiedError(text + _WITHOUT_SHARED_MEMORY) from error
            raise
        self._current = self._requested.popleft()
        if isinstance(batch, str):
            self.close()
            raise InputError(batch)
        return tuple(map(torch.as_tensor, batch))

    def close(self) -> None:
        """End the workers and wait for them; may be called again."""
        batches, self._batches = self._batches, None
        # Freeing the iterator would also do it, but a traceback may hold a reference to it.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
            for worker in batches._workers:
                worker.kill()  # a stopped worker (SIGSTOP) has not read the request to end


@dataclass(frozen=True, eq=False)
class _Batches:
    """Maps a `BatchRequest` to a mini-batch, of arrays if /dev/shm has no room for its tensors; or to the message of an
    InputError: raised in a worker, the exception would arrive as the text of its traceback."""

    splits: Mapping[SplitName, Split]

    def __getitem__(self, key: BatchRequest) -> tuple[Tensor | np.ndarray, ...] | str:
        try:
            inputs = self.splits[key.split].inputs(key.epoch, key.indices, key.lengths)
        except InputError as error:
            return str(error)
        if get_worker_info() is not None:
            try:
                for tensor in inputs:  # the loader would do it later, where a failure would lose the batch
                    tensor.share_memory_()
            except RuntimeError:  # the loader copies arrays through a pipe
                return tuple(tensor.numpy() for tensor in inputs)
        return inputs


def _set_up_worker(served: int, _worker: int) -> None:
    """Run in each worker before its first batch: 1 thread, killed when the process it serves ends, and by no signal to
    all processes of the command before."""
    torch.set_num_threads(1)  # the other cores are for other workers and the pipeline
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    sys.excepthook = _print_unless_connection_lost
    end_with_parent(served)


def _print_unless_connection_lost(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Print no traceback if a batch could not be sent: the trainer was interrupted and has printed why."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
