"""Placement, cut and order searched together: never worse than a named order, and near the best of all of them."""

import random
from collections.abc import Callable
from functools import partial
from itertools import combinations, pairwise

import pytest

from gpipe_cli.pipeline.schedule.dependencies import check
from gpipe_cli.pipeline.schedule.held import Held, peaks_of_devices
from gpipe_cli.pipeline.schedule.joint_search import Balance, Placed, search
from gpipe_cli.pipeline.schedule.partitioner import partition
from gpipe_cli.pipeline.schedule.placement import PLACEMENTS, place
from gpipe_cli.pipeline.schedule.search import Problem, find
from gpipe_cli.pipeline.schedule.simulator import EdgeCost, StageCost

DEVICES, PARTITIONS, LAYERS = 2, 4, 7
EVERY_CUT = [
    tuple(end - first for first, end in pairwise((0, *ends, LAYERS)))
    for ends in combinations(range(1, LAYERS), PARTITIONS - 1)
]


def layers_at_random(seed: int) -> list[StageCost]:
    chance = random.Random(seed)
    layers = []
    for _ in range(LAYERS):
        forward, inputs, weights = (chance.uniform(0.5, 2) for _ in range(3))
        layers.append(StageCost(forward, forward * 1.05, (inputs + weights) * 0.97, inputs, weights))
    return layers


def problem_of(layers: list[StageCost], room: int | None, micro_batches: int, name: str, balance: Balance) -> Problem:
    """A problem of stages that each take as long as their layers together, and hold as much."""
    ends = [sum(balance[: k + 1]) for k in range(len(balance))]
    stages = [
        StageCost(
            *(
                sum(getattr(layer, key) for layer in layers[end - size : end])
                for key in (
                    "forward_seconds", "graph_seconds", "backward_seconds", "inputs_seconds", "weights_seconds",
                )
            )
        )
        for size, end in zip(balance, ends, strict=True)
    ]  # fmt: skip
    sizes = [Held(5 * size, 1, size, 3 * size) for size in balance]
    return Problem(
        stages, [EdgeCost(0.1, 0.1)] * (len(balance) - 1), (), place(name, len(balance), DEVICES), micro_batches, sizes,
        None if room is None else [room] * DEVICES, "never", split=True,
    )  # fmt: skip


@pytest.mark.parametrize(("seed", "room"), [(0, None), (1, None), (4, 60)])
def test_no_named_order_is_faster_and_the_best_of_all_cuts_hardly(seed: int, room: int | None) -> None:
    layers = layers_at_random(seed)
    work = [layer.graph_seconds + layer.backward_seconds for layer in layers]
    exact = partition(work, PARTITIONS, forward_sends=[0.1] * (LAYERS - 1), backward_sends=[0.1] * (LAYERS - 1))
    problems: dict[str, Callable[[Balance], Problem]] = {
        name: partial(problem_of, layers, room, 2, name) for name in PLACEMENTS
    }
    places = [Placed(name, place(name, PARTITIONS, DEVICES), [exact], of) for name, of in problems.items()]
    best, every = search(places, work, range(1, LAYERS))
    assert best is not None
    assert best.seconds <= 1.001 * every[0].seconds
    check(best.tried.schedule)
    found = problems[best.placed.name](best.balance)
    if room is not None:
        held = [[size] * 2 for size in found.sizes]
        assert max(peaks_of_devices(best.tried.schedule, held, found.device_of_stage)) <= room
    named, all_ = [], []
    for name, cut in ((name, cut) for name in PLACEMENTS for cut in EVERY_CUT):
        _, tried = find(problems[name](cut))
        all_ += [one.seconds for one in tried]
        named += [one.seconds for one in tried if one.named and cut == exact]
    assert best.seconds <= 1.001 * min(named)
    assert best.seconds <= 1.02 * min(all_)
    assert search(places, work, range(1, LAYERS))[0] == best
