"""The memory of a stage: on a GPU torch's allocations, on a CPU the memory of its process, libraries included."""

import resource
import sys
from pathlib import Path

import torch

from gpipe_cli.system.accelerator import is_accelerator, peak_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """The peak memory of a stage so far: the allocator's peak on a GPU, the whole process's peak on a CPU."""
    if is_accelerator(device):
        return peak_bytes(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def anonymous_bytes() -> int:
    """The anonymous memory (RssAnon) of this process in bytes; in a worker that begins, all that its imports left."""
    return _resident_bytes("RssAnon")


def overhead_bytes(device: torch.device, bytes_at_start: int) -> int:
    """The bytes of libraries in a stage's memory: `bytes_at_start`, which importing them left, and code that has run.

    0 on a GPU, whose allocator has tensors only, and on systems that do not report it (other than Linux).
    """
    return bytes_at_start + _resident_bytes("RssFile") if bytes_at_start and not is_accelerator(device) else 0


def _resident_bytes(kind: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")), 0)
