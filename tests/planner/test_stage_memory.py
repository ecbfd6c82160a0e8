"""What a stage holds, against real steps: to the byte."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from plan_runs import EVEN, plan_of
from training_runs import TINY, configure, of_type, pipeline_of, train_here

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.optimizer import build_optimizer
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.pipeline.runtime.replicas import _buckets
from gpipe_cli.planner.make_plan import make_plan
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.pipeline_spec import make_pipeline_spec
from gpipe_cli.planner.process_layout import TooLargeError
from gpipe_cli.planner.stage_memory import MemoryModel, buffers_bytes
from gpipe_cli.schedule.named_schedules import build, order
from gpipe_cli.training.checkpoint.restore import collect_stage_state
from gpipe_cli.training.engine import build_engine
from gpipe_cli.training.events import StepDone


@pytest.mark.parametrize("optimizer", ["rmsprop", "adam", "adafactor"])
def test_weights_gradients_and_state_are_those_of_a_real_step(optimizer: str) -> None:
    config = configure(*EVEN, f"optimizer={optimizer}", "learning_rate=constant", "ema_decay=0", "partitions=3")
    profile = profile_model(config)
    plan = plan_of(config, profile)
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


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_buffers_are_those_of_a_run(replicas: int) -> None:
    """Of sums over replicas, which no plan counted: what is sent takes the place of the gradients, and what is received
    is added, both from aligned addresses. And of a checkpoint, which on a CPU is in a stage's memory."""
    config = configure(*EVEN, "partitions=2", f"replicas={replicas}", "ema_decay=0.9", "batch_size=24",
                       "executor=in_process")  # fmt: skip
    profile, spec = profile_model(config), make_pipeline_spec(config)
    engine = build_engine(config, spec, ControlGroup(0, 1))
    elsewhere = replace(config, hardware=load_hardware("h100"))
    for k, stage in engine.stages.items():
        weights = profile.weights[spec.first_layers[k] : spec.first_layers[k] + len(spec.layer_names[k])]
        parameters, optimizer = list(stage.module.parameters()), engine.optimizers[k]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        assert optimizer is not None
        optimizer.step()
        copied = sum(tensor.nbytes for tensor in collect_stage_state(engine, k).values())
        buckets = list(_buckets(k, stage.module, replicas))
        sent = sum(replicas * bucket.part * bucket.parameters[0].itemsize for bucket in buckets)
        sums = 0 if replicas == 1 else 2 * sent - sum(one.nbytes for one in parameters)
        unfilled = 2 * replicas * 256 * len(buckets)  # at the ends of buckets, whose number the cut decides
        assert 0 <= sums + copied - sum(buffers_bytes(config, of) for of in weights) <= unfilled
        assert 0 <= sums - sum(buffers_bytes(replace(elsewhere, graphs=False), of) for of in weights) <= unfilled


@pytest.mark.parametrize("balance", ["[4]", "[3,1]", "[1,2,1]"])
def test_a_tied_weight_is_in_the_memory_of_each_stage_once(balance: str) -> None:
    """Values and optimizer state once, gradients for each layer, and what other stages send; a checkpoint has one."""
    settings = [
        "model=transformer_lm", "~presets", "dataset=synthetic_text", "dataset.vocabulary=40", "model.length=16",
        "model.layers=2", "model.width=16", "model.hidden=32", "model.heads=2", "model.tie_embeddings=true",
        "batch_size=8", "micro_batches=2", "device=cpu", "ema_decay=0.9", "executor=in_process",
        f"partitions={balance.count(',') + 1}", f"partition.balance={balance}",
    ]  # fmt: skip
    config = configure(*settings)
    profile, engine = profile_model(config), pipeline_of(config)
    plan, matrix = plan_of(config, profile), 40 * 16 * 4
    for k, stage in engine.stages.items():
        parameters, optimizer = list(stage.module.parameters()), engine.optimizers[k]
        memory = {tensor.data_ptr(): tensor.nbytes for tensor in (*parameters, *stage.module.buffers())}
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        assert optimizer is not None
        optimizer.step()
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        averages = {tensor.data_ptr(): tensor.nbytes for tensor in engine.averages[k].average.values()}
        held = plan.memory[k]
        assert held.weights_bytes == sum(memory.values())
        assert held.gradients_bytes == sum(parameter.nbytes for parameter in parameters)
        assert held.optimizer_bytes == sum(tensor.nbytes for tensor in state) + sum(averages.values())
        uses = sum(name.endswith(("embedding.weight", "logits.weight")) for name, _ in stage.module.named_parameters())
        received = (2 - uses) * matrix if uses else 0
        copied = sum(tensor.nbytes for tensor in collect_stage_state(engine, k).values())
        assert held.buffers_bytes == copied + received


@pytest.mark.parametrize(("balance", "recompute"), [("[7]", "never"), ("[5,2]", "except_last")])
def test_a_training_counts_the_activations_that_were_planned(balance: str, recompute: str, tmp_path: Path) -> None:
    """Of a model as users write it, with images channels last. The cut is where they are flattened."""
    config = configure(
        *EVEN[2:], "model=custom", "model.target=custom_models:flattens", f"partitions={balance.count(',') + 1}",
        f"partition.balance={balance}", f"recompute={recompute}", "memory_format=channels_last",
        "executor=in_process", "max_steps=2", "optimizer=sgd", "checkpoint.every_epochs=0",
    )  # fmt: skip
    profile = profile_model(config)
    plan = plan_of(config, profile)
    messages = train_here(config, tmp_path)
    counted = [step.activation_bytes for step in of_type(messages, StepDone) if step.activation_bytes]
    assert counted == [plan.saved_bytes]
    # what is flattened is in addition to what was there before, of every micro-batch that is saved
    features = 2 * 4 * 3 * 3 * 4 * (4 if recompute == "never" else 1)
    other = profile_model(replace(config, memory_format="contiguous"))
    contiguous = make_plan(config, other, plan.costs, plan.layout)
    assert sum(plan.saved_bytes) - sum(contiguous.saved_bytes) == features


def test_what_is_counted_is_a_full_mini_batch(tmp_path: Path) -> None:
    """Of micro-batches of 3, 3 and 2 samples. The second step of each epoch is short and is not counted."""
    settings = [*TINY, "dataset.train_samples=14", "executor=in_process", "epochs=2", "partitions=2"]
    config = configure(*settings, "recompute=always")
    profile = profile_model(config)
    plan = plan_of(config, profile)
    steps = of_type(train_here(config, tmp_path), StepDone)
    assert [step.samples for step in steps] == [8, 6, 8, 6]
    assert [step.activation_bytes for step in steps] == [None, None, plan.saved_bytes, None]
    assert [step.overhead_bytes is None for step in steps] == [False, True, False, True], "also of a single step"


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_stages_reach_as_far_as_the_limit(name: str) -> None:
    """From every layer, one layer more is over the limit."""
    config = configure(*EVEN, "model.normal_cells=6", f"schedule={name}", "partitions=4", "recompute=always")
    memory, layers = MemoryModel(config, profile_model(config), [2] * 4), 10
    schedule = build(name, 4, 4, "always")
    needed = {
        (first, end): [stage.total_bytes for stage in memory.stages(schedule, [(first, end)] * 4)]
        for first, end in combinations(range(layers + 1), 2)
    }
    limits = sorted(max(of_stages) for of_stages in needed.values())
    for limit_bytes in (limits[0] - 1, *limits[::9], limits[-1]):
        found = memory.furthest(order(name, 4, 4), limit_bytes)
        assert found is not None
        for k, reach in enumerate(found):
            for first, end in enumerate(reach):
                assert end == first or needed[first, end][k] <= limit_bytes
                assert end == layers or needed[first, end + 1][k] > limit_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_graphs_have_pools_and_memory_for_what_a_stage_receives_and_sends(schedule: str) -> None:
    """What a layer's backward needs in addition is in the pool of each micro-batch in flight. `test_graphs.py` compares
    the memory outside the pools with what is allocated."""
    settings = [*EVEN, "hardware=h100", "partitions=2", f"schedule={schedule}", "recompute=never"]
    configs = [configure(*settings, f"graphs={graphs}") for graphs in ("auto", "false")]
    graphs, launched = (plan_of(config, profile_model(config)) for config in configs)
    slots = (4, 4) if schedule == "gpipe" else (2, 1) if schedule == "1f1b" else (2, 2)
    for held, without, number in zip(graphs.memory, launched.memory, slots, strict=True):
        more = held.activations_bytes - without.activations_bytes
        assert 0 < more <= number * held.workspace_bytes or schedule == "zero_bubble"
        assert held.buffers_bytes > without.buffers_bytes
        alike = {"activations_bytes": 0, "buffers_bytes": 0}
        assert held._replace(**alike) == without._replace(**alike)
    assert graphs.saved_bytes == launched.saved_bytes == tuple(held.activations_bytes for held in launched.memory)


def test_a_skip_past_a_stage_is_none_of_its_outputs() -> None:
    """Which were thirteen times as large so, in a U-Net."""
    settings = [
        "hardware=h100", "model=unet", "model.depth=4", "model.base_channels=8", "dataset=synthetic_masks",
        "dataset.image_size=64", "partitions=4", "batch_size=8", "micro_batches=2", "recompute=never",
    ]  # fmt: skip
    config = configure(*settings)
    profile = profile_model(config)
    graphs, spec = plan_of(config, profile), make_pipeline_spec(config, profile)
    cut = config.partition.with_balance(graphs.balance)
    launched = plan_of(replace(config, graphs=False, partition=cut), profile)
    for k in range(3):
        sizes = sum(tensor.bytes(graphs.samples) * (1 + tensor.has_gradient) for tensor in spec.stage_outputs(k))
        received = sum(tensor.bytes(graphs.samples) * (2 + tensor.has_gradient) for tensor in spec.stage_inputs(k))
        assert graphs.memory[k].buffers_bytes - launched.memory[k].buffers_bytes == sizes + received


def test_an_order_is_found_that_fits_where_stages_keep_their_pools() -> None:
    """The search once let two stages of a device share memory, and its order did not fit where named ones do."""
    profile = profile_model(configure(*EVEN))
    settings = [*EVEN, "hardware=h100", "partitions=4", "stages_per_process=2", "micro_batches=8", "recompute=auto"]
    largest = max(held.total_bytes for held in plan_of(configure(*settings, "schedule=auto"), profile).memory)
    refused = 0
    for percent in (20, 32, 44):
        limit = largest * percent // 100
        configs = {name: configure(*settings, f"schedule={name}") for name in ("1f1b", "interleaved", "auto")}
        fitting = [name for name, config in configs.items() if fits(config, profile, limit)]
        assert not fitting or "auto" in fitting
        refused += not fitting
    assert refused < 3


def fits(config: TrainConfig, profile: ModelProfile, limit_bytes: int) -> bool:
    try:
        plan_of(config, profile, limit_bytes)
    except TooLargeError:
        return False
    return True
