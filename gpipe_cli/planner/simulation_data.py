"""All data for simulating a step with any K, M and schedule, as a JSON value: pages simulate other settings with it.

`cost_model.py`, `partitioner.py` and `stage_memory.py` define these seconds, cuts and bytes. A number of bytes that
depends on n, the samples of a micro-batch, is a pair: [base, each] for base + each n.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from gpipe_cli.models.skips import Skip
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.planner.cost_model import StepCosts, predicted_costs
from gpipe_cli.planner.cut import bounds_of, sends_of, work_of
from gpipe_cli.planner.make_plan import baseline_of
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.process_layout import placement_of
from gpipe_cli.planner.shared_layers import ends_with_shared_layers_together
from gpipe_cli.planner.stage_memory import Bounds, MemoryModel
from gpipe_cli.schedule.in_flight_memory import SavedAmounts
from gpipe_cli.schedule.partitioner import NoCutFitsError, partition
from gpipe_cli.schedule.placement import PLACEMENTS, place, placement_name
from gpipe_cli.schedule.simulator import EdgeCost
from gpipe_cli.system.machine import usable_cores

SimulationData = dict[str, Any]

_MAX_MICRO_BATCHES, _MAX_STAGES = 64, 16
_MAX_LAYERS = 200  # of a model for which every number of stages is offered: to cut a longer model takes longer
_MAX_COSTS = 4000  # layers times numbers of micro-batches: predicting more takes longer than planning


def simulation_data(plan: Plan) -> SimulationData:
    """A plan and what it was made from, in seconds and bytes; sequences have an entry per layer or per stage."""
    config, profile, costs, layout, samples = plan.config, plan.profile, plan.costs, plan.layout, plan.step_samples
    linked_costs = _costs(plan, plan.micro_batches)
    memory = [MemoryModel(config, profile, [size]) for size in (1, 2)]
    seconds = {tie.stages: tie.seconds for tie in linked_costs.ties}
    return {
        "setting": {
            "partitions": len(plan.balance),
            "micro_batches": plan.micro_batches,
            "schedule": "file" if config.schedule_is_file else config.schedule,
            "schedule_file": config.schedule if config.schedule_is_file else None,
            "recompute": config.recompute,
            # if all devices have as many or the last devices fewer
            "stages_per_process": -(-len(plan.balance) // len(set(plan.device_of_stage))),
            "placement": _placement(plan),
            "replicas": config.replicas,
            "samples": samples // config.replicas,
            "step_samples": samples,  # samples of all replicas
            "splits": not config.compile,
            "replays": memory[0].replays,
            "chosen_order": plan.chosen_order,  # the order that schedule=auto chose
            "balance_given": config.partition.balance is not None or config.partition.method != "exact",
        },
        "rows": [list(map(str, row)) for row in plan.schedule],
        **_cuts(plan, linked_costs, memory),
        "device_of_stage": plan.device_of_stage,
        "layers": [
            {
                "name": cost.name,
                "update": update,
                "sum": added_up,
                "workspace": _linear(*workspace),
                "graphs": _linear(*graphs),
            }
            for cost, update, added_up, workspace, graphs in zip(
                profile.costs,
                costs.updates,
                costs.sums or (0.0,) * len(profile.costs),
                zip(*(model.workspace.tolist() for model in memory), strict=True),
                zip(*(model.graphs.tolist() for model in memory), strict=True),
                strict=True,
            )
        ],
        "ties": [{"layers": tied.layers, "seconds": seconds.get(tied.layers, 0.0)} for tied in profile.tied],
        "skips": [
            {"stash": skip.stash, "pop": skip.pop, "bytes": _skip_bytes(profile, skip)} for skip in profile.skips
        ],
        "shared": profile.shared,
        "costs": {
            "source": costs.source,
            "basis": costs.cost_source,
            "set_up": costs.set_up,
            "halves": "known" if profile.splits else "assumed",
            **_costs_of_micro_batches(plan, samples // config.replicas),
        },
        "slowdown": {
            # how many devices of all pipelines can compute at the same time, whatever K is; None: all of them
            "at_once": max(1, usable_cores() // layout.threads) if layout.shares_cores else None,
            "cores": usable_cores() if layout.shares_cores else None,  # cores that the devices share
            "factor": costs.together[0],
            "together": costs.together[1],
        },
        "baseline": _baseline(plan),
        "limit_bytes": layout.limit_bytes,
        "limit": _limit(plan),
    }


def _baseline(plan: Plan) -> dict[str, Any] | None:
    """The seconds of a step on a single device, of which the page may change the backward's; None: it does not fit."""
    if (baseline := baseline_of(plan)) is None:
        return None
    (stage,) = baseline.stage_costs
    rest = baseline.step_seconds - stage.graph_seconds - stage.backward_seconds
    return {"forward": stage.graph_seconds, "backward": stage.backward_seconds, "rest": rest}


def _placement(plan: Plan) -> str:
    """The name of the plan's placement; where several give the same, the name in its settings."""
    named = placement_of(plan.config)
    device_of_stage = plan.device_of_stage
    if named in PLACEMENTS and place(named, len(device_of_stage), len(set(device_of_stage))) == device_of_stage:
        return named
    consecutive = list(device_of_stage) == sorted(device_of_stage)
    return placement_name(device_of_stage) or (PLACEMENTS[0] if consecutive else "as planned")


def _cuts(plan: Plan, costs: StepCosts, memory: Sequence[MemoryModel]) -> dict[str, Any]:
    """The plan's cut, and for each K that the page offers the fastest without and with recomputation. The page shows
    whether they fit the memory. `memory` as in `_held`."""
    profile, layers = plan.profile, len(plan.profile.costs)
    offered = range(1, _MAX_STAGES + 1) if layers <= _MAX_LAYERS else [1 << n for n in range(5)]

    def cut(balance: Sequence[int]) -> dict[str, Any]:
        bounds = bounds_of(balance)
        none = [0] * len(bounds)
        stored = [model.at_peaks(bounds, none, none) for model in memory]
        held = _saved_bytes(plan, memory, bounds)
        stages = [
            {"weights": stage.weights_bytes, "gradients": stage.gradients_bytes, "optimizer": stage.optimizer_bytes,
             "buffers": _linear(stage.buffers_bytes, double.buffers_bytes), "held": ways}
            for stage, double, ways in zip(*stored, held, strict=True)
        ]  # fmt: skip
        return {"balance": list(balance), "stages": stages}

    def fastest(partitions: int, *, with_recompute: bool) -> Sequence[int]:
        cut_of = partial(partition, work_of(costs, with_recompute=with_recompute), partitions, **sends_of(costs))
        try:
            return cut_of(furthest=ends_with_shared_layers_together(profile.shared, layers, partitions, None))
        except NoCutFitsError:  # it separates layers that share something, which the page reports
            return cut_of()

    return {
        "cut": cut(plan.balance),
        "cuts": {
            str(k): [cut(fastest(k, with_recompute=with_recompute)) for with_recompute in (False, True)]
            for k in sorted({*offered, len(plan.balance)})
            if k <= layers
        },
    }


def _saved_bytes(plan: Plan, memory: Sequence[MemoryModel], spans: Bounds) -> list[dict[str, list[int]]]:
    """Of each span of layers, the bytes of a micro-batch in each way to save it: fixed bytes, and bytes of a sample.
    `memory` is for micro-batches of one sample and of two. Where backwards were not traced in halves, what is saved
    does not change between them."""
    single, double = (model.largest_amounts(spans) for model in memory)
    held = [
        {way: _linear(*values) for way, *values in zip(SavedAmounts._fields, *sizes, strict=True)}
        for sizes in zip(single, double, strict=True)
    ]
    return held if plan.profile.splits else [{**ways, "weights": ways["graph"]} for ways in held]


def _linear(single: int, double: int) -> list[int]:
    """The fixed bytes of a micro-batch and the bytes of a sample, from the bytes for one sample and for two."""
    return [2 * single - double, double - single]


def _skip_bytes(profile: ModelProfile, skip: Skip) -> list[list[int]]:
    """The bytes of a skip, and of its gradient."""
    tensors = tuple(tensor for tensor in profile.costs[skip.stash].outputs if tensor.skip == skip.name)

    def size(boundary: Boundary) -> list[int]:
        base, single = (sum(tensor.bytes(samples, profile.lengths) for tensor in boundary) for samples in (0, 1))
        return [base, single - base]

    return [size(tensors), size(tuple(tensor for tensor in tensors if tensor.has_gradient))]


def _costs_of_micro_batches(plan: Plan, max_micro_batches: int) -> dict[str, Any]:
    """The costs of a mean micro-batch for each number of micro-batches that the page offers. Layers whose costs are
    equal for all these numbers are of the same kind."""
    layers = len(plan.profile.costs)
    offered = [*range(1, 17), *range(20, 33, 4), *range(40, _MAX_MICRO_BATCHES + 1, 8)]
    if len(offered) * layers > _MAX_COSTS:
        offered = [1 << power for power in range(7)]
    offered = sorted({m for m in offered if m <= max_micro_batches} | {plan.micro_batches})
    costs_offered = [_costs(plan, m) for m in offered]
    split = any(layer.inputs_seconds or layer.weights_seconds for layer in plan.costs.layers)
    free = EdgeCost(0.0, 0.0)
    columns = [
        tuple((costs.layers[at], costs.edges[at] if at < layers - 1 else free) for costs in costs_offered)
        for at in range(layers)
    ]
    kinds = {column: number for number, column in enumerate(dict.fromkeys(columns))}
    return {
        "kinds": [kinds[column] for column in columns],
        "of": {
            str(m): {
                "layers": [column[at][0][: 5 if split else 3] for column in kinds],
                "edges": [column[at][1] for column in kinds],
                "skips": [[skip.forward, skip.backward] for skip in costs_offered[at].skips],
            }
            for at, m in enumerate(offered)
        },
    }


def _costs(plan: Plan, micro_batches: int) -> StepCosts:
    """Costs for M = `micro_batches`, with links between all stages."""
    samples = plan.step_samples
    mean = samples / min(samples, plan.config.replicas * micro_batches)
    return predicted_costs(plan.config, plan.profile, plan.layout, plan.costs.rates, samples=mean, assume_links=True)


def _limit(plan: Plan) -> dict[str, Any] | None:
    """The memory limit, in bytes, and what it is for: a device, the machine, or each stage; None without a limit."""
    layout = plan.layout
    if layout.memory is None:
        return None
    owner = "device"
    if layout.is_local:
        given = plan.config.hardware.memory_gib is not None
        owner = "stage" if given else "machine" if layout.on_cpu else "device"
    return {"bytes": layout.memory.device_bytes, "of": owner}
