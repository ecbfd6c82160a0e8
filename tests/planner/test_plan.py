"""Plans: what a step will take and hold, for every cut, schedule and way to recompute."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from training_runs import TINY, configure, of_type, train_here

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.optimizer import build_optimizer
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.config.typed import show
from gpipe_cli.pipeline.schedule.schedules import Kind
from gpipe_cli.pipeline.schedule.simulator import EdgeCost
from gpipe_cli.planner import cost_model
from gpipe_cli.planner.cost_model import (
    LayerSeconds,
    LayerTimes,
    StepCosts,
    costs_by_rates,
    measured_costs,
    predicted_costs,
    scaled,
    slowdowns,
)
from gpipe_cli.planner.device_rates import rates_of_sheet
from gpipe_cli.planner.devices import memory_limit, place
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.placement import make_placement
from gpipe_cli.planner.plan import Plan, TooLargeError, make_plan
from gpipe_cli.training.events import StepDone

EVEN = [*TINY, "batch_size=8", "micro_batches=4"]
MIB = 2**20


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(configure(*EVEN))


def equal_costs(profile: ModelProfile, seconds: float = 1.0, update: float = 0.0) -> StepCosts:
    """Every layer alike, a backward twice as long as a forward, free transfers."""
    count = len(profile.costs)
    layer = LayerSeconds(seconds, seconds, 2 * seconds)
    return StepCosts("none", "data_sheet", (layer,) * count, (update,) * count, (EdgeCost(0.0, 0.0),) * (count - 1), ())


def planned(profile: ModelProfile, *settings: str, limit: float | None = None, costs: StepCosts | None = None) -> Plan:
    config = configure(*EVEN, *settings)
    bytes_limit = None if limit is None else int(limit * MIB)
    return make_plan(config, profile, costs or predicted_costs(config, profile), bytes_limit)


def test_equal_stages_take_what_the_paper_says(profile: ModelProfile) -> None:
    count = len(profile.costs)
    for k in (k for k in (1, 2, 3) if count % k == 0):
        plan = planned(profile, f"partitions={k}", "recompute=never", costs=equal_costs(profile))
        assert plan.balance == (count // k,) * k
        assert plan.imbalance == 0
        assert plan.step_seconds == pytest.approx((4 + k - 1) * 3 * count / k)
        assert plan.breakdown.bubble == pytest.approx((k - 1) / (4 + k - 1))


def test_updates_come_after_the_last_action(profile: ModelProfile) -> None:
    without = planned(profile, "partitions=2", costs=equal_costs(profile))
    update = planned(profile, "partitions=2", costs=equal_costs(profile, update=0.5))
    assert update.step_seconds - without.step_seconds == pytest.approx(0.5 * update.balance[0])
    assert update.breakdown.update > 0


def test_figures_are_seconds_of_flops_bytes_and_operations(profile: ModelProfile) -> None:
    hardware = replace(
        load_hardware("h200"), tflops=2.0, memory_gb_per_second=4.0, operation_microseconds=3.0,
        link_gb_per_second=8.0, link_microseconds=100.0,
    )  # fmt: skip
    costs = costs_by_rates(profile, rates_of_sheet(hardware, threads=8), 2, at_once=9, linked=True)
    for cost, seconds in zip(profile.costs, costs.layers, strict=True):
        moved = 2 * cost.forward.bytes + sum(each.fixed_bytes for each in cost.forward.by_kind.values())
        expected = 2 * cost.forward.flops / 2e12 + moved / 4e9 + cost.forward.operations * 3e-6
        assert seconds.forward == seconds.graph == pytest.approx(expected)
    for cost, edge in zip(profile.costs, costs.edges, strict=False):
        sent = sum(tensor.bytes(2) for tensor in cost.outputs)
        returned = sum(tensor.bytes(2) for tensor in cost.outputs if tensor.has_gradient)
        assert edge.forward_seconds == pytest.approx(1e-4 + sent / 8e9)
        assert edge.backward_seconds == pytest.approx(1e-4 + returned / 8e9)
    alone = costs_by_rates(profile, rates_of_sheet(hardware, threads=8), 2, at_once=9, linked=False)
    assert {edge.forward_seconds for edge in alone.edges} == {0.0}


def test_a_cpus_figures_are_those_of_one_thread(profile: ModelProfile) -> None:
    cpu = replace(load_hardware("cpu"), operation_microseconds=0.0)
    one, four = (
        costs_by_rates(profile, rates_of_sheet(cpu, threads), 2, at_once=9, linked=False) for threads in (1, 4)
    )
    for slow, fast in zip(one.layers, four.layers, strict=True):
        assert slow.backward == pytest.approx(4 * fast.backward)


def test_stages_that_take_turns_take_the_time_of_all() -> None:
    """Two stages in one process are no faster than one."""
    settings = [*EVEN, "recompute=never", "executor=in_process"]
    one, two = (configure(*settings, f"partitions={k}") for k in (1, 2))
    plans = [make_plan(config, seen, predicted_costs(config, seen), None)
             for config in (one, two) for seen in [profile_model(config)]]  # fmt: skip
    assert plans[1].step_seconds == pytest.approx(plans[0].step_seconds)
    assert place(two).at_once == 1
    assert place(configure(*settings, "partitions=2", "hardware=tpu_v2")).at_once == 2
    assert slowdowns(2, 4) == (1.0, 1.0, 1.5, 2.0)
    assert slowdowns(4, 4) == ()
    # four processes at once slow each other down by half, two by a sixth; twice as many take turns besides
    assert slowdowns(4, 8, 1.5, 4) == pytest.approx((1, 7 / 6, 4 / 3, 1.5, 1.5 * 5 / 4, 1.5 * 6 / 4, 1.5 * 7 / 4, 3.0))


def test_an_unknown_gpu_is_cut_all_the_same_but_nothing_is_predicted(
    profile: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(*EVEN)
    monkeypatch.setattr(cost_model, "resolved", lambda hardware, device: hardware)
    costs = predicted_costs(config, profile)
    assert costs.basis == "other_device"
    assert min(seconds.backward for seconds in costs.layers) > 0


def test_measured_layers_slow_each_other_down_in_proportion(profile: ModelProfile) -> None:
    layers = [(1.0, 2.0, 3.0)] * len(profile.costs)
    times = LayerTimes(layers, [(1.2, 2.4, 3.6)] * len(layers), [0.1] * len(layers), 0.25, (0.5, 1e6), 0.0, 1.0)
    costs = measured_costs(profile, 2, 3, times)
    assert costs.slowdown == pytest.approx((1.0, 1.1, 1.2))
    sent = sum(tensor.bytes(2) for tensor in profile.costs[0].outputs)
    assert costs.edges[0].forward_seconds == pytest.approx(0.5 + sent / 1e6)
    half = scaled(costs, 0.5)
    assert half.layers[0] == LayerSeconds(0.5, 1.0, 1.5)
    assert half.updates == costs.updates
    alone = measured_costs(profile, 2, 1, replace(times, together=None, link=None))
    assert alone.slowdown == ()
    assert alone.edges[0] == EdgeCost(0.0, 0.0)


@pytest.mark.parametrize("optimizer", ["rmsprop", "sgd", "adam", "adafactor"])
def test_weights_gradients_and_state_are_those_of_a_real_step(optimizer: str) -> None:
    config = configure(*EVEN, f"optimizer={optimizer}", "learning_rate=constant", "ema_decay=0", "partitions=3")
    profile = profile_model(config)
    plan = make_plan(config, profile, predicted_costs(config, profile), None)
    layers = list(build_model(config).to_empty(device="cpu").named_children())
    for (first, end), held in zip(plan.bounds, plan.memory, strict=True):
        own = {f"{name}.{key}": p for name, layer in layers[first:end] for key, p in layer.named_parameters()}
        for parameter in own.values():
            parameter.grad = torch.ones_like(parameter)
        made = build_optimizer(config.optimizer, own)
        assert made is not None
        made.step()
        state = [v for values in made.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        buffers = [b for _, layer in layers[first:end] for b in layer.buffers()]
        assert held.optimizer_bytes == sum(tensor.nbytes for tensor in state)
        assert held.gradients_bytes == sum(parameter.nbytes for parameter in own.values())
        assert held.weights_bytes == held.gradients_bytes + sum(buffer.nbytes for buffer in buffers)


def test_recomputing_less_holds_more(profile: ModelProfile) -> None:
    held = [max(planned(profile, f"recompute={mode}").saved_bytes) for mode in ("always", "except_last", "never")]
    assert held[0] == held[1] < held[2]
    never = planned(profile, "recompute=never")
    assert all(stage.activations_bytes == saved for stage, saved in zip(never.memory, never.saved_bytes, strict=True))


@pytest.mark.parametrize("memory_format", ["channels_last", "contiguous"])
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_training_counts_the_activations_that_were_planned(
    partitions: int, memory_format: str, tmp_path: Path
) -> None:
    """To the byte, of a model as users write it, however images lie in memory. The cut is where they are flattened."""
    layers = {1: "[7]", 2: "[5,2]"}[partitions]
    for recompute in ("always", "except_last", "never"):
        config = configure(
            *EVEN[2:], "model=custom", "model.target=custom_models:flattens", f"partitions={partitions}",
            f"partition.balance={layers}", f"recompute={recompute}", f"memory_format={memory_format}",
            "executor=in_process", "max_steps=2", "optimizer=sgd", "checkpoint.every_epochs=0",
        )  # fmt: skip
        profile = profile_model(config)
        plan = make_plan(config, profile, predicted_costs(config, profile), None)
        heard = train_here(config, tmp_path / recompute)
        counted = [step.activation_bytes for step in of_type(heard, StepDone) if step.activation_bytes]
        assert counted == [plan.saved_bytes], recompute
        # what is flattened stands beside what was there before, of every micro-batch that is held
        features = 2 * 4 * 3 * 3 * 4 * (4 if recompute == "never" else 1)
        contiguous = make_plan(config, profile_model(replace(config, memory_format="contiguous")), plan.costs, None)
        more = features if memory_format == "channels_last" else 0
        assert sum(plan.saved_bytes) - sum(contiguous.saved_bytes) == more


CUSTOM = [*EVEN[2:], "model=custom", "model.target=custom_models:says_costs", "partitions=2"]


def test_the_users_costs_of_layers_decide_the_cut() -> None:
    """The paper's optional c_i (section 2.1), on the command line or as an attribute of each layer."""
    given = [1, 0, 0, 1, 0.5, 0, 0.5, 3]
    ours = configure(*CUSTOM)
    costs = [predicted_costs(ours, profile_model(ours))]
    plans = [make_plan(ours, profile_model(ours), costs[0], None)]
    for setting in ("partition.costs=", "model.arguments.costs="):
        config = configure(*CUSTOM, f"+{setting}{show(given)}" if "model" in setting else f"{setting}{show(given)}")
        profile = profile_model(config)
        costs.append(predicted_costs(config, profile))
        plans.append(make_plan(config, profile, costs[-1], None))
    assert [found.weighted_by for found in costs] == ["", "partition.costs", "gpipe_cost of the layers"]
    assert [plan.balance for plan in plans] == [plans[0].balance, (7, 1), (7, 1)]
    assert plans[0].balance != (7, 1)
    work = [[layer.graph + layer.backward for layer in found.layers] for found in costs]
    assert work[1] == work[2] == pytest.approx([sum(work[0]) * cost / 6 for cost in given])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("partition.costs=[1,2]", r"partition.costs=\[1.0,2.0\]: there are 2 for 8 layers; give one for each"),
        ("partition.costs=[0,0,0,0,0,0,0,0]", "partition.costs=.*: at least one must be above 0"),
        ("partition.costs=[1,1,1,1,1,1,1,-1]", r"partition.costs.*-1"),
        ("partition.costs=[1,1,1,1,1,1,1,1] cost=measured", "partition.costs=.*: cost=measured times the layers"),
        ("+model.arguments.costs=[1,1,1,null,1,1,1,1]", "layer 3 has gpipe_cost=None, and layer 0 has 1"),
        ("+model.arguments.costs=[0,0,0,0,0,0,0,0]", "gpipe_cost is 0 in all layers"),
    ],
)
def test_costs_that_mean_nothing_are_refused(settings: str, message: str) -> None:
    def planned() -> None:
        config = configure(*CUSTOM, *settings.split())
        predicted_costs(config, profile_model(config))

    with pytest.raises(ValueError, match=message):
        planned()


def test_what_is_counted_is_a_full_mini_batch(tmp_path: Path) -> None:
    """Of micro-batches of 3, 3 and 2 samples. The second step of this run is short: it used to be the one counted, and
    stood beside a plan for 3, 3 and 3."""
    settings = [*TINY, "dataset.train_samples=14", "executor=in_process", "epochs=2", "partitions=2"]
    for recompute in ("never", "always"):
        config = configure(*settings, f"recompute={recompute}")
        profile = profile_model(config)
        plan = make_plan(config, profile, predicted_costs(config, profile), None)
        steps = of_type(train_here(config, tmp_path / recompute), StepDone)
        assert [step.samples for step in steps] == [8, 6, 8, 6]
        assert [step.activation_bytes for step in steps] == [None, None, plan.saved_bytes, None]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_auto_recomputes_no_more_than_it_must(profile: ModelProfile, schedule: str) -> None:
    never, always = (planned(profile, f"schedule={schedule}", f"recompute={mode}") for mode in ("never", "except_last"))
    least, most = (max(stage.total_bytes for stage in plan.memory) / MIB for plan in (always, never))
    assert least < most
    ample = planned(profile, f"schedule={schedule}", "recompute=auto", limit=most)
    assert sum(ample.recomputed) == 0
    assert ample.step_seconds <= never.step_seconds * (1 + 1e-9)
    counts = []
    for share in (0.0, 0.25, 0.5, 0.75):
        limit = least + share * (most - least)
        plan = planned(profile, f"schedule={schedule}", "recompute=auto", limit=limit)
        assert max(stage.total_bytes for stage in plan.memory) <= limit * MIB
        counts.append(sum(plan.recomputed))
        assert counts[-1] <= sum(always.recomputed)
    assert counts[0] > 0
    assert all(b <= a for a, b in pairwise(counts))


def test_the_cut_gives_way_to_a_limit(profile: ModelProfile) -> None:
    """Where the best cut does not fit, another one may."""
    free = planned(profile, "partitions=2", "recompute=never")
    fullest = max(stage.total_bytes for stage in free.memory)
    found = []
    for percent in range(99, 50, -1):
        try:
            plan = planned(profile, "partitions=2", "recompute=never", limit=percent / 100 * fullest / MIB)
        except TooLargeError:
            break
        assert max(stage.total_bytes for stage in plan.memory) <= percent / 100 * fullest
        found.append(plan)
    assert found
    assert found[-1].balance != free.balance
    assert found[-1].step_seconds >= free.step_seconds


def test_what_no_cut_fits_is_said_with_stage_and_bytes(profile: ModelProfile) -> None:
    with pytest.raises(TooLargeError) as error:
        planned(profile, "partitions=2", limit=0.01)
    free = planned(profile, "partitions=2")
    fullest = max(range(2), key=lambda k: free.memory[k].total_bytes)
    assert error.value.stage == fullest
    assert error.value.missing_bytes == free.memory[fullest].total_bytes - int(0.01 * MIB)


def test_a_layout_is_the_plans(profile: ModelProfile) -> None:
    config = configure(*EVEN, "partitions=2", "recompute=auto", "hardware.memory_gib=0.002")
    plan = make_plan(config, profile, predicted_costs(config, profile), memory_limit(config))
    made = make_placement(config, profile, plan)
    assert tuple(len(names) for names in made.layer_names) == plan.balance
    assert made.recompute == plan.recompute
    assert not isinstance(plan.recompute, str)
    assert [len(stage) for stage in plan.recompute] == [
        sum(action.kind is Kind.R for action in actions) for actions in plan.schedule
    ]


def test_limits_are_given_or_the_devices_own(profile: ModelProfile) -> None:
    def limit(*settings: str) -> int | None:
        config: TrainConfig = configure(*EVEN, *settings)
        return memory_limit(config)

    assert limit() is None
    assert limit("hardware.memory_gib=8") == 8 * 2**30
    assert limit("hardware=tpu_v3") == 16 * 2**30
    one, two = (limit("recompute=auto", f"partitions={k}") for k in (1, 2))
    assert one is not None
    assert two is not None
    assert one == pytest.approx(2 * two, abs=2)
