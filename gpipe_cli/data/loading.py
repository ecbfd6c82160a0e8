"""Loading overlapped with the step: workers decode and augment the next mini-batches while the pipeline computes.

The paper's throughput assumes that the accelerators never wait for images. One DataLoader serves the whole run, across
epochs: a loader per epoch would start each epoch with an empty queue, and its first step would wait.

Workers are forked, which takes milliseconds, before the process has threads, connections or a CUDA context: Gloo's
threads may hold locks, and an open CUDA context does not survive a fork.
"""

import errno
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from gpipe_cli.config.typed import RefusedError
from gpipe_cli.data.batches import MiniBatches, Split
from gpipe_cli.errors import InputError
from gpipe_cli.system.forked_call import end_with_parent

_WITHOUT_SHARED_MEMORY = "make it larger (docker run --shm-size=1g), or use data_workers=0"


class LoaderDiedError(RuntimeError):
    """A data loading process was killed."""


class LoadedBatches:
    """Iterator over the first stage's inputs: a tuple of tensors (n, ...) for each mini-batch of which this replica has
    n > 0 samples. Loading ends when `next` raises InputError (unreadable image) or LoaderDiedError (dead worker)."""

    def __init__(
        self,
        split: Split,
        mini_batches: MiniBatches,
        start_epoch: int,
        start_position: int,
        epochs: int,
        workers: int,
    ) -> None:
        """Start loading the mini-batches of `mini_batches.stream(start_epoch, start_position, epochs)`, in that order.

        workers: number of processes, forked here; 0: this process loads each batch when it is requested.
        """
        # Without pin_memory=True: the loader would ask CUDA for GPUs before it forks, and pin in a thread that opens a
        # context on GPU 0 as long as this process has none on its own GPU. `accelerator.to_device` pins batches.
        loader: DataLoader[Any] = DataLoader(
            _Batches(split),  # type: ignore[arg-type]  # any object with __getitem__ is a map-style data set
            batch_size=None,  # a key of the sampler stands for a whole mini-batch
            sampler=(
                (epoch, indices[share.samples].tolist(), mini_batches.lengths(epoch, position))
                for epoch, position in mini_batches.stream(start_epoch, start_position, epochs)
                for indices in [mini_batches.indices(epoch, position)]
                if (share := mini_batches.share(epoch, position)).sizes
            ),
            collate_fn=lambda batch: batch,  # torch's own would make tensors of arrays
            num_workers=workers,
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
            raise RefusedError("data_workers", workers, why) from error
        signal.signal(signal.SIGCHLD, earlier_handler)
        self._peeked: tuple[Tensor, ...] | None = None

    def __iter__(self) -> Self:
        return self

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
        except BaseException as error:  # the end, a dead worker, Ctrl-C: no batch comes after any of them
            died = any(worker.exitcode for worker in getattr(self._batches, "_workers", ()))
            self.close()
            if died or isinstance(error, ConnectionError | EOFError):  # died, perhaps while it sent a batch
                text = "a data loading process died: the machine may be out of memory, or /dev/shm may be full; "
                raise LoaderDiedError(text + _WITHOUT_SHARED_MEMORY) from error
            raise
        if isinstance(batch, str):
            self.close()
            raise InputError(batch)
        return tuple(map(torch.as_tensor, batch))

    def close(self) -> None:
        """End the workers and wait for them; may be called again."""
        batches, self._batches = self._batches, None
        # Freeing the iterator would do it too, but a traceback may hold a reference to it.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
            for worker in batches._workers:
                worker.kill()  # a stopped worker (SIGSTOP) has not read the request to end


@dataclass(frozen=True, eq=False)
class _Batches:
    """Maps arguments of `Split.inputs` to a mini-batch, of arrays where /dev/shm has no room for its tensors; or to the
    message of an InputError: raised in a worker, the exception would arrive as the text of its traceback."""

    split: Split

    def __getitem__(self, key: tuple[int, list[int], tuple[int, ...]]) -> tuple[Tensor | np.ndarray, ...] | str:
        try:
            inputs = self.split.inputs(*key)
        except InputError as error:
            return str(error)
        if get_worker_info() is not None:
            try:
                for tensor in inputs:  # the loader would do it later, where a failure only loses the batch
                    tensor.share_memory_()
            except RuntimeError:  # the loader copies arrays through a pipe
                return tuple(tensor.numpy() for tensor in inputs)
        return inputs


def _set_up_worker(served: int, _worker: int) -> None:
    """Run in each worker before its first batch: 1 thread, Ctrl-C ignored, killed when the process it serves ends."""
    torch.set_num_threads(1)  # the other cores are for other workers and the pipeline
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process it serves gets it too, and ends its workers
    sys.excepthook = _print_unless_connection_lost
    end_with_parent(served)


def _print_unless_connection_lost(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """Print no traceback if a batch could not be sent: the trainer was interrupted and has printed why."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
