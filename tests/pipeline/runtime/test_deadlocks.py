"""No order of launches deadlocks where a send is a kernel that runs until its tensor is received, a collective one that
runs until all replicas take part, and any launch may wait for an idle device, as when a kernel is first loaded.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import ordered_links
import pytest
import torch
import torch.distributed as dist
from random_orders import random_orders

from gpipe_cli.pipeline.runtime import replicas as module
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.schedule.named_schedules import SCHEDULES, build, forward_only
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Schedule


class Group:
    """A process's end of the group of its replicas, whose collectives run one after another."""

    def __init__(self, links: Any, device: Any, process: int, members: Sequence[int], *, idle: bool) -> None:
        self._links, self._device, self._rank, self._members = links, device, process, tuple(members)
        self._idle, self._begun = idle, 0

    def collective(self, size: int) -> Any:
        if self._idle:  # the launch of the copy into what is sent
            self._device.wait(lambda: self._device.idle(self._rank))
        operation = self._links.Operation(("sum", self._begun, size), [], self._members, self._device)
        self._begun += 1
        self._device.put(self._rank, self._members, operation)
        return operation


def begin(*given: Any, group: Any = None, async_op: bool = True) -> Any:
    return (given[-1] if group is None else group).collective(given[1].numel())


def gather(parts: Sequence[torch.Tensor], part: torch.Tensor, group: Any) -> None:
    for one in parts:
        one.copy_(part)
    group.collective(part.numel()).wait()


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(dist, "all_to_all_single", begin)
    monkeypatch.setattr(dist, "all_gather", gather)
    monkeypatch.setattr(module, "_all_gather", begin)
    return ordered_links


def finishes(links: Any, schedules: Sequence[Schedule], of_stage: Sequence[int], idle: float, **settings: Any) -> bool:
    many = 1 + max(of_stage)

    def sums(device: Any, replica: int, process: int) -> Replicas:
        members = range(process, many * len(schedules), many)
        group: Any = Group(links, device, replica * many + process, members, idle=idle > 0)
        replicas = Replicas({torch.device("cpu"): group}, len(schedules))
        replicas.connect(1)
        return replicas

    wanted = {"post_eagerly": False, "idle": idle, "sums": sums if len(schedules) > 1 else None}
    found: bool = links.finishes(schedules, of_stage, **wanted | settings)
    return found


@pytest.mark.parametrize("idle", [0, 0.5, 1], ids=["at once", "any", "idle"])
@pytest.mark.parametrize("name", [*SCHEDULES, "evaluation"])
def test_no_order_of_launches_deadlocks(name: str, idle: float, links: Any) -> None:
    """Nor with skips, nor with replicas that have unequal numbers of micro-batches, or no samples. Stages are one or
    two for each process. Each combination has one of the shares `idle`."""
    unequal = [(4, 3), (1, 0), (3, 0, 2)] if name in SCHEDULES else []
    combinations = list(product([(1,), (4,), (6,), *unequal], [(2, 1), (3, 1), (4, 1), (4, 2)]))
    for counts, (partitions, each) in combinations[int(2 * idle) :: 3]:
        processes, recompute = partitions // each, RECOMPUTE_MODES[sum(counts) % len(RECOMPUTE_MODES)]
        of_stage = [stage % processes if name == "interleaved" else stage // each for stage in range(partitions)]
        schedules = [
            build(name, partitions, count, recompute, processes)
            if count and name in SCHEDULES
            else forward_only(partitions, count)
            for count in counts
        ]
        assert finishes(links, schedules, of_stage, idle), (partitions, each, counts)
        if partitions > 2 and counts in [(1,), (4,), (4, 3), (3, 0, 2)]:
            skips = [(0, partitions - 1), (0, 2), *([(1, 3)] if partitions > 3 else [])]
            assert finishes(links, schedules, of_stage, idle, skips=sorted({*skips})), (partitions, each, counts)


@pytest.mark.parametrize("idle", [0, 0.5, 1], ids=["at once", "any", "idle"])
def test_no_random_order_deadlocks(idle: float, links: Any) -> None:
    """Whichever process has which stages: several edges join the same two processes, in both directions, and two stages
    of an edge may be in the same one."""
    for one in list(random_orders(100, seed=0))[int(2 * idle) :: 3]:
        assert finishes(links, [one.schedule], one.device_of_stage, idle), one


BEGIN, CONNECT = Replicas.begin_step, P2PTransport._connect


def process_of(replicas: Replicas) -> int:
    group: Any = next(iter(replicas.groups.values()))
    return int(group._rank)


def without_its_part(self: Replicas, stages: Any) -> None:
    BEGIN(self, stages)
    if process_of(self) == 1:
        self._buckets = []


def in_another_order(self: Replicas, stages: Any) -> None:
    BEGIN(self, stages)
    if process_of(self) == 1:
        self._buckets.sort(key=lambda bucket: bucket.stage)


def in_its_own_order(self: P2PTransport, seconds: float) -> None:
    """Connects one edge after the other, in an odd process in another order."""
    links = self._links
    for edge in sorted(links, reverse=self._rank % 2 == 1):
        self._links = {edge: links[edge]}
        CONNECT(self, seconds)
    self._links = links


@pytest.mark.parametrize(
    ("counts", "right", "wrong"),
    [
        pytest.param([4], {}, {"post_eagerly": True}, id="receives are posted early"),
        pytest.param(  # receives in the common order of actions could share it
            [4], {"post_eagerly": True, "idle": 0}, {"group_of": lambda edge: min(edge[1:])},
            id="both directions of an edge share a group",
        ),
        pytest.param([4], {}, (P2PTransport, "_connect", in_its_own_order), id="edges connect in different orders"),
        pytest.param(
            [4, 4], {}, (Replicas, "begin_step", in_another_order), id="replicas sum stages in different orders"
        ),
        pytest.param(
            [4, 0], {}, (Replicas, "begin_step", without_its_part), id="a replica without samples does not take part"
        ),
    ],
)  # fmt: skip
def test_a_planted_deadlock_is_found(
    counts: list[int],
    right: dict[str, Any],
    wrong: dict[str, Any] | tuple[type, str, Callable[..., None]],
    links: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`wrong`: other settings, or a method in the place of another one."""
    schedules = [build("1f1b", 3, count, "never") if count else forward_only(3, 0) for count in counts]
    of_stage = [0, 0, 0] if len(counts) > 1 else [0, 1, 2]
    settings = {"idle": 1} | right
    assert finishes(links, schedules, of_stage, **settings)
    if isinstance(wrong, tuple):
        monkeypatch.setattr(*wrong)
    else:
        settings |= wrong
    assert not finishes(links, schedules, of_stage, **settings)
