"""Checkpoints that are written while the training goes on.

A step in which one begins waits only for copies of the stages' tensors. A thread of each process then writes them; when
all processes have, a thread of process 0 completes the checkpoint. The processes send each other nothing from a thread:
as long as a checkpoint is being written they compare after every step how far they are, so that all of them take the
same decisions after the same step.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpipe_cli.distributed.control_group import Awaited, ControlGroup
from gpipe_cli.training import events
from gpipe_cli.training.checkpoint import store
from gpipe_cli.training.checkpoint.restore import state_of_stage
from gpipe_cli.training.engine import Engine

_SAID_SECONDS = 0.5  # a wait that is shorter is not worth a line

State = dict[str, torch.Tensor]


class Snapshot:
    """Copies of tensors in the CPU's memory, of which the next ones take the place."""

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
    control: ControlGroup
    folder: Path  # of the run
    config_yaml: str
    keep: int
    report: Callable[[object], None]  # called in process 0, with `events` of checkpoints
    last: store.Progress  # of the newest checkpoint that is complete; at first, where the run begins

    def __post_init__(self) -> None:
        self._snapshots = {k: Snapshot() for k in self.engine.stages}
        self._thread = ThreadPoolExecutor(1, "gpipe-checkpoint")
        self._written: store.Progress | None = None  # of the checkpoint that is being written
        # What this process does for it: first writes its files, then, in process 0, completes it. A text: why it can't.
        self._work: Future[Any]
        self._completing = False

    def after_step(self, progress: store.Progress, *, save: bool) -> store.Progress:
        """Begin a checkpoint if `save`, once the one before is complete. Returns `progress`, whose best step is one
        that has a checkpoint: of a best one that could not be written, the one before is the best again.

        Raises CheckpointError if the run's folder is gone. What else cannot be written is reported, and left out.
        """
        if self._written is not None:
            self._go_on(last=False)
        if save:
            self._finish(progress.step, last=False)
        if self._written is None and progress.best_step != progress.step:
            progress = replace(progress, best_score=self.last.best_score, best_step=self.last.best_step)
        if save:
            self._begin(progress)
        return progress

    def close(self, step: int) -> None:
        """After the last step: wait for the last one. Raises CheckpointError if it cannot be written."""
        self._finish(step, last=True)
        self._thread.shutdown()

    def _begin(self, progress: store.Progress) -> None:
        states = {k: state_of_stage(self.engine, k) for k in self.engine.stages}
        without_state = [
            name
            for k, state in states.items()
            for name in self.engine.parameters[k]
            if not any(key.startswith(f"optimizer/{name}/") for key in state)
        ]
        snapshots = {k: self._snapshots[k].take(state) for k, state in states.items()}

        def write() -> tuple[list[store.WrittenFile], list[str]]:
            files = []
            for k, (copies, arrived) in snapshots.items():
                arrived()
                files.append(store.write_stage(store.draft_of(self.folder, progress.step), k, copies))
            return files, without_state

        self._written, self._completing = progress, False
        self._work = self._thread.submit(_or_why_not, write)

    def _finish(self, step: int, *, last: bool) -> None:
        """Wait until no checkpoint is being written, and say so."""
        began, awaited = time.perf_counter(), self._written
        while self._written is not None:
            with self.control.waits(Awaited.DISK):
                wait([self._work])
            self._go_on(last=last)
        seconds = time.perf_counter() - began
        if awaited is not None and self.control.leads and seconds >= _SAID_SECONDS:
            self.report(events.CheckpointAwaited(step, awaited.step, seconds))

    def _go_on(self, *, last: bool) -> None:
        """Take what comes next of the checkpoint that is being written, if all processes have done their part."""
        progress = self._written
        assert progress is not None
        found = self.control.collect(self._work.result() if self._work.done() else None)
        if None in found:
            return
        why = next((one for one in found if isinstance(one, str)), None)
        if why is None and not self._completing:
            self._completing = True
            files, without_state = ([one for part in parts for one in part] for parts in zip(*found, strict=True))
            layers = [name for names in self.engine.placement.layer_names for name in names]
            index = store.Index(store.FORMAT, progress, tuple(layers), tuple(files), tuple(without_state))
            draft = store.draft_of(self.folder, progress.step)
            complete = partial(store.finish_checkpoint, draft, index, config=self.config_yaml, keep=self.keep)
            self._work = self._thread.submit(_or_why_not, complete if self.control.leads else tuple)
            return
        self._written = None
        if why is None:
            self.last = progress
            message: object = events.CheckpointWritten(progress.step)
        else:
            if self.control.leads:
                store.remove_drafts(self.folder)  # something else may need the room
            if last or (self.control.leads and not self.folder.is_dir()):
                raise store.CheckpointError(why)
            message = events.CheckpointFailed(progress.step, why)
        if self.control.leads:
            self.report(message)


def _or_why_not(write: Callable[[], object]) -> object:
    try:
        return write()
    except store.CheckpointError as error:
        return str(error)
