"""One process of a run: sets itself up, does its task, and reports to its parent that it is done or why it failed."""

import contextlib
import ctypes
import datetime
import gc
import os
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from gpipe_cli.distributed.activity import ACTIVITY_NUMBERS, Awaited
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.rendezvous import store
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.launch.job import Checking, Done, Evaluation, Failure, Job, Measuring, Reason, Training
from gpipe_cli.pipeline.runtime.executor import ActionFailedError
from gpipe_cli.pipeline.runtime.transport import PeerLostError
from gpipe_cli.pipeline.schedule.schedules import Action, Kind
from gpipe_cli.planner.placement import Placement
from gpipe_cli.training.checkpoint.store import CheckpointError
from gpipe_cli.training.engine import Groups, WorkerProcess
from gpipe_cli.training.milestones import DivergedError
from gpipe_cli.training.train_loop import evaluate_checkpoint, train

# The stages that read data may prepare it for long (a vocabulary is learned, a data set fetched) while those in between
# wait for them. Should one of them die, the parent ends the others.
_PREPARING = datetime.timedelta(days=1)
_LONGER_SECONDS = 10.0
_KIND_NUMBERS = {kind: number for number, kind in enumerate(Kind, start=1)}


def main(job: Job, connection: Connection, activity: "memoryview[int]") -> None:
    """The program of a worker process; it writes what it is doing (`Activity`) into `activity`, for its parent."""
    _set_up(job.placement)
    base = ACTIVITY_NUMBERS * job.process

    def watch(action: Action, samples: int, lengths: Sequence[int]) -> None:
        numbers = (_KIND_NUMBERS[action.kind], action.stage, action.micro_batch, samples, *lengths)
        activity[base + 2 : base + 2 + len(numbers)] = array("q", numbers)
        activity[base] += 1

    @contextlib.contextmanager
    def waits(what: Awaited) -> Iterator[None]:
        activity[base + 1] = what
        try:
            yield
        finally:
            activity[base + 1] = Awaited.NOTHING
            activity[base] += 1

    process = WorkerProcess(job.process, lambda: _connect(job, waits), connection.send, watch)
    try:
        _do(job, process)
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent has ended
            connection.send(_failure(job.process, error))
        connection.close()
        # not sys.exit: threads of a broken process group may never end
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    connection.send(Done())


def _do(job: Job, process: WorkerProcess) -> None:
    config, placement = job.config, job.placement
    match job.task:
        case Training(text, folder, bench, source):
            train(config, text, placement, folder, process, source=source, only_steps=bench is not None)
        case Evaluation(checkpoint, decode):
            evaluate_checkpoint(config, decode, checkpoint, placement, process)
        case Measuring(segments, samples, seconds):
            from gpipe_cli.launch.layer_benchmark import measure

            measure(config, placement, segments, samples, seconds, process.number, process.connect, process.report)
        case Checking(variants, references, folder, source):
            from gpipe_cli.verify.variants import check

            check(config, placement, process, variants=variants, earlier=references, folder=folder, source=source)


def _failure(process: int, error: Exception) -> Failure:
    text = str(error)
    match error:
        case PeerLostError():
            reason = Reason.PEER
        case ValueError():
            reason = Reason.USER
        case DivergedError():
            reason = Reason.DIVERGED
        case CheckpointError():
            reason = Reason.UNWRITTEN
        case ActionFailedError():
            reason = Reason.ERROR
        case _:
            reason, text = Reason.ERROR, f"{type(error).__name__}: {error}"
    if isinstance(error.__cause__, torch.OutOfMemoryError) or isinstance(error, torch.OutOfMemoryError):
        text += "; use more micro_batches, recompute=always or more partitions"
    return Failure(process, reason, text, traceback.format_exc(), time.time())


def _set_up(placement: Placement) -> None:
    keep_freed_memory()
    gc.freeze()  # what the fork server has imported is never garbage; looking through it would interrupt steps
    torch.set_num_threads(placement.threads)
    # the same bits again on a GPU: no algorithm that depends on timing
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    # attention's memory-saving kernel sums its backward in the order in which threads finish; without it the weights
    # of all pairs of positions exist at once
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def keep_freed_memory() -> None:
    """Ask glibc to keep what is freed instead of giving it back to the system after every tensor.

    A step frees and allocates the same tensors again; each return costs the page faults of touching new memory.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        libc = ctypes.CDLL("libc.so.6")
        trim_threshold, mmap_threshold = -1, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)
    except (OSError, AttributeError):
        pass  # another C library: slower, not wrong


def _connect(
    job: Job, waits: Callable[[Awaited], contextlib.AbstractContextManager[None]]
) -> tuple[ControlGroup, Groups | None]:
    """Connect the processes of the run; a process on its own needs no connection."""
    placement = job.placement
    if placement.processes == 1:
        return ControlGroup(0, 1, waits=waits), None
    # The parent sees all processes of this machine, and which of them is silent. On other machines there may be one
    # that it does not see; that one's own parent is to report first.
    here = torchrun() is None
    timeout = _PREPARING if here else datetime.timedelta(seconds=job.config.timeout_seconds + _LONGER_SECONDS)
    device = torch.device(placement.devices[job.process])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif here:
        # all on this machine: the loopback device is always there, a host name may resolve to nothing reachable
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    # With keys of this start alone: torchrun's store has the addresses of processes that it has started before, too.
    own_store = (
        dist.FileStore(job.rendezvous, placement.processes) if here else dist.PrefixStore(job.rendezvous, store())
    )
    dist.init_process_group(
        "gloo", store=own_store, rank=job.process, world_size=placement.processes, timeout=_PREPARING
    )
    backend = "nccl" if device.type == "cuda" else "gloo"
    control = dist.new_group(backend="gloo", timeout=timeout)
    forward, backward = (dist.new_group(backend=backend, timeout=timeout) for _ in range(2))
    assert isinstance(control, dist.ProcessGroup)
    assert isinstance(forward, dist.ProcessGroup)
    assert isinstance(backward, dist.ProcessGroup)
    groups = Groups(forward, backward, control, timeout.total_seconds(), partial(waits, Awaited.PROCESS))
    return ControlGroup(job.process, placement.processes, control, waits), groups
