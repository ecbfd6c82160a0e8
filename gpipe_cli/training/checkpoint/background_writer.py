"""Checkpoints that are written while the training continues.

To begin a checkpoint, the training only waits for copies of the stages' tensors. A thread of each process then writes
them to disk, and a list of the files; once all lists exist, the thread of process 0 completes the checkpoint. Meanwhile
the processes exchange after every step whether they are done, so that all take the same decisions after the same step.
"""

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from gpipe_cli.distributed.control_group import BlockedOn
from gpipe_cli.pipeline.runtime.tied_weights import canonical_names
from gpipe_cli.system.accelerator import current_stream, is_accelerator, new_pinned_memory, using_device
from gpipe_cli.training import events
from gpipe_cli.training.checkpoint import files
from gpipe_cli.training.checkpoint.restore import collect_stage_state
from gpipe_cli.training.engine import Engine, WorkerProcess

_POLL_SECONDS = 0.1  # interval at which process 0 looks for the parts of other processes
_VISIBILITY_TIMEOUT_SECONDS = 10.0  # on a shared disk: how soon process 0 must see the parts that others have written
_FINAL_WAIT_SECONDS = 5.0  # how long a failed process waits for the checkpoint that is being written
_REPORT_AFTER_SECONDS = 0.5  # shorter waits are not reported
_ALIGNMENT_BYTES = 64  # each copy begins at a multiple of these

State = dict[str, torch.Tensor]


class Snapshot:
    """Copies of tensors in host memory, whose buffers are reused by the next copies."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def copy_to_host(self, tensors: State) -> tuple[State, Callable[[], None]]:
        """Contiguous copies, and a function that waits until they have arrived from the GPUs. The tensors may change
        immediately, as a GPU copies before its next computation. The copies of the previous call are overwritten.

        Copies from a GPU are page-locked, or the host would wait for the GPU.
        """
        kept = {
            name: copy
            for name, copy in self._copies.items()
            if (source := tensors.get(name)) is not None and (copy.shape, copy.dtype) == (source.shape, source.dtype)
        }
        copies = kept | _allocate_host_copies({name: tensor for name, tensor in tensors.items() if name not in kept})
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        self._copies = copies
        devices = {tensor.device for tensor in tensors.values() if is_accelerator(tensor.device)}
        copy_events = {device: current_stream(device).record_event() for device in devices}

        def wait_for_copies() -> None:
            for device, event in copy_events.items():
                with using_device(device):
                    event.synchronize()

        return copies, wait_for_copies


def _allocate_host_copies(tensors: State) -> State:
    """Contiguous host tensors like these, of undefined values; for a GPU's tensors page-locked, in few blocks."""
    on_gpu = {name: tensor for name, tensor in tensors.items() if is_accelerator(tensor.device)}
    on_host = {name: tensor for name, tensor in tensors.items() if name not in on_gpu}
    made = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in on_host.items()}
    sizes, places = pack_into_blocks([tensor.nbytes for tensor in on_gpu.values()])
    blocks = [new_pinned_memory(size) for size in sizes]
    for (name, tensor), (block, offset) in zip(on_gpu.items(), places, strict=True):
        memory = blocks[block][offset : offset + tensor.nbytes]
        made[name] = memory.view(tensor.dtype).view(tensor.shape)
    return made


def pack_into_blocks(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """The sizes of blocks that hold pieces of these `sizes` in bytes, and the block and the offset of each piece.

    torch rounds page-locked memory up to a power of two: with an allocation per piece, up to half of it would be
    unused. So blocks are powers of two: each as large as what remains, rounded down, and filled with the largest pieces
    first.
    """
    left = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
    blocks, used = list[int](), list[int]()
    places = [(0, 0)] * len(sizes)
    total = sum(left)
    for piece in sorted(range(len(sizes)), key=lambda piece: -left[piece]):
        size = left[piece]
        block = next((at for at, filled in enumerate(used) if filled + size <= blocks[at]), len(blocks))
        if block == len(blocks):
            whole = 1 << max((size - 1).bit_length(), total.bit_length() - 1) if size else 0
            blocks.append(whole)
            used.append(0)
        places[piece] = block, used[block]
        used[block] += size
        total -= size
    return blocks, places


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time; every process calls the same methods after the same steps.

    It is `idle`; `writing`, while the processes write their parts; or `completing`, once all processes except process 0
    are known to be done, until process 0 has completed the checkpoint. Only `start` and `poll` change the state, which
    is the same in all processes.
    """

    engine: Engine
    folder: Path  # the run's folder
    config_yaml: str
    classes: tuple[str, ...]  # names by output; () if the data name none
    process: WorkerProcess  # the `events` about checkpoints are reported in process 0 only
    last: files.Progress  # progress at the newest complete checkpoint; at first, where the run begins

    def __post_init__(self) -> None:
        self.control = self.engine.control
        self.keep = self.engine.config.checkpoint.keep
        self._snapshots = {k: Snapshot() for k in self.engine.stages}
        self._thread = ThreadPoolExecutor(1, "gpipe-checkpoint")
        self.state: Literal["idle", "writing", "completing"] = "idle"
        self._completing_since: float | None = None  # `time.monotonic()` when the state became `completing`
        self._progress = self.last  # progress at the checkpoint that is being written
        # The job that writes this process's part, and in process 0 the job that completes the checkpoint, elsewhere the
        # same as the first. A job's result is None, or why it failed.
        self._part: Future[str | None]
        self._completion: Future[str | None]
        self._write_failed = threading.Event()  # set once a process has failed to write

    def close(self, step: int) -> None:
        """After the last step: wait for the last checkpoint. Raises CheckpointError if it cannot be written."""
        self.wait_until_idle(step, last=True)
        self._thread.shutdown()

    def drain(self) -> None:
        """In a process that has failed: wait a few seconds for the checkpoint that is being written."""
        if self.state == "idle":
            return
        with self.control.blocked_on(BlockedOn.LAST_CHECKPOINT):
            wait([self._completion], _FINAL_WAIT_SECONDS)
        if self.control.is_rank_zero and self._completion.done() and self._completion.result() is None:
            self.process.report(events.CheckpointEnded(self._progress.step))

    def start(self, progress: files.Progress) -> None:
        """Copy the state of the stages, and begin to write it. No other checkpoint may be in progress."""
        spec = self.engine.spec
        writes = spec.layout.replica_of(self.control.rank) == 0  # replicas are identical
        states = {k: collect_stage_state(self.engine, k) for k in (self.engine.stages if writes else ())}
        snapshots = {k: self._snapshots[k].copy_to_host(state) for k, state in states.items()}
        staging = files.staging_dir(self.folder, progress.step)
        self.state, self._progress, self._completing_since = "writing", progress, None
        self._write_failed.clear()

        def write() -> None:
            written = []
            for k, (copies, wait_for_copies) in snapshots.items():
                wait_for_copies()
                written.append(files.write_stage(staging, k, copies))
            if writes:
                files.write_part(staging, self.control.rank, written)

        def complete() -> None:
            written = [
                file
                for process in range(spec.layout.processes_per_pipeline)
                for file in self._wait_for_part(staging, process)
            ]
            layers = tuple(name for names in spec.layer_names for name in names)
            elsewhere = canonical_names(spec.ties)
            with_state = {name.rpartition("/")[0] for file in written for name in file.tensors}
            parameters = (name for name, _ in self.engine.model.named_parameters() if name not in elsewhere)
            stateless = tuple(name for name in parameters if f"optimizer/{name}" not in with_state)
            index = files.Index(progress, layers, tuple(written), stateless, self.classes)
            # a run killed at any moment and resumed from here will not report these steps again
            self.process.report(events.CheckpointReady(progress.step))
            self.process.flush_messages()
            files.finish_checkpoint(staging, index, config=self.config_yaml, keep=self.keep)

        self._part = self._completion = self._thread.submit(_run_job, write)
        if self.control.is_rank_zero:
            self._completion = self._thread.submit(_run_job, complete)

    def _wait_for_part(self, staging: Path, process: int) -> list[files.WrittenFile]:
        """Wait for the files that `process` writes. Raises CheckpointError if a part fails or stays invisible."""
        while (part := files.read_part(staging, process)) is None:
            if self._part.result() is not None or self._write_failed.wait(_POLL_SECONDS):
                raise files.CheckpointError("a part of it is missing")
            since = self._completing_since
            if since is not None and time.monotonic() - since > _VISIBILITY_TIMEOUT_SECONDS:
                why = f"what process {process} has written is not in {self.folder} here; use a folder of a shared disk"
                raise files.CheckpointError(why)
        return part

    def wait_until_idle(self, step: int, *, last: bool = False) -> None:
        """Wait until no checkpoint is being written; report the wait if it was long. `last`: as of `poll`."""
        began, waits = time.perf_counter(), self.state != "idle"
        while self.state != "idle":
            with self.control.blocked_on(BlockedOn.DISK):
                wait([self._part if self.state == "writing" else self._completion])
            self.poll(last=last)
        seconds = time.perf_counter() - began
        if waits and self.control.is_rank_zero and seconds >= _REPORT_AFTER_SECONDS:
            self.process.report(events.CheckpointStalled(step, self._progress.step, seconds))

    def poll(self, *, last: bool = False) -> None:
        """Exchange with all processes whether they are done with the checkpoint and whether any of them failed, and
        change the state accordingly. Raises CheckpointError for a failure if the run's folder is gone or this is the
        `last` checkpoint; any other failure is only reported."""
        if self.state == "idle":
            return
        done = self._completion.done()
        reasons = [job.result() for job in (self._part, self._completion) if job.done()]
        states = self.control.collect((done, next(filter(None, reasons), None)))
        why = next((text for _, text in reversed(states) if text is not None), None)  # 0 may fail due to others
        if why is not None:
            self._write_failed.set()
        if self.state == "writing" and all(done for done, _ in states[1:]):
            self.state, self._completing_since = "completing", time.monotonic()
        if all(done for done, _ in states):
            self.state = "idle"
            self._report_end(why, last)

    def _report_end(self, why: str | None, last: bool) -> None:
        if why is None:
            self.last = self._progress
        elif self.control.is_rank_zero:
            shutil.rmtree(files.staging_dir(self.folder, self._progress.step), ignore_errors=True)  # frees space
            if not self.folder.is_dir():
                raise files.CheckpointError(f"{self.folder}: {files.RUN_FOLDER_MISSING}")
        if why is not None and last:
            raise files.CheckpointError(why)
        if self.control.is_rank_zero:
            self.process.report(events.CheckpointEnded(self._progress.step, why))


def _run_job(write: Callable[[], None]) -> str | None:
    try:
        write()
    except files.CheckpointError as error:
        return str(error)
    return None
