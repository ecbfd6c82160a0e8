"""All data for simulating a step with any K, M and schedule, as a JSON value: the page beside a plan or a run simulates
other settings by itself.

`cost_model.py`, `ActivationMemory` and `stage_memory.py` define these seconds and bytes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.pipeline.profile.layer_cost import Halves, KeptMemory, LayerCost
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.schedule.placement import PLACEMENTS, name_of, place
from gpipe_cli.pipeline.schedule.schedule import Schedule
from gpipe_cli.pipeline.schedule.simulator import EdgeCost
from gpipe_cli.planner.cost_model import LayerSeconds, StepCosts, predicted_costs
from gpipe_cli.planner.layout import Layout, Memory, placement_of
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.stage_memory import buffers_bytes
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.system.machine import usable_cores

SimulationData = dict[str, Any]

_MOST_MICRO_BATCHES = 64
_MOST_COSTS = 4000  # layers times numbers of micro-batches: predicting more takes longer than planning


def simulation_data(
    config: TrainConfig, profile: ModelProfile, plan: Plan, micro_batches: Collection[int] = ()
) -> SimulationData:
    """A plan and what it was made from, in seconds and bytes; sequences have an entry per layer or per stage.

    `micro_batches`: numbers that the page has to offer besides its own. A curve of `solve=memory_time` is put beside
    these data as `curve`: {points: [{command, setting: {partitions, micro_batches, schedule, placement, recompute,
    stages_per_process, balance}, rows (of schedule=auto), step_seconds, memory_bytes, dominated}], lower_bound_seconds,
    limit_bytes}.
    """
    costs, layout, samples = plan.costs, plan.layout, mini_batch_samples(config, profile.lengths)
    memory = layout.memory
    linked = costs if costs.rates is None else _costs(config, profile, plan, plan.micro_batches)
    seconds = {tie.stages: tie.seconds for tie in linked.ties}
    return {
        "setting": {
            "partitions": len(plan.stages),
            "micro_batches": plan.micro_batches,
            "schedule": "file" if config.schedule_is_file else config.schedule,
            "schedule_file": config.schedule if config.schedule_is_file else None,
            "recompute": config.recompute,
            "stages_per_process": _most_stages(plan),
            "placement": _placement(config, plan),
            "replicas": config.replicas,
            "samples": samples // config.replicas,
            "step_samples": samples,  # samples of all replicas
            "splits": not config.compile,
            "chosen_order": plan.chosen_order,  # the order that schedule=auto chose
            "balance_given": config.partition.balance is not None or config.partition.method != "exact",
        },
        "rows": rows_of(plan.schedule),
        "balance": plan.balance,
        "device_of_stage": plan.device_of_stage,
        "layers": [
            {
                "name": cost.name,
                "weights_bytes": weights.weight_bytes,
                "gradients_bytes": weights.gradient_bytes,
                "optimizer_bytes": weights.optimizer_bytes,
                "buffers_bytes": buffers_bytes(config, weights),
                "update": update,
                "sum": added_up,
            }
            for cost, weights, update, added_up in zip(
                profile.costs, profile.weights, costs.updates, costs.sums or (0.0,) * len(profile.costs), strict=True
            )
        ],
        "ties": [
            {
                "layers": tied.layers,
                "weights_bytes": tied.weight_bytes,
                "gradients_bytes": tied.gradient_bytes,
                "optimizer_bytes": tied.optimizer_bytes,
                "seconds": seconds.get(tied.layers, 0.0),
            }
            for tied in profile.tied
        ],
        "skips": [{"name": skip.name, "stash": skip.stash, "pop": skip.pop} for skip in profile.skips],
        "shared": [[one.first, one.second, one.text] for one in profile.shared],
        "costs": {
            "source": costs.source,
            "basis": costs.basis,
            "set_up": costs.set_up,
            "halves": "known" if profile.splits else "assumed",
            **_costs_of_micro_batches(config, profile, plan, samples // config.replicas, micro_batches),
        },
        "slowdown": {
            "at_once": _at_once(plan),
            "cores": usable_cores() if layout.shares_cores else None,  # cores that the devices share
            "factor": costs.together[0],
            "together": costs.together[1],
        },
        "memory": _memory(profile),
        "limit_bytes": None if memory is None else memory.limit_bytes,
        "limit": None if memory is None else _limit(config, layout, memory),
    }


def rows_of(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in schedule]


def _most_stages(plan: Plan) -> int:
    """Stages of a device, if all have as many or the last devices fewer."""
    return -(-len(plan.stages) // len(set(plan.device_of_stage)))


def _placement(config: TrainConfig, plan: Plan) -> str:
    """The name of the plan's placement; where several give the same, that of its settings."""
    own, device_of_stage = placement_of(config), plan.device_of_stage
    if own in PLACEMENTS and place(own, len(device_of_stage), len(set(device_of_stage))) == device_of_stage:
        return own
    consecutive = list(device_of_stage) == sorted(device_of_stage)
    return name_of(device_of_stage) or (PLACEMENTS[0] if consecutive else "as planned")


def _costs_of_micro_batches(
    config: TrainConfig, profile: ModelProfile, plan: Plan, most: int, more: Collection[int]
) -> dict[str, Any]:
    """The costs of a mean micro-batch for each number of micro-batches that the page offers. Layers whose costs are
    equal for all these numbers are of one kind."""
    layers = len(profile.costs)
    offered = [*range(1, 17), *range(20, 33, 4), *range(40, _MOST_MICRO_BATCHES + 1, 8)]
    if len(offered) * layers > _MOST_COSTS:
        offered = [1 << power for power in range(7)]
    offered = sorted({m for m in offered if m <= most} | {plan.micro_batches, *more})
    found = [_costs(config, profile, plan, m) for m in offered]
    split = any(of.inputs or of.weights for of in plan.costs.layers)
    free = EdgeCost(0.0, 0.0)
    columns = [
        tuple((costs.layers[at], costs.edges[at] if at < layers - 1 else free) for costs in found)
        for at in range(layers)
    ]
    kinds = {column: number for number, column in enumerate(dict.fromkeys(columns))}
    return {
        "kinds": [kinds[column] for column in columns],
        "of": {
            str(m): {
                "layers": [_seconds(column[at][0], split) for column in kinds],
                "edges": [[column[at][1].forward_seconds, column[at][1].backward_seconds] for column in kinds],
                "skips": [[skip.forward, skip.backward] for skip in found[at].skips],
            }
            for at, m in enumerate(offered)
        },
    }


def _seconds(layer: LayerSeconds, split: bool) -> list[float]:
    halves = [layer.inputs, layer.weights] if split else []
    return [layer.forward, layer.graph, layer.backward, *halves]


def _costs(config: TrainConfig, profile: ModelProfile, plan: Plan, micro_batches: int) -> StepCosts:
    """Costs for M = `micro_batches`, with links between all stages; measured costs are scaled to that size."""
    costs = plan.costs
    if costs.rates is not None:
        samples = mini_batch_samples(config, profile.lengths)
        mean = samples / min(samples, config.replicas * micro_batches)
        return predicted_costs(config, profile, plan.layout, costs.rates, samples=mean, linked=True).calibrated(
            costs.calibration
        )
    scale = plan.micro_batches / micro_batches
    layers = tuple(LayerSeconds(*(scale * seconds for seconds in asdict(layer).values())) for layer in costs.layers)
    edges = tuple(EdgeCost(scale * edge.forward_seconds, scale * edge.backward_seconds) for edge in costs.edges)
    skips = tuple(replace(skip, forward=scale * skip.forward, backward=scale * skip.backward) for skip in costs.skips)
    return replace(costs, layers=layers, edges=edges, skips=skips)


def _at_once(plan: Plan) -> int | None:
    """How many devices of all pipelines can compute at the same time, whatever K is; None: all of them."""
    layout = plan.layout
    if not layout.shares_cores:
        return None
    if plan.costs.basis == "timed_layers" and layout.distributed and layout.replicas == 1:
        return None  # layers were timed while all processes computed
    return max(1, usable_cores() // layout.threads)


def _limit(config: TrainConfig, layout: Layout, memory: Memory) -> dict[str, Any]:
    """The memory limit, in bytes, and what it is for: a device, the whole machine, or each stage."""
    of = "device"
    if layout.here:
        own = config.hardware.memory_gib is not None
        of = "stage" if own else "machine" if layout.on_cpu else "device"
    return {"bytes": memory.device_bytes, "of": of}


def _memory(profile: ModelProfile) -> dict[str, Any]:
    """The arguments of `ActivationMemory`; a tensor takes `a + b n` bytes for n samples."""
    pops = {skip.name: skip.pop for skip in profile.skips}
    boundaries = (profile.inputs, *(cost.outputs for cost in profile.costs))
    return {
        "boundaries": [_tensors(of, profile.lengths, pops) for of in boundaries],
        "trained": [cost.trained for cost in profile.costs],
        "saved": [_saved(cost.saved) for cost in profile.costs],
        "kept": [_kept(cost) for cost in profile.costs] if profile.splits else None,
    }


def _tensors(boundary: Boundary, lengths: Sequence[int], pops: Mapping[str, int]) -> list[list[int]]:
    """[a, b, whether a gradient returns] of each tensor, and of a skip the layer that pops it."""
    sizes = [(tensor.bytes(0, lengths), tensor.bytes(1, lengths)) for tensor in boundary]
    return [
        [none, one - none, int(tensor.has_gradient), *([pops[tensor.skip]] if tensor.skip else [])]
        for tensor, (none, one) in zip(boundary, sizes, strict=True)
    ]


def _saved(saved: KeptMemory) -> list[Any]:
    return [saved.tensors, saved.base_bytes, saved.per_sample_bytes, saved.same_memory]


def _kept(cost: LayerCost) -> list[Any]:
    """Inputs and gradients that are kept between the two halves of a backward."""
    halves = cost.halves or Halves()
    return [_saved(halves.kept_inputs), _saved(halves.kept_gradients)]
