"""Seconds of layers: by a data sheet, timed, or divided as a user gives them."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
from plan_runs import CUSTOM, EVEN, plan_of, traced
from training_runs import configure

from gpipe_cli.config.settings import load_hardware
from gpipe_cli.errors import format_value
from gpipe_cli.planner.cost_model import (
    MeasuredCosts,
    StepCosts,
    predicted_costs,
    slowdowns,
)
from gpipe_cli.planner.device_rates import (
    DeviceRates,
    rates_of_data_sheet,
)
from gpipe_cli.planner.make_plan import make_plan
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.process_layout import layout_of
from gpipe_cli.schedule.simulator import EdgeCost, StageCost


def by_rates(profile: ModelProfile, rates: DeviceRates, partitions: int = 1) -> StepCosts:
    """The costs of micro-batches of two samples."""
    config = configure(*EVEN, f"partitions={partitions}")
    return predicted_costs(config, profile, layout_of(config), rates)


def test_a_data_sheet_gives_seconds_of_flops_bytes_and_operations() -> None:
    hardware = replace(
        load_hardware("h200"), tflops=2.0, memory_gb_per_second=4.0, operation_microseconds=3.0,
        link_gb_per_second=8.0, link_microseconds=100.0,
    )  # fmt: skip
    costs = by_rates(traced(), rates_of_data_sheet(hardware, threads=8), partitions=2)
    for cost, seconds in zip(traced().costs, costs.layers, strict=True):
        kinds = cost.forward.values()  # each computes and moves bytes at the same time
        expected = sum(
            max(2 * each.flops / 2e12, (2 * each.bytes + each.fixed_bytes) / 4e9) + each.count * 3e-6 for each in kinds
        )
        assert seconds.forward_seconds == seconds.graph_seconds == pytest.approx(expected)
    for cost, edge in zip(traced().costs, costs.edges, strict=False):
        sent = sum(tensor.bytes(2) for tensor in cost.outputs)
        returned = sum(tensor.bytes(2) for tensor in cost.outputs if tensor.has_gradient)
        assert edge.forward_seconds == pytest.approx(1e-4 + sent / 8e9)
        assert edge.backward_seconds == pytest.approx(1e-4 + returned / 8e9)
    alone = by_rates(traced(), rates_of_data_sheet(hardware, threads=8))
    assert {edge.forward_seconds for edge in alone.edges} == {0.0}
    # a CPU's sheet is for one thread
    cpu = replace(load_hardware("cpu"), operation_microseconds=0.0)
    rates = [rates_of_data_sheet(cpu, threads) for threads in (1, 4)]
    one, four = (by_rates(traced(), rate) for rate in rates)
    assert [slow.backward_seconds for slow in one.layers] == pytest.approx(
        [4 * fast.backward_seconds for fast in four.layers]
    )


def test_stages_that_take_turns_take_the_time_of_all() -> None:
    """Two stages in one process are not faster than one."""
    settings = [*EVEN, "recompute=never", "executor=in_process"]
    one, two = (configure(*settings, f"partitions={k}") for k in (1, 2))
    plans = [plan_of(config, traced()) for config in (one, two)]
    assert plans[1].step_seconds == pytest.approx(plans[0].step_seconds)
    assert layout_of(two).concurrent_devices == 1
    assert layout_of(configure(*settings, "partitions=2", "hardware=tpu_v2")).concurrent_devices == 2
    pairs = ["partitions=4", "stages_per_process=2", "executor=auto", "micro_batches=4"]
    config = configure(*settings, *pairs, "hardware=tpu_v2")
    plan = plan_of(config, traced())
    assert plan.device_of_stage == (0, 0, 1, 1)
    assert plan.breakdown.bubble + plan.breakdown.imbalance < 0.5  # of two devices, one of which computes at least
    for first, second in ((0, 1), (2, 3)):  # nothing overlaps
        spans = sorted(
            (s.start_seconds, s.end_seconds) for s in plan.timeline.stages[first] + plan.timeline.stages[second]
        )
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert slowdowns(2, 4) == (1.0, 1.0, 1.5, 2.0)
    assert slowdowns(4, 4) == ()
    # four concurrent processes slow each other down by half, two by a sixth; twice as many also share cores
    expected = (1, 7 / 6, 4 / 3, 1.5, 1.5 * 5 / 4, 1.5 * 6 / 4, 1.5 * 7 / 4, 3.0)
    assert slowdowns(4, 8, 1.5, 4) == pytest.approx(expected)


def timed(*values: float) -> MeasuredCosts:
    """All layers alike: `values` of a micro-batch of two samples, and of one of 8 three times as many seconds."""
    count = len(traced().costs)
    sizes = [values] * count, [tuple(3 * value for value in values)] * count
    return MeasuredCosts((2, 8), sizes, [0.1] * count, 0.25, 1.2, 3, (8, 2.0), 0.5, 1e-6)


def test_timed_layers_are_lines_in_samples_and_slow_each_other_down_in_proportion() -> None:
    config = configure(*EVEN, "partitions=3")
    layout = replace(layout_of(config), concurrent_devices=3)
    predicted = partial(predicted_costs, config, traced(), layout)
    costs = predicted(timed(1.0, 2.0, 3.0))
    assert costs.layers[0] == StageCost(1.0, 2.0, 3.0), "of micro-batches of two samples"
    assert costs.slowdown[:3] == pytest.approx((1.0, 1.1, 1.2))
    assert (costs.updates[0], costs.set_up) == (0.1, 0.25)
    sent = sum(tensor.bytes(2) for tensor in traced().costs[0].outputs)
    assert costs.edges[0].forward_seconds == pytest.approx(0.5 + sent * 1e-6)
    for samples, forward in ((1, 2 / 3), (5, 2.0), (8, 3.0), (32, 11.0)):
        assert predicted(timed(1.0, 2.0, 3.0), samples=samples).layers[0].forward_seconds == pytest.approx(forward)
    faster = replace(timed(1.0, 2.0, 3.0), samples=(4, 8))  # than in proportion: no layer takes less than nothing
    assert predicted(faster, samples=1).layers[0].forward_seconds == pytest.approx(0.25)
    costs = predicted_costs(config, traced(), replace(layout, threads=8), timed(1.0, 2.0, 3.0))  # all of the machine
    assert (costs.layers[0], costs.updates[0]) == (StageCost(0.5, 1.0, 1.5), 0.05)
    alone = configure(*EVEN, "partitions=1", "threads=1")
    costs = predicted_costs(alone, traced(), layout_of(alone), timed(1.0, 2.0, 3.0))
    assert (costs.slowdown[0], costs.edges[0]) == (1.0, EdgeCost(0.0, 0.0))


def test_the_halves_of_backwards() -> None:
    """By rates and as measured; 0 where they are not split."""
    rates = rates_of_data_sheet(replace(load_hardware("h200"), operation_microseconds=0.0), threads=8)
    profile = profile_model(configure(*EVEN, "schedule=zero_bubble"))
    costs = by_rates(profile, rates)
    for cost, seconds in zip(profile.costs, costs.layers, strict=True):
        assert cost.split_backward is not None
        assert seconds.inputs_seconds == pytest.approx(rates.seconds(cost.split_backward.inputs, 2))
        assert seconds.weights_seconds == pytest.approx(rates.seconds(cost.split_backward.weights, 2))
        both = seconds.inputs_seconds + seconds.weights_seconds
        assert 0 < seconds.weights_seconds < seconds.backward_seconds < 1.5 * both
        assert cost.split_backward.inputs.flops + cost.split_backward.weights.flops == pytest.approx(
            cost.backward.flops
        )
    whole = by_rates(traced(), rates).layers
    assert all((seconds.inputs_seconds, seconds.weights_seconds) == (0.0, 0.0) for seconds in whole)
    config = configure(*EVEN, "partitions=1")
    costs = predicted_costs(config, profile, layout_of(config), timed(1.0, 2.0, 3.0, 2.5, 1.0))
    assert costs.layers[0] == StageCost(1.0, 2.0, 3.0, 2.5, 1.0)


def test_the_users_costs_of_layers_decide_the_cut() -> None:
    """The paper's optional c_i (section 2.1), on the command line or as an attribute of each layer."""
    given = [1, 0, 0, 1, 0.5, 0, 0.5, 3]
    costs, balances = [], []
    for setting in ("", f"partition.costs={format_value(given)}", f"+model.arguments.costs={format_value(given)}"):
        settings = (*CUSTOM, "partitions=2", *[setting] * bool(setting))
        config, profile = configure(*settings), traced(*settings)
        costs.append(predicted_costs(config, profile, layout_of(config)))
        balances.append(make_plan(config, profile, costs[-1], layout_of(config)).balance)
    assert [found.weighted_by for found in costs] == ["", "partition.costs", "gpipe_cost of the layers"]
    assert balances[0] != (7, 1)
    assert balances[1:] == [(7, 1), (7, 1)]
    work = [[layer.graph_seconds + layer.backward_seconds for layer in found.layers] for found in costs]
    assert work[1] == work[2] == pytest.approx([sum(work[0]) * cost / 6 for cost in given])


def test_a_step_is_predicted_as_a_range_where_timings_scatter() -> None:
    """On a machine that other programs use, eight timings in a row predicted steps of 152 to 548 ms, each as a single
    number."""
    steady = plan_of(configure(*EVEN), traced())
    assert steady.step_range is None
    for scatter, expected in (((0.97, 1.04), None), ((0.8, 1.5), (0.8, 1.5)), ((1.2, 2.0), (1.0, 2.0))):
        plan = replace(steady, costs=replace(steady.costs, rates=replace(timed(1.0, 2.0, 3.0), scatter=scatter)))
        assert plan.step_range == (expected and tuple(part * plan.step_seconds for part in expected))
