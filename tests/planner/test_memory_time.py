"""The curve of memory and time: its front, its bound, and what varies."""

import pytest
from training_runs import TINY, configure

from gpipe_cli.config.typed import NothingFitsError
from gpipe_cli.planner.cost_model import predicted_costs
from gpipe_cli.planner.memory_time import Curve, solve_memory_time

SETTINGS = [*TINY, "batch_size=4", "partitions=2", "hardware=h200"]


@pytest.fixture(scope="module")
def curve() -> Curve:
    profile, plan, curve = solve_memory_time(configure(*SETTINGS), ["partitions", "recompute"], predicted_costs)
    assert curve.fastest.step_seconds == plan.step_seconds
    assert len(profile.costs) == sum(plan.balance)
    return curve


def test_the_front_is_what_nothing_beats(curve: Curve) -> None:
    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one != other and one[0] <= other[0] and one[1] <= other[1]

    places = {(point.memory_bytes, point.step_seconds) for point in curve.points}
    best = {one for one in places if not any(beats(other, one) for other in places)}
    front = [(point.memory_bytes, point.step_seconds) for point in curve.front]
    assert front == sorted(best)
    assert len(front) > 2


def test_no_point_beats_the_bound(curve: Curve) -> None:
    least = min(point.step_seconds for point in curve.points)
    assert 0 < curve.bound.work_seconds < curve.bound.seconds <= least < 1.5 * curve.bound.seconds


def test_the_number_of_devices_stays(curve: Curve) -> None:
    assert {(point.config.partitions, point.stages_per_device) for point in curve.points} == {(2, 1), (4, 2)}
    assert {point.config.micro_batches for point in curve.points} == {1, 2, 3, 4}
    assert {point.placement for point in curve.points} == {"neighbours", "looped", "v"}
    by_hand = configure(*SETTINGS, "partitions=4", "stages_per_process=2", "micro_batches=2", "recompute=never")
    given = ["stages_per_process", "micro_batches", "recompute"]
    _, _, fixed = solve_memory_time(by_hand, given, predicted_costs)
    assert {(point.config.partitions, point.config.recompute) for point in fixed.points} == {(4, "never")}
    assert {point.config.micro_batches for point in fixed.points} == {2}
    assert fixed.devices == curve.devices == 2


def test_points_over_the_limit_are_marked_and_not_chosen(curve: Curve) -> None:
    sizes = sorted(point.memory_bytes for point in curve.points if point.config.micro_batches == 3)
    limit = (sizes[0] + sizes[-1]) / 2 / 2**30
    config, given = configure(*SETTINGS, f"hardware.memory_gib={limit}"), ["micro_batches"]
    _, plan, limited = solve_memory_time(config, given, predicted_costs)
    assert limited.limit_bytes == int(limit * 2**30)
    assert {point.fits for point in limited.points} == {True, False}
    for point in limited.points:
        assert point.fits == (point.memory_bytes <= limited.limit_bytes)
    assert max(plan.device_bytes) == limited.fastest.memory_bytes <= limited.limit_bytes
    assert plan.step_seconds == min(point.step_seconds for point in limited.points if point.fits)
    with pytest.raises(NothingFitsError, match=r"none of \d+ candidates fits 10\.\d KiB on each device; use more than"):
        solve_memory_time(configure(*SETTINGS, "hardware.memory_gib=0.00001"), ["schedule", *given], predicted_costs)
