"""Checkpoints that are written while the training goes on.

A step in which one begins waits only for copies of the stages' tensors. A thread of each process then writes them, and
a file that says which; when process 0 finds those of all, its thread completes the checkpoint, whatever the training is
at. As long as one is being written the processes compare after every step whether they are done, so that all of them
take the same decisions after the same step.
"""

import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpipe_cli.distributed.control_group import Awaited
from gpipe_cli.training import events
from gpipe_cli.training.checkpoint import files
from gpipe_cli.training.checkpoint.restore import state_of_stage
from gpipe_cli.training.engine import Engine

_LOOKS_SECONDS = 0.1  # between two looks at what other processes have written
_VISIBLE_SECONDS = 10.0  # after all processes have written their parts, for process 0 to see them on a shared disk
_LAST_SECONDS = 5.0  # how long a process that has failed waits for its checkpoint
_SAID_SECONDS = 0.5  # a wait that is shorter is not worth a line

State = dict[str, torch.Tensor]


class Snapshot:
    """Copies of tensors in the CPU's memory, which the next copies overwrite."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: State) -> tuple[State, Callable[[], None]]:
        """Contiguous copies, and what waits until they have arrived from the GPUs; the tensors may change at once, as
        a GPU copies before it computes what comes next. The copies of the time before are overwritten.

        Page-locked memory, without which a copy from a GPU waits for the GPU, is taken in powers of two.
        """
        copies = {}
        for name, tensor in tensors.items():
            copy = self._copies.get(name)
            if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copies[name] = copy.copy_(tensor, non_blocking=True)
        self._copies = copies
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        copied = {device: torch.cuda.current_stream(device).record_event() for device in devices}

        def arrived() -> None:
            for device, event in copied.items():
                with torch.cuda.device(device):  # a thread begins with GPU 0, which may not be this process's
                    event.synchronize()

        return copies, arrived


@dataclass
class CheckpointWriter:
    """The checkpoints of a run, one at a time; every process calls the same methods after the same steps."""

    engine: Engine
    folder: Path  # the run's folder
    config_yaml: str
    report: Callable[[object], None]  # called in process 0, with `events` of checkpoints
    last: files.Progress  # the newest checkpoint that is complete; at first, where the run begins

    def __post_init__(self) -> None:
        self.control, self.keep = self.engine.control, self.engine.config.checkpoint.keep
        self._snapshots = {k: Snapshot() for k in self.engine.stages}
        self._thread = ThreadPoolExecutor(1, "gpipe-checkpoint")
        self._written: files.Progress | None = None  # the checkpoint that is being written
        # Of this process for it: its part, and in process 0, then, the whole. A text: why it cannot.
        self._writing: Future[str | None]
        self._work: Future[str | None]
        self._given_up = threading.Event()  # another process cannot write its part
        self._parts_written: float | None = None  # since when those of all processes are, on the monotonic clock

    def after_step(self, progress: files.Progress, *, save: bool) -> files.Progress:
        """Begin a checkpoint if `save`, once the one before is complete. Returns `progress`, whose best step is one
        that has a checkpoint: of a best one that could not be written, the one before is the best again.

        Raises CheckpointError if the run's folder is gone. What else cannot be written is reported, and left out.
        """
        if self._written is not None:
            self._look(last=False)
        if save:
            self._finish(progress.step, last=False)
        if self._written is None and progress.best_step != progress.step:
            last = self.last
            progress = replace(progress, best_score=last.best_score, best_step=last.best_step, best=last.best)
        if save:
            self._begin(progress)
        return progress

    def close(self, step: int) -> None:
        """After the last step: wait for the last one. Raises CheckpointError if it cannot be written."""
        self._finish(step, last=True)
        self._thread.shutdown()

    def settle(self) -> None:
        """In a process that has failed: give the checkpoint that is being written some seconds to become complete."""
        if self._written is None:
            return
        with self.control.waits(Awaited.LAST_CHECKPOINT):
            wait([self._work], _LAST_SECONDS)
        if self.control.leads and self._work.done() and self._work.result() is None:
            self.report(events.CheckpointWritten(self._written.step))

    def _begin(self, progress: files.Progress) -> None:
        spec = self.engine.spec
        writes = spec.layout.replica_of(self.control.rank) == 0  # all replicas have the same
        states = {k: state_of_stage(self.engine, k) for k in (self.engine.stages if writes else ())}
        snapshots = {k: self._snapshots[k].take(state) for k, state in states.items()}
        draft = files.draft_of(self.folder, progress.step)
        self._given_up.clear()
        self._parts_written = None

        def write() -> None:
            written = []
            for k, (copies, arrived) in snapshots.items():
                arrived()
                written.append(files.write_stage(draft, k, copies))
            if writes:
                files.write_part(draft, self.control.rank, written)

        def complete() -> None:
            written = [file for process in range(spec.layout.of_pipeline) for file in self._part(draft, process)]
            layers = tuple(name for names in spec.layer_names for name in names)
            with_state = {name.rpartition("/")[0] for file in written for name in file.tensors}
            parameters = (name for name, _ in self.engine.model.named_parameters())
            stateless = tuple(name for name in parameters if f"optimizer/{name}" not in with_state)
            index = files.Index(progress, layers, tuple(written), stateless)
            files.finish_checkpoint(draft, index, config=self.config_yaml, keep=self.keep)

        self._written = progress
        self._writing = self._work = self._thread.submit(_why_not, write)
        if self.control.leads:
            self._work = self._thread.submit(_why_not, complete)

    def _part(self, draft: Path, process: int) -> list[files.WrittenFile]:
        """Wait for what a process writes, and return it. Raises CheckpointError if a process cannot write its part."""
        while (part := files.read_part(draft, process)) is None:
            if self._writing.result() is not None or self._given_up.wait(_LOOKS_SECONDS):
                raise files.CheckpointError("a part of it is missing")
            if self._parts_written is not None and time.monotonic() - self._parts_written > _VISIBLE_SECONDS:
                why = f"what process {process} has written is not in {self.folder} here; use a folder of a shared disk"
                raise files.CheckpointError(why)
        return part

    def _finish(self, step: int, *, last: bool) -> None:
        """Wait until no checkpoint is being written, and say so."""
        began, awaited = time.perf_counter(), self._written
        if self._written is not None:
            # when all parts are written, or it is known that one cannot be, process 0 waits for nobody
            for work in (self._writing, self._work):
                with self.control.waits(Awaited.DISK):
                    wait([work])
                self._look(last=last)
                if self._written is None:
                    break
        seconds = time.perf_counter() - began
        if awaited is not None and self.control.leads and seconds >= _SAID_SECONDS:
            self.report(events.CheckpointAwaited(step, awaited.step, seconds))

    def _look(self, *, last: bool) -> None:
        """Learn whether all processes are done with the checkpoint, or one of them cannot write its part."""
        progress = self._written
        assert progress is not None
        ended = self._work.done()
        reasons = [work.result() for work in (self._writing, self._work) if work.done()]
        found = self.control.collect((ended, next(filter(None, reasons), None)))
        why = next((text for _, text in reversed(found) if text is not None), None)  # process 0 may only follow another
        if why is not None:
            self._given_up.set()
        if self._parts_written is None and all(done for done, _ in found[1:]):
            self._parts_written = time.monotonic()
        if not all(done for done, _ in found):
            return
        self._written = None
        if why is None:
            self.last = progress
            message: object = events.CheckpointWritten(progress.step)
        else:
            if self.control.leads:
                shutil.rmtree(files.draft_of(self.folder, progress.step), ignore_errors=True)  # its room may be needed
            if self.control.leads and not self.folder.is_dir():
                raise files.CheckpointError(f"{self.folder}: {files.GONE}")
            if last:
                raise files.CheckpointError(why)
            message = events.CheckpointFailed(progress.step, why)
        if self.control.leads:
            self.report(message)


def _why_not(write: Callable[[], None]) -> str | None:
    try:
        write()
    except files.CheckpointError as error:
        return str(error)
    return None
