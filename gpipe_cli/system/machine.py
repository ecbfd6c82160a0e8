"""The processor of this machine, and the cores and the memory that this process may use.

Containers and batch systems limit a process by control groups (Linux cgroups, version 1 or 2), and pin it to cores. A
group's limits also hold for the groups in it: the smallest limit from the process's own group to the root counts.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """The number of cores that this process may use at the same time, at least 1: the cores that it is pinned to,
    within the quotas of its control groups. `root`: the folder of /proc and /sys.
    """
    pinned = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [text.split() for text in _values(root, "cpu", "cpu.max", "cpu.cfs_quota_us cpu.cfs_period_us")]
    # microseconds of computing per period, and the period in microseconds; `max` or -1: no limit
    limits = [[int(word) for word in words] for words in quotas if all(map(str.isdecimal, words))]
    shares = [limit[0] / limit[1] for limit in limits if len(limit) == 2 and limit[1] > 0]
    return max(1, int(min([pinned, *shares])))


def usable_memory_bytes(root: Path = _ROOT) -> int:
    """The bytes of memory that this process may use: the machine's, or its control groups' limit if that is smaller."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for text in _values(root, "memory", "memory.max", "memory.limit_in_bytes") if text.isdecimal()]
    return min([machine, *limits])


def free_shared_memory_bytes() -> int:
    """The bytes that are left in /dev/shm, for memory that processes share; without it, the usable memory."""
    try:
        shared = os.statvfs("/dev/shm")
    except OSError:
        return usable_memory_bytes()
    return shared.f_bavail * shared.f_frsize


def cpu_model() -> str:
    """The processor's name as its maker writes it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # systems other than Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _values(root: Path, controller: str, file: str, files_of_version_1: str) -> Iterator[str]:
    """The content of the limit files in each of this process's groups for `controller`, innermost group first; several
    files are joined by spaces. Lines of /proc/self/cgroup are `4:memory:/a/b` or, in version 2, `0::/a/b`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # systems other than Linux
        return
    for line in lines:
        number, controllers, path = line.split(":", maxsplit=2)
        if number == "0" and not controllers:
            mounted, names = root / "sys/fs/cgroup", [file]
        elif controller in controllers.split(","):
            mounted, names = root / "sys/fs/cgroup" / controllers, files_of_version_1.split()
        else:
            continue
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            # the root has no limits; a container does not see the groups around it
            with suppress(OSError, ValueError):
                yield " ".join((mounted / folder / name).read_text(encoding="ascii").strip() for name in names)
