"""The printed lower bound of a step: no schedule beats it, and a known one attains it."""

import random
from itertools import product

import pytest

from gpipe_cli.pipeline.schedule.lower_bound import lower_bound
from gpipe_cli.pipeline.schedule.named_schedules import order
from gpipe_cli.pipeline.schedule.placement import place
from gpipe_cli.pipeline.schedule.simulator import StageCost, simulate

Moment = tuple[frozenset[tuple[str, int, int]], tuple[tuple[str, int, int, int] | None, ...]]


def shortest(layers: list[StageCost], device_of_layer: tuple[int, ...], micro_batches: int, split: bool) -> int:
    """The fewest ticks of any order of the actions, waits included, by a search through all moments of a step."""
    last, devices = len(layers) - 1, range(1 + max(device_of_layer))
    seconds = {"F": "forward_seconds", "B": "backward_seconds", "I": "inputs_seconds", "W": "weights_seconds"}
    backward = "I" if split else "B"
    actions = [(kind, k, m) for kind in ("FIW" if split else "FB") for k in range(last + 1) for m in range(micro_batches)]

    def needs(kind: str, k: int, m: int) -> tuple[str, int, int] | None:
        if kind == "F":
            return ("F", k - 1, m) if k else None
        if kind == "W":
            return "I", k, m
        return (backward, k + 1, m) if k < last else ("F", k, m)

    def starts(done: frozenset[tuple[str, int, int]], running: tuple, device: int) -> list:  # type: ignore[type-arg]
        if running[device] is not None:
            return [running[device]]
        free = [
            (*a, int(getattr(layers[a[1]], seconds[a[0]])))
            for a in actions
            if device_of_layer[a[1]] == device and a not in done and (needs(*a) is None or needs(*a) in done)
        ]
        return [*free, None]

    moments: set[Moment] = {(frozenset(), (None,) * len(devices))}
    for tick in range(1000):
        if any(len(done) == len(actions) for done, _ in moments):
            return tick
        after = set()
        for done, running in moments:
            for chosen in product(*(starts(done, running, device) for device in devices)):
                ended = {one[:3] for one in chosen if one and one[3] == 1}
                left = tuple((*one[:3], one[3] - 1) if one and one[3] > 1 else None for one in chosen)
                after.add((done | ended, left))
        moments = after
    raise AssertionError("no end")


@pytest.mark.parametrize("split", [False, True])
def test_no_order_on_any_placement_beats_it(split: bool) -> None:
    draw = random.Random(1)
    for _ in range(3):
        layers = []
        for _ in range(3):
            forward, inputs, weights = draw.randint(1, 3), draw.randint(1, 2), draw.randint(1, 2)
            layers.append(StageCost(forward, forward, inputs + weights, inputs, weights))
        bound = lower_bound(layers, 2, 2, split=split)
        best = min(shortest(layers, (0, *others), 2, split) for others in product((0, 1), repeat=2))
        assert bound.work_seconds <= bound.seconds <= best
        assert bound.seconds > 0.6 * best


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 4), (4, 4), (4, 8), (8, 8), (8, 32)])
def test_equal_stages_attain_it(devices: int, micro_batches: int) -> None:
    """Whole backwards in `1f1b`, and split ones on the way there and back of a V."""
    whole = [StageCost(1, 1, 2)] * devices
    step = simulate(order("1f1b", devices, micro_batches), whole).step_end_seconds
    assert lower_bound(whole, devices, micro_batches).seconds == step == 3 * (micro_batches + devices - 1)

    halves = [StageCost(1, 1, 2, 1, 1)] * (2 * devices)
    v = place("v", 2 * devices, devices)
    step = simulate(order("zero_bubble", 2 * devices, micro_batches), halves, device_of_stage=v).step_end_seconds
    assert lower_bound(halves, devices, micro_batches, split=True).seconds == step == 6 * micro_batches + devices - 1


def test_updates_and_devices_that_slow_each_other_down_count() -> None:
    layers = [StageCost(1, 1, 2, update_seconds=at) for at in (0.5, 0.25, 0.0, 1.5)]
    for slowdown in ((), (1.0, 1.5), (1.0, 1.0, 1.25)):
        bound = lower_bound(layers, 4, 3, slowdown)
        steps = [simulate(order(name, 4, 3), layers, (), slowdown).step_end_seconds for name in ("gpipe", "1f1b")]
        assert bound.seconds <= min(steps) < 1.4 * bound.seconds
    core = (1.0, 2.0, 3.0, 4.0)  # one, which all devices share
    assert lower_bound(layers, 4, 3, core).work_seconds == lower_bound(layers, 1, 3).seconds == 4 * 3 * 3 + 2.25
