"""Tasks of workers for the tests of their supervisor: here, where the workers can import them."""

import os
import signal
from multiprocessing.connection import Connection

import torch

from gpipe_cli.training.engine import WorkerProcess

SIZES = [0, 1, 300, 17_000, 3_000_000, 2, 70_000]


def nothing(process: WorkerProcess) -> None:
    pass


def fail_twice(process: WorkerProcess) -> None:
    """A GPU's fault, after which nothing that asks the GPU can be cleaned up."""

    def write_what_is_lost() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    process.on_failure.extend((write_what_is_lost, lambda: process.report("the last checkpoint")))
    raise torch.AcceleratorError("CUDA error: unspecified launch failure")


def stop_within_a_message(process: WorkerProcess) -> None:
    process.report("begun")

    def write_half(connection: Connection, buffer: memoryview) -> None:
        os.write(connection.fileno(), buffer[: len(buffer) // 2])
        os.kill(os.getpid(), signal.SIGSTOP)

    Connection._send = write_half  # type: ignore[attr-defined]
    process.report("x" * 10_000)


def report_sizes(process: WorkerProcess) -> None:
    for size in SIZES:
        process.report("x" * size)
