"""Loading overlapped with the step: workers decode and augment the next mini-batches while the pipeline computes.

The paper's throughput assumes that the accelerators never wait for images. One DataLoader serves the whole run, across
epochs: with a loader per epoch the queue would be empty, and the first step would wait, at the start of each.

Workers are forked, which takes milliseconds, before the process has threads, connections or a CUDA context: Gloo's
threads may hold locks, and an open CUDA context does not survive a fork.
"""

import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gpipe_cli.data.batches import MiniBatches, Split
from gpipe_cli.errors import InputError
from gpipe_cli.system.forked_call import end_with_parent


class LoaderDiedError(RuntimeError):
    """A data loading process was killed."""


class LoadedBatches:
    """Iterator over the first stage's inputs, a tuple of (N, ...) each of this replica's share of every mini-batch of
    which it has one. `next` raises InputError where an image cannot be read; loading then has ended."""

    def __init__(
        self,
        split: Split,
        mini_batches: MiniBatches,
        start_epoch: int,
        start_position: int,
        epochs: int,
        workers: int,
        pin_memory: bool = False,
    ) -> None:
        """Start loading the mini-batches of `mini_batches.stream(start_epoch, start_position, epochs)`, in that order.

        workers: processes, forked here; 0 loads in this process, each batch when it is asked for. pin_memory:
        page-locked batches, for asynchronous copies to a GPU.
        """
        loader: DataLoader[Any] = DataLoader(
            _Batches(split),  # type: ignore[arg-type]  # any object with __getitem__ is a map-style data set
            batch_size=None,  # a key stands for a whole mini-batch
            sampler=(
                (epoch, indices[share.samples].tolist(), mini_batches.lengths(epoch, position))
                for epoch, position in mini_batches.stream(start_epoch, start_position, epochs)
                for indices in [mini_batches.indices(epoch, position)]
                if (share := mini_batches.share(epoch, position)).sizes
            ),
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            worker_init_fn=partial(_set_up_worker, os.getpid()),
            pin_memory=pin_memory,
            generator=torch.Generator(),  # otherwise the loader draws a number from the run's default generator
        )
        # torch's handler of SIGCHLD raises that a worker died wherever this process is, be it in a step; without it
        # the next request for a batch does.
        before = signal.getsignal(signal.SIGCHLD)
        self._batches: Any = iter(loader)
        signal.signal(signal.SIGCHLD, before)
        self._peeked: tuple[Tensor, ...] | None = None

    def __iter__(self) -> Self:
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
            if died or isinstance(error, ConnectionError | EOFError):  # perhaps while it sent a batch
                text = "a data loading process died; is the machine out of memory or shared memory?"
                raise LoaderDiedError(text) from error
            raise
        if isinstance(batch, str):
            self.close()
            raise InputError(batch)
        return tuple(batch)

    def close(self) -> None:
        """End the workers and wait for them; may be called again."""
        batches, self._batches = self._batches, None
        # Freeing the iterator would do it too, but a traceback may hold a reference to it.
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
            for worker in batches._workers:
                worker.kill()  # one that is stopped (SIGSTOP) has not read the request to end


@dataclass(frozen=True, eq=False)
class _Batches:
    """The arguments of `Split.inputs` in, a mini-batch out, or why there is none: an exception raised in a worker would
    arrive as the text of its traceback."""

    split: Split

    def __getitem__(self, key: tuple[int, list[int], tuple[int, ...]]) -> tuple[Tensor, ...] | str:
        try:
            return self.split.inputs(*key)
        except InputError as error:
            return str(error)


def _set_up_worker(served: int, _worker: int) -> None:
    """In each worker, before its first batch: one thread, Ctrl-C ignored, killed when the process it serves ends."""
    torch.set_num_threads(1)  # the other cores are for other workers and the pipeline
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process it serves gets it too, and ends its workers
    sys.excepthook = _print_unless_connection_lost
    end_with_parent(served)


def _print_unless_connection_lost(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    """No traceback of a batch that could not be sent because the trainer was interrupted and has printed why."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
