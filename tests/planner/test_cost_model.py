"""Seconds of layers: by a data sheet, by fitted rates, measured, or shared out as a user says."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from networks import as_boundary
from plan_runs import CUSTOM, EVEN, plan_of, traced
from torch import nn
from training_runs import configure

from gpipe_cli.benchmark import reference_layers
from gpipe_cli.config.settings import load_hardware
from gpipe_cli.config.typed import show
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.profile.layer_cost import OperationKind, Operations, Work
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.schedule.simulator import EdgeCost
from gpipe_cli.planner import cost_model
from gpipe_cli.planner.cost_model import (
    LayerSeconds,
    LayerTimes,
    StepCosts,
    measured_costs,
    predicted_costs,
    slowdowns,
)
from gpipe_cli.planner.device_rates import (
    COMPUTING,
    CONVOLUTIONS,
    DeviceRates,
    Figures,
    Rates,
    computes_in,
    fit_rates,
    rates_of_sheet,
    reached_tflops,
)
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import make_plan


def by_rates(profile: ModelProfile, rates: DeviceRates, partitions: int = 1) -> StepCosts:
    """The costs of micro-batches of two samples."""
    config = configure(*EVEN, f"partitions={partitions}")
    return predicted_costs(config, profile, layout_of(config), rates)


def test_a_data_sheet_gives_seconds_of_flops_bytes_and_operations() -> None:
    hardware = replace(
        load_hardware("h200"), tflops=2.0, memory_gb_per_second=4.0, operation_microseconds=3.0,
        link_gb_per_second=8.0, link_microseconds=100.0,
    )  # fmt: skip
    costs = by_rates(traced(), rates_of_sheet(hardware, threads=8), partitions=2)
    for cost, seconds in zip(traced().costs, costs.layers, strict=True):
        kinds = cost.forward.by_kind.values()  # each computes and moves bytes at the same time
        expected = sum(
            max(2 * each.flops / 2e12, (2 * each.bytes + each.fixed_bytes) / 4e9) + each.count * 3e-6 for each in kinds
        )
        assert seconds.forward == seconds.graph == pytest.approx(expected)
    for cost, edge in zip(traced().costs, costs.edges, strict=False):
        sent = sum(tensor.bytes(2) for tensor in cost.outputs)
        returned = sum(tensor.bytes(2) for tensor in cost.outputs if tensor.has_gradient)
        assert edge.forward_seconds == pytest.approx(1e-4 + sent / 8e9)
        assert edge.backward_seconds == pytest.approx(1e-4 + returned / 8e9)
    alone = by_rates(traced(), rates_of_sheet(hardware, threads=8))
    assert {edge.forward_seconds for edge in alone.edges} == {0.0}
    # a CPU's sheet is that of one thread
    cpu = replace(load_hardware("cpu"), operation_microseconds=0.0)
    rates = [rates_of_sheet(cpu, threads) for threads in (1, 4)]
    one, four = (by_rates(traced(), rate) for rate in rates)
    assert [slow.backward for slow in one.layers] == pytest.approx([4 * fast.backward for fast in four.layers])


def test_convolutions_reach_less_of_tensor_cores_than_products() -> None:
    """And no less than in float32, of which a GeForce's TF32 is no faster."""
    for name, precision, products, convolutions in (
        ("a100_80", "float32", 15.5, 15.5),
        ("a100_80", "tf32", 15.5 * 156 / 19.5, 0.46 * 156),
        ("a100_80", "bfloat16", 15.5 * 312 / 19.5, 0.46 * 312),
        ("rtx_4090", "tf32", 50.0, 50.0),
        ("tpu_v3", "bfloat16", 30.0, 30.0),
        ("v100", "bfloat16", 9.4, 9.4),
    ):
        flop = rates_of_sheet(load_hardware(name), 1, precision).forward.flop  # type: ignore[arg-type]
        assert 1e-12 / flop[OperationKind.PRODUCT] == pytest.approx(products)
        assert 1e-12 / flop[OperationKind.CONVOLUTION] == pytest.approx(convolutions)
        assert 1e-12 / flop[OperationKind.NARROW] == pytest.approx(load_hardware(name).tflops)


@pytest.mark.parametrize(
    ("names", "tf32", "bfloat16"),
    [
        ("a100_40 a100_80 gh200 h100 h200 l4 l40s rtx_4090 auto", "tf32", "bfloat16"),
        ("p40 p100_pcie t4 v100", "float32", "emulated"),
        ("tpu_v2 tpu_v3 cpu", "float32", "bfloat16"),
    ],
)
def test_a_device_says_what_it_computes_in(names: str, tf32: str, bfloat16: str) -> None:
    """bfloat16 was said not to be on CPUs and TPUs, and on an H100 with `hardware.bfloat16_tflops=null`."""
    for name in names.split():
        found = computes_in(name, "float32"), computes_in(name, "tf32"), computes_in(name, "bfloat16")
        assert found == ("float32", tf32, bfloat16)
        sheet = load_hardware(name)
        if tf32 == "float32":  # no precision is faster than another one there; the peak of a TPU is that of bfloat16
            assert {reached_tflops(sheet, one) for one in ("float32", "tf32", "bfloat16")} == {sheet.tflops}


def test_stages_that_take_turns_take_the_time_of_all() -> None:
    """Two stages in one process are no faster than one."""
    settings = [*EVEN, "recompute=never", "executor=in_process"]
    one, two = (configure(*settings, f"partitions={k}") for k in (1, 2))
    plans = [plan_of(config, traced()) for config in (one, two)]
    assert plans[1].step_seconds == pytest.approx(plans[0].step_seconds)
    assert layout_of(two).at_once == 1
    assert layout_of(configure(*settings, "partitions=2", "hardware=tpu_v2")).at_once == 2
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
    # four processes at once slow each other down by half, two by a sixth; twice as many take turns besides
    expected = (1, 7 / 6, 4 / 3, 1.5, 1.5 * 5 / 4, 1.5 * 6 / 4, 1.5 * 7 / 4, 3.0)
    assert slowdowns(4, 8, 1.5, 4) == pytest.approx(expected)


def test_an_unknown_gpu_is_cut_by_another_ones_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "resolved", lambda hardware, device: hardware)
    costs = predicted_costs(config := configure(*EVEN), traced(), layout_of(config))
    assert costs.basis == "other_device"
    assert min(seconds.backward for seconds in costs.layers) > 0


def test_measured_layers_slow_each_other_down_in_proportion() -> None:
    count = len(traced().costs)
    times = LayerTimes([(1.0, 2.0, 3.0)] * count, [(1.2, 2.4, 3.6)] * count, [0.1] * count, 0.25, (0.5, 1e6))
    costs = measured_costs(traced(), 2, 3, times)
    assert costs.slowdown[:3] == pytest.approx((1.0, 1.1, 1.2))
    sent = sum(tensor.bytes(2) for tensor in traced().costs[0].outputs)
    assert costs.edges[0].forward_seconds == pytest.approx(0.5 + sent / 1e6)
    fewer = measured_costs(traced(), 1.5, 3, times)  # a mean: two were timed
    assert fewer.layers[0] == LayerSeconds(0.75, 1.5, 2.25)
    assert fewer.updates == costs.updates
    assert fewer.edges[0].forward_seconds == pytest.approx(0.5 + 0.75 * sent / 1e6)
    alone = measured_costs(traced(), 2, 1, replace(times, together=None, link=None))
    assert (alone.slowdown[:2], alone.edges[0]) == ((1.0, 2.0), EdgeCost(0.0, 0.0))


def test_the_halves_of_backwards() -> None:
    """By rates and as measured; 0 where they are not split."""
    rates = rates_of_sheet(replace(load_hardware("h200"), operation_microseconds=0.0), threads=8)
    profile = profile_model(configure(*EVEN, "schedule=zero_bubble"))
    costs = by_rates(profile, rates)
    for cost, seconds in zip(profile.costs, costs.layers, strict=True):
        assert cost.halves is not None
        assert seconds.inputs == pytest.approx(rates.backward.seconds(cost.halves.inputs, 2))
        assert seconds.weights == pytest.approx(rates.backward.seconds(cost.halves.weights, 2))
        assert 0 < seconds.weights < seconds.backward < 1.5 * (seconds.inputs + seconds.weights)
        assert cost.halves.inputs.flops + cost.halves.weights.flops == pytest.approx(cost.backward.flops)
    whole = by_rates(traced(), rates).layers
    assert all((seconds.inputs, seconds.weights) == (0.0, 0.0) for seconds in whole)
    count = len(profile.costs)
    times = LayerTimes([(1.0, 2.0, 3.0, 2.5, 1.0)] * count, None, [0.1] * count, 0.25, None)
    assert measured_costs(profile, 1.5, 1, times).layers[0] == LayerSeconds(0.75, 1.5, 2.25, 1.875, 0.75)


def test_the_users_costs_of_layers_decide_the_cut() -> None:
    """The paper's optional c_i (section 2.1), on the command line or as an attribute of each layer."""
    given = [1, 0, 0, 1, 0.5, 0, 0.5, 3]
    costs, balances = [], []
    for setting in ("", f"partition.costs={show(given)}", f"+model.arguments.costs={show(given)}"):
        settings = (*CUSTOM, "partitions=2", *[setting] * bool(setting))
        config, profile = configure(*settings), traced(*settings)
        costs.append(predicted_costs(config, profile, layout_of(config)))
        balances.append(make_plan(config, profile, costs[-1], layout_of(config)).balance)
    assert [found.weighted_by for found in costs] == ["", "partition.costs", "gpipe_cost of the layers"]
    assert balances[0] != (7, 1)
    assert balances[1:] == [(7, 1), (7, 1)]
    work = [[layer.graph + layer.backward for layer in found.layers] for found in costs]
    assert work[1] == work[2] == pytest.approx([sum(work[0]) * cost / 6 for cost in given])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("partition.costs=[1,2]", r"partition.costs=\[1.0,2.0\]: there are 2 for 8 layers; give one for each"),
        ("partition.costs=[0,0,0,0,0,0,0,0]", "partition.costs=.*: at least one must be above 0"),
        ("partition.costs=[1,1,1,1,1,1,1,1] cost=measured", "partition.costs=.*: cost=measured times the layers"),
        ("+model.arguments.costs=[1,1,1,null,1,1,1,1]", "layer 3 has gpipe_cost=None, and layer 0 has 1"),
        ("+model.arguments.costs=[0,0,0,0,0,0,0,0]", "gpipe_cost is 0 in all layers"),
    ],
)
def test_costs_that_mean_nothing_are_refused(settings: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_of(configure(*CUSTOM, *settings.split()), traced(*CUSTOM, *settings.split()))


@cache
def forwards_of(layers: Callable[[], nn.Sequential]) -> list[Work]:
    with torch.device("meta"):
        model = layers()
    image = torch.empty(1, 3, reference_layers.IMAGE_SIZE, reference_layers.IMAGE_SIZE, device="meta")
    return [cost.forward for cost in trace_layers(model, as_boundary((image,)), training=True)]


def test_the_reference_layers_tell_all_rates_of_a_device() -> None:
    """Seconds made of known rates lead back to these rates: no two of them stand for each other in all layers."""
    works = forwards_of(reference_layers.layers)
    samples = reference_layers.samples_for(None)
    draw = random.Random(1)
    for _ in range(5):
        byte = {kind: draw.uniform(0.5, 2.0) * 1e-10 for kind in OperationKind}
        known = Rates(
            draw.uniform(0.5, 2.0) * 1e-5,
            {kind: draw.uniform(0.5, 2.0) * 1e-5 for kind in OperationKind},
            {kind: draw.uniform(0.5, 2.0) * 1e-11 for kind in COMPUTING},
            byte,
            dict.fromkeys(CONVOLUTIONS, 3e-10) | {OperationKind.PRODUCT: 5e-11},
        )
        seconds = [known.seconds(work, samples) for work in works]
        found = fit_rates(works, seconds, samples)
        assert found.layer == pytest.approx(known.layer, rel=0.05)
        for table in ("operation", "flop", "byte", "weight_byte"):
            assert getattr(found, table) == pytest.approx(getattr(known, table), rel=0.05), table


@pytest.mark.parametrize(
    ("figures", "gpu_bytes"),
    [
        (Figures(5e14, 3e14, 2.7e12, 4e-6), 85_520_809_984),  # as of an H100 in bfloat16
        (Figures(5e12, 4e12, 2.5e11, 6e-6), 15_828_320_256),  # and of a T4 in float32
    ],
)
def test_the_rates_of_a_device_that_works_while_its_host_launches(figures: Figures, gpu_bytes: int) -> None:
    """Of each layer alone only what takes longer is seen: what waits for the host, and what waits for the device, is
    predicted of other layers all the same, though kinds of operations differ by half from single ones."""
    works = forwards_of(reference_layers.layers_for_gpu)
    samples = reference_layers.samples_for(gpu_bytes)
    draw = random.Random(1)
    for _ in range(3):
        flops, copied = figures.convolution_flops_per_second, figures.copied_bytes_per_second
        launch, flop, byte = (
            {kind: rate * draw.uniform(1.0, 1.5) for kind in OperationKind}
            for rate in (figures.launch_seconds, 1 / flops, 1 / copied)
        )
        flop[OperationKind.PRODUCT] = 1.1 / figures.product_flops_per_second
        known = Rates(2e-5, launch, flop, byte, overlap=True, launched=True)
        waited = [1.5e-5 + known.seconds(work, samples) * draw.uniform(0.95, 1.05) for work in works]
        found = fit_rates(works, waited, samples, figures)
        for few in (2, 20_000):
            true, predicted = (
                sum(rates.seconds(cost.forward, few) for cost in traced().costs) for rates in (known, found)
            )
            assert predicted == pytest.approx(true, rel=0.2), few
    launches = Rates(1e-5, {OperationKind.POOLING: 1e-5}, byte={OperationKind.POOLING: 1e-12}, launched=True)
    pooling = Work({OperationKind.POOLING: Operations(3, bytes=1e9)})
    assert [launches.seconds(pooling, few) for few in (0.01, 1)] == pytest.approx([4e-5, 1e-3])
