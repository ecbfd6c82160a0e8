"""Whatever is legal runs, and gives the same bits: 100 random orders on random placements, of up to 8 stages on up to 4
devices. That none deadlocks over links is shown by runtime/test_deadlocks.py."""

import random
from collections import defaultdict
from functools import cache
from itertools import pairwise

import pytest
import torch
from engine_runs import SumOfSquares, build_stages, local_transport
from random_orders import RandomOrder, mixed_anew, random_orders
from schedule_runs import build
from torch import nn
from training_runs import assert_same_tensors

from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import as_boundary
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.schedule.dependencies import ScheduleError, check, topological_order
from gpipe_cli.schedule.schedule import Action, Kind, Schedule
from gpipe_cli.schedule.simulator import EdgeCost, StageCost, simulate

ORDERS = list(random_orders(100, seed=0))
LAYERS, WIDTH, SAMPLES = 8, 4, 3  # samples of a micro-batch


class Layer(nn.Module):
    """What makes bits depend on the order of actions, if anything does: dropout, and statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.dropout(self.norm(self.linear(x).tanh()))
        return result


@cache
def stages_of(partitions: int) -> dict[int, Stage]:
    """A model cut in equal parts; every run begins with the same weights."""
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    costs = trace_layers(model, as_boundary((torch.empty(2, WIDTH),)), training=True)
    return build_stages(model, costs, micro_batch_sizes(LAYERS, partitions), here=range(partitions))


def trained(schedule: Schedule, device_of_stage: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The gradients and statistics after a step."""
    stages = stages_of(len(device_of_stage))
    for stage in stages.values():
        stage.module.zero_grad()
        for module in stage.module.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.reset_running_stats()
    executor = Executor(stages, device_of_stage, local_transport(stages))
    sizes = [SAMPLES] * schedule.micro_batches
    inputs = torch.randn(sum(sizes), WIDTH, generator=torch.Generator().manual_seed(0))
    executor.run(schedule, 0, sizes, (inputs,), SumOfSquares())
    found: dict[str, torch.Tensor] = {}
    for stage in stages.values():
        found |= {name: buffer.clone() for name, buffer in stage.module.named_buffers()}
        for name, parameter in stage.module.named_parameters():
            assert parameter.grad is not None
            found[f"gradient {name}"] = parameter.grad
    return found


@cache
def whole(micro_batches: int) -> dict[str, torch.Tensor]:
    return trained(build("1f1b", 1, micro_batches, "never"), (0,))


@pytest.mark.parametrize("part", range(3))
def test_check_simulator_and_executor_agree(part: int) -> None:
    """What passes the check is simulated to its end and performed, each action once and on each device in the same
    order, with the bits of one partition."""
    chance = random.Random(part)
    for one in ORDERS[part::3]:
        schedule, device_of_stage = one.schedule, one.device_of_stage
        check(schedule)
        order = topological_order(schedule, device_of_stage)
        actions = [a for row in schedule for a in row]
        assert sorted(order) == sorted(actions)
        assert len({*actions}) == len(actions)
        of_devices = {device: [a for a in order if device_of_stage[a.stage] == device] for device in device_of_stage}
        assert_simulated(one, of_devices, chance)
        assert_same_tensors(trained(schedule, device_of_stage), whole(schedule.micro_batches))


def assert_simulated(one: RandomOrder, of_devices: dict[int, list[Action]], chance: random.Random) -> None:
    """The simulation performs these actions of each device in their order, none before what it needs has arrived."""
    stages = [StageCost(*(chance.randint(1, 9) for _ in range(5))) for _ in one.device_of_stage]
    neighbours = pairwise(range(len(stages)))
    edges = {ends: EdgeCost(chance.randint(0, 5), chance.randint(0, 5)) for ends in neighbours}
    timeline = simulate(one.schedule, stages, edges, device_of_stage=one.device_of_stage)
    spans = {span.action: span for stage in timeline.stages for span in stage}
    for device, actions in of_devices.items():
        performed = sorted(
            (span for span in spans.values() if one.device_of_stage[span.action.stage] == device),
            key=lambda span: span.start_seconds,
        )
        assert [span.action for span in performed] == actions
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(performed))
    for action, span in spans.items():
        if (needed := one.schedule.source(action)) is not None:
            apart = one.device_of_stage[needed.stage] != one.device_of_stage[action.stage]
            edge = edges[min(needed.stage, action.stage), max(needed.stage, action.stage)]
            seconds = edge.forward_seconds if action.kind is Kind.F else edge.backward_seconds
            assert span.start_seconds >= spans[needed].end_seconds + seconds * apart


def can_end(schedule: Schedule) -> bool:
    """Whether devices that perform their rows come to the end, tried one action after another."""
    done, at = set[Action](), [0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for number, row in enumerate(schedule):
            while at[number] < len(row) and schedule.source(row[at[number]]) in {None, *done}:
                done.add(row[at[number]])
                at[number] += 1
                moved = True
    return at == list(map(len, schedule))


def test_what_cannot_end_is_refused() -> None:
    """Orders whose devices mix their stages differently deadlock or not: check, simulator and `topological_order` agree
    with a trial, and what is legal has the same bits. An action out of its stage's order is also an error."""
    chance, found = random.Random(1), defaultdict[bool, int](int)
    for one in ORDERS:
        schedule = mixed_anew(one, chance)
        legal = can_end(schedule)
        found[legal] += 1
        stages = [StageCost(1, 1, 2, 1, 1)] * len(one.device_of_stage)
        if legal:
            check(schedule)
            timeline = simulate(schedule, stages)
            assert sum(map(len, timeline.stages)) == sum(map(len, schedule))
            continue
        for attempt in (check, topological_order, lambda schedule: simulate(schedule, stages)):  # noqa: B023
            with pytest.raises(ScheduleError, match="deadlock"):
                attempt(schedule)
    assert min(found.values()) > 15
    for one in ORDERS:  # an action before one that it needs on its own stage, or with the order of an edge broken
        rows = [list(row) for row in one.schedule]
        row = chance.choice([row for row in rows if row])
        stage = chance.choice(row).stage
        own = [at for at, action in enumerate(row) if action.stage == stage]
        row.insert(own[0], row.pop(own[-1]))  # the last action is a backward or a W
        with pytest.raises(ScheduleError):
            check(Schedule(map(tuple, rows)))
