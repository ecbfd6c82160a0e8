"""One process of a run: sets itself up, does its task, and reports to its parent that it is done or why it failed."""

import contextlib
import ctypes
import gc
import os
import threading
import time
import traceback
from array import array
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from gpipe_cli.data.cache import cache_folder
from gpipe_cli.data.loading import LoaderDiedError, UnreadableError
from gpipe_cli.distributed.control_group import ACTIVITY_NUMBERS, HANDLED, STOP, BlockedOn, ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups, connect_processes
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.launch.job import Done, Failure, Job, Reason
from gpipe_cli.pipeline.runtime.executor import ActionFailedError
from gpipe_cli.pipeline.runtime.transport import PeerLostError
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.schedule import Action, Kind
from gpipe_cli.system.accelerator import configure_libraries, use_device
from gpipe_cli.training.checkpoint.files import CheckpointError
from gpipe_cli.training.engine import WorkerProcess
from gpipe_cli.training.milestones import DivergedError

_POLL_SECONDS = 0.01  # interval at which process 0 looks whether its messages were handled
_KIND_NUMBERS = {kind: number for number, kind in enumerate(Kind, start=1)}


def main(job: Job, connection: Connection, activity: "memoryview[int]") -> None:
    """The program of a worker process; it writes its `Activity` into `activity`, memory that its parent reads."""
    _set_up(job.spec)
    base = ACTIVITY_NUMBERS * job.rank

    def on_action(action: Action, samples: int, lengths: Sequence[int]) -> None:
        numbers = (_KIND_NUMBERS[action.kind], action.stage, action.micro_batch, samples, *lengths)
        activity[base + 2 : base + 2 + len(numbers)] = array("q", numbers)
        activity[base] += 1

    @contextlib.contextmanager
    def block_on(what: BlockedOn) -> Iterator[None]:
        activity[base + 1] = what
        try:
            yield
        finally:
            activity[base + 1] = BlockedOn.NOTHING
            activity[base] += 1

    def connect() -> tuple[ControlGroup, ProcessGroups | None]:
        layout = job.spec.layout
        devices = [*map(torch.device, layout.devices_of(job.rank))]
        use_device(devices[0])
        control, groups = connect_processes(
            job.rank, layout.rank_of_stage, layout.replicas, devices, job.rendezvous, job.timeout_seconds, block_on,
            is_local=layout.torchrun is None,
        )  # fmt: skip
        if groups is not None:
            ties, skips = job.spec.stages_of_ties, job.spec.skips
            groups = groups.for_cut(job.rank, layout.rank_of_stage, devices[0], ties, skips)
        control.reason = lambda: activity[STOP]
        return control, groups

    sent = 0  # messages to the parent
    sending = threading.Lock()  # a checkpoint is reported by another thread

    def report(message: object) -> None:
        nonlocal sent
        with sending:
            connection.send(message)
            sent += 1
        activity[base] += 1

    def flush_messages() -> None:
        awaited = sent
        while activity[HANDLED] < awaited:
            time.sleep(_POLL_SECONDS)

    process = WorkerProcess(job.rank, connect, report, on_action, flush_messages)
    try:
        job.task(process)
    except Exception as error:
        failure = _failure(job.rank, error)
        for finish in process.on_failure:
            with contextlib.suppress(Exception):  # a consequence, as of a lost device: the first failure is reported
                finish()
        with contextlib.suppress(OSError):  # the parent has ended
            connection.send(failure)
        connection.close()
        # not sys.exit: threads of a broken process group may never end
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
    connection.send(Done())


def _failure(rank: int, error: Exception) -> Failure:
    reason, text, trace = Reason.OTHER, str(error), ""
    match error:
        case PeerLostError():
            reason = Reason.PEER
        case LoaderDiedError():
            reason = Reason.LOST
        case InputError():
            reason = Reason.USER
        case DivergedError() | CheckpointError() | UnreadableError():
            pass
        case ActionFailedError():
            trace = traceback.format_exc()
        case _:
            text = f"{type(error).__name__}: {error}"
            trace = traceback.format_exc()
    raised = error, error.__cause__
    if any(isinstance(exception, torch.OutOfMemoryError) for exception in raised):
        text += "; use more micro_batches, recompute=always or more partitions"
    if any(isinstance(exception, torch.AcceleratorError) for exception in raised):
        text += "; a GPU reports late: with CUDA_LAUNCH_BLOCKING=1 it is the layer that is named"
        if "device-side assert" not in text:  # a device-side assert comes from the model's own code
            reason = Reason.LOST
    invalid_setting = error if isinstance(error, InvalidSettingError) else None
    return Failure(rank, text, time.time(), reason, trace, invalid_setting)


def _set_up(spec: PipelineSpec) -> None:
    keep_freed_memory()
    gc.freeze()  # the fork server's imports are never garbage, and collecting them would interrupt steps
    torch.set_num_threads(spec.layout.threads)
    if spec.compile:
        _set_up_compiler()
    if set(spec.layout.devices) != {"cpu"}:
        configure_libraries(spec.precision, deterministic=spec.deterministic)


def _set_up_compiler() -> None:
    """Keep compiled code for other processes and later runs, in gpipe's cache unless the user has named a folder."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    key = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(key, default_cache_dir()) == default_cache_dir():  # torch may have set its default
        # without a cache folder that can be written, torch's temporary folder is used
        with contextlib.suppress(InputError, OSError):
            folder = cache_folder(None) / "compiled"
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                os.environ[key] = str(folder)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system after every tensor.

    A step frees and allocates the same tensors again; each return costs the page faults of touching new memory.
    """
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):  # another C library: slower, not wrong
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)
