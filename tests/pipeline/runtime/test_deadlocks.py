"""No order of launches deadlocks where a send is a kernel that runs until its tensor is received, a collective one that
runs until all replicas take part, and any launch may wait for an idle device, as when a kernel is first loaded.

The simulated device is that of recipes/measurements/link_order.py, which tries all sizes; here are small ones.
"""

import importlib
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpipe_cli.pipeline.runtime import replicas as module
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.schedule.named_schedules import SCHEDULES, build, forward_only
from gpipe_cli.pipeline.schedule.schedule import Schedule

FOLDER = Path(__file__).parents[3] / "recipes" / "measurements"


class Group:
    """A process's end of the group of its replicas, whose collectives run one after another."""

    def __init__(self, links: Any, device: Any, process: int, members: Sequence[int]) -> None:
        self._links, self._device, self._process, self._members = links, device, process, tuple(members)
        self._begun = 0

    def collective(self, size: int) -> Any:
        operation = self._links.Operation(("sum", self._begun, size), [], self._members, self._device)
        self._begun += 1
        self._device.put(self._process, self._members, operation)
        return operation


def begin(*given: Any, group: Any = None, async_op: bool = True) -> Any:
    return (given[-1] if group is None else group).collective(given[1].numel())


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr(dist, "all_to_all_single", begin)
    monkeypatch.setattr(module, "_all_gather", begin)
    monkeypatch.setattr(Replicas, "_found_in_any", lambda self: {one for of in self._buckets for one in of.parameters})
    return importlib.import_module("link_order")


def finishes(links: Any, schedules: Sequence[Schedule], processes: Sequence[int], idle: bool, **settings: Any) -> bool:
    many = 1 + max(processes)

    def sums(device: Any, replica: int, process: int) -> Replicas:
        members = range(process, many * len(schedules), many)
        group: Any = Group(links, device, replica * many + process, members)
        return Replicas({torch.device("cpu"): group}, len(schedules))

    found: bool = links.finishes(schedules, processes, **{"early": False, "idle": idle, "sums": sums} | settings)
    return found


@pytest.mark.parametrize("idle", [False, True], ids=["at once", "idle"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_replicas_with_unequal_numbers_of_micro_batches_do_not_deadlock(name: str, idle: bool, links: Any) -> None:
    """Also if one of them has no samples. Stages are one or two for each process."""
    for (partitions, each), counts in product(
        [(2, 1), (3, 1), (4, 2), (4, 1)], [(6,), (5,), (4, 3), (2, 2, 1), (1, 0), (3, 0, 2)]
    ):
        processes = partitions // each
        looped = name == "interleaved"
        of_stage = [stage % processes if looped else stage // each for stage in range(partitions)]
        schedules = [
            build(name, partitions, count, "except_last", processes) if count else forward_only(partitions, 0)
            for count in counts
        ]
        assert finishes(links, schedules, of_stage, idle), (partitions, each, counts)


BEGIN = Replicas.begin_step


def process_of(replicas: Replicas) -> int:
    group: Any = next(iter(replicas.groups.values()))
    return int(group._process)


def without_its_part(self: Replicas, stages: Any) -> None:
    BEGIN(self, stages)
    if process_of(self) == 1:
        self._buckets = []


def in_another_order(self: Replicas, stages: Any) -> None:
    BEGIN(self, stages)
    if process_of(self) == 1:
        self._buckets.sort(key=lambda bucket: bucket.stage)


@pytest.mark.parametrize(
    ("fault", "begin_step"),
    [
        ("receives are posted early", None),
        ("a replica does not take part", without_its_part),
        ("a replica sums its stages in another order", in_another_order),
    ],
)
def test_a_planted_deadlock_is_found(fault: str, begin_step: Any, links: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, of_stage = build("1f1b", 3, 4, "never"), [0, 1, 2]
    if begin_step is None:
        assert not finishes(links, [schedule], of_stage, True, early=True)
        return
    monkeypatch.setattr(Replicas, "begin_step", begin_step)
    assert not finishes(links, [schedule] * 2, [0, 0, 0], True)
