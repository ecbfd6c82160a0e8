"""Cores and memory as control groups of both versions limit them, read from files as Linux has them."""

import os
from pathlib import Path

import pytest

from gpipe_cli.system.machine import usable_cores, usable_memory_bytes

GIB = 2**30
MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A machine that has these files below /sys/fs/cgroup, and a process in `groups`."""
    for name, content in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content + "\n", encoding="ascii")
    return root


@pytest.fixture(autouse=True)
def _eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


VERSION_1 = "5:cpu,cpuacct:/job\n4:memory:/job/step\n1:name=systemd:/"


@pytest.mark.parametrize(
    ("groups", "files", "cores", "memory"),
    [
        ("0::/", {"cpu.max": "250000 100000", "memory.max": "268435456"}, 2, GIB // 4),
        # the smallest limit on the way to the root
        ("0::/a/b", {"a/b/cpu.max": "600000 100000", "a/cpu.max": "300000 100000", "a/memory.max": "4096"}, 3, 4096),
        (
            VERSION_1,
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "400000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "memory/job/step/memory.limit_in_bytes": "9223372036854771712",
                "memory/job/memory.limit_in_bytes": "8192",
            },
            4,
            8192,
        ),
        # as in a container: the group's own folder is what is mounted
        (VERSION_1, {"memory/memory.limit_in_bytes": "16384"}, 8, 16384),
    ],
)
def test_limits_of_control_groups(tmp_path: Path, groups: str, files: dict[str, str], cores: int, memory: int) -> None:
    root = machine(tmp_path, groups, files)
    assert (usable_cores(root), usable_memory_bytes(root)) == (cores, memory)


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert (usable_cores(tmp_path), usable_memory_bytes(tmp_path)) == (8, MACHINE_BYTES)
    assert 1 <= usable_cores() <= 8
    assert 0 < usable_memory_bytes() <= MACHINE_BYTES
