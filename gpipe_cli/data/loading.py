"""Loading overlapped with the step: workers decode and augment the next mini-batches while the pipeline computes.

The paper's throughput assumes that the accelerators never wait for images. One DataLoader serves the whole run, across
epochs: a loader per epoch would empty its queue at every border and the first step of each epoch would wait.

Workers are forked where the process has neither threads nor connections yet, or else started by a fork server, a fresh
and single-threaded process: Gloo's threads may hold locks, and an open CUDA context does not survive a fork. Spawning
would be as safe, but every worker would import torch again (seconds); the fork server has imported it once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gpipe_cli.data.batches import Batches, Key, Split
from gpipe_cli.data.photographs import DECODED

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
    start_method: str = "forkserver",
) -> LoadedBatches:
    """Start loading the mini-batches of `mini_batches.stream(start_epoch, start_position, epochs)`, in that order.

    workers: processes, started here; 0 loads in this process, each batch when it is asked for. pin_memory: page-locked
    batches, for asynchronous copies to a GPU. start_method: "fork" starts workers at once and is for a process that has
    no threads, connections or CUDA context yet. An evaluation is one epoch of mini-batches that are not shuffled.

    Raises ValueError for a negative number of workers.
    """
    if workers < 0:
        raise ValueError(f"data_workers={workers}: must be 0 (load in the training process) or more")
    assert mini_batches.samples == len(split), (mini_batches.samples, len(split))
    return LoadedBatches(
        split, _Keys(mini_batches, start_epoch, start_position, epochs), workers, pin_memory, start_method
    )


class LoadedBatches:
    """Iterator over what the first stage is given, a tuple of (N, ...) each.

    Close it, or use it as a context manager, to end its workers.

    `next` raises ValueError, in one line that names the file, where an image cannot be read; loading then has ended.
    """

    def __init__(self, split: Split, keys: Iterable[Keys], workers: int, pin_memory: bool, start_method: str) -> None:
        import torch
        from torch.utils.data import DataLoader

        context = None
        if workers > 0:
            context = torch.multiprocessing.get_context(start_method)
            if start_method == "forkserver":
                context.set_forkserver_preload(["torch", "torchvision.transforms.v2", "PIL.Image", __name__])
        loader: DataLoader[Any] = DataLoader(
            _Batches(split),  # type: ignore[arg-type]  # any object with __getitem__ is a map-style data set
            batch_size=None,  # a key stands for a whole mini-batch
            sampler=keys,
            num_workers=workers,
            multiprocessing_context=context,
            worker_init_fn=_settle_worker,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # otherwise the loader draws a number from the run's default generator
        )
        self._batches: Iterator[Any] | None = iter(loader)

    def __iter__(self) -> LoadedBatches:
        return self

    def __next__(self) -> tuple[Tensor, ...]:
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except (ConnectionError, EOFError) as error:  # it died with a batch half handed over
            self.close()
            raise RuntimeError("a data loading process died; is the machine out of memory or shared memory?") from error
        except BaseException:  # the end, a worker that died, Ctrl-C: in any case nothing more comes
            self.close()
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
    from torch import multiprocessing

    torch.set_num_threads(1)  # the cores belong to the workers' number and to the pipeline
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process it serves hears it too, and ends its workers
    # A worker's parent is the fork server, which outlives a killed trainer for as long as its workers live; so watch
    # the process that asked for this worker, not the parent.
    sys.excepthook = _quiet_about_lost_connections
    served = multiprocessing.parent_process()
    assert served is not None

    def follow() -> None:
        served.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _quiet_about_lost_connections(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """A batch that was on its way when the trainer was interrupted is nothing to tell of, over its summary."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)
