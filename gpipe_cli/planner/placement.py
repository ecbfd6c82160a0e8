"""Which layers go where: the cut, the devices and the processes of a run, decided once, before anything is allocated.

The layout is made by the parent from shapes alone and handed to every worker, so that none of them traces the model
again and all of them agree.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gpipe_cli.assembly.build import memory_format_of
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.config.typed import show
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.runtime.frozen import Frozen
from gpipe_cli.pipeline.schedule.schedules import Recompute
from gpipe_cli.planner.cost_model import StepCosts, figured, shared_out
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.device_rates import Speeds, by_sheet
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import Plan, make_plan
from gpipe_cli.planner.step_schedule import micro_batches_of
from gpipe_cli.system.machine import usable_cores, usable_memory_bytes


@dataclass(frozen=True)
class Placement:
    """The cut and its placement. Lists have one entry per partition, `boundaries` one per edge between partitions."""

    layer_names: tuple[tuple[str, ...], ...]
    parameters: tuple[int, ...]
    trained: tuple[int, ...]  # as many of these parameters are not frozen
    frozen: Frozen
    cost: tuple[float, ...]  # of one micro-batch, forward and backward: seconds as predicted
    inputs: Boundary  # of the first stage
    lengths: tuple[int, ...]  # the greatest that sentences are padded to
    training_boundaries: tuple[Boundary, ...]
    evaluation_boundaries: tuple[Boundary, ...]
    parameter_tensors: tuple[int, ...]
    recompute: Recompute
    devices: tuple[str, ...]
    distributed: bool
    threads: int
    memory_format: str

    @property
    def partitions(self) -> int:
        return len(self.layer_names)

    @property
    def processes(self) -> int:
        return self.partitions if self.distributed else 1

    @property
    def first_layers(self) -> tuple[int, ...]:
        return tuple(accumulate((len(names) for names in self.layer_names[:-1]), initial=0))

    @property
    def one_device(self) -> bool:
        """True if several stages take turns on one device, or threads on too few cores: what is measured then is not a
        pipeline's speed."""
        in_turns = not self.distributed and self.partitions > 1 and len(set(self.devices)) == 1
        return in_turns or self.short_of_cores

    @property
    def short_of_cores(self) -> bool:
        """True if the processes that compute here have more threads than there are cores."""
        return set(self.devices) == {"cpu"} and self.processes_here * self.threads > usable_cores()

    @property
    def processes_here(self) -> int:
        """The processes on this machine; torchrun may have started others elsewhere."""
        started = torchrun()
        return self.processes if started is None else started.here

    @property
    def most_parameter_tensors(self) -> int:
        """Of any process: the room that a vector with a number per parameter tensor needs."""
        return max(self.parameter_tensors) if self.distributed else sum(self.parameter_tensors)

    def stages_of(self, process: int) -> range:
        return range(process, process + 1) if self.distributed else range(self.partitions)


def make_placement(config: TrainConfig, shapes: ModelProfile | None = None, plan: Plan | None = None) -> Placement:
    """Cut the model as planned and place the parts. Raises ValueError, one line, for what cannot be cut or placed."""
    devices, distributed = place(config)
    shapes = profile_model(config) if shapes is None else shapes
    plan = plan_by_figures(config, shapes) if plan is None else plan
    costs, bounds = shapes.costs, plan.bounds
    return Placement(
        layer_names=tuple(tuple(cost.name for cost in costs[first:end]) for first, end in bounds),
        parameters=tuple(sum(cost.parameters for cost in costs[first:end]) for first, end in bounds),
        trained=tuple(sum(w.trained for w in shapes.weights[first:end]) for first, end in bounds),
        frozen=shapes.frozen,
        cost=tuple(stage.graph_seconds + stage.backward_seconds for stage in plan.stages),
        inputs=shapes.inputs,
        lengths=shapes.lengths,
        training_boundaries=tuple(costs[end - 1].outputs for _, end in bounds[:-1]),
        evaluation_boundaries=tuple(shapes.evaluation[end - 1].outputs for _, end in bounds[:-1]),
        parameter_tensors=tuple(sum(w.tensors for w in shapes.weights[first:end]) for first, end in bounds),
        recompute=plan.recompute,
        devices=devices,
        distributed=distributed,
        threads=threads_of(config),
        memory_format=memory_format_of(config),
    )


def plan_by_figures(config: TrainConfig, shapes: ModelProfile) -> Plan:
    """A plan that nothing has to be measured for. Raises ValueError, one line, if it does not fit a given limit."""
    return make_plan(config, shapes, costs_by_figures(config, shapes), memory_limit(config))


def costs_by_figures(config: TrainConfig, shapes: ModelProfile, speeds: Speeds | None = None) -> StepCosts:
    """Seconds of each layer by `speeds`, or else by the figures of the hardware; how layers differ from each other may
    be the user's word."""
    devices, distributed = place(config)
    costs = figured(
        shapes,
        speeds or _by_sheet(config, devices[0]),
        micro_batches_of(config, shapes.lengths)[1],
        at_once=stages_at_once(config),
        linked=distributed or len(set(devices)) > 1 or config.hardware.name != "auto",
    )
    given = config.partition.costs
    if given is not None and len(given) != len(shapes.costs):
        raise ValueError(
            f"partition.costs={show(given)}: there are {len(given)} for {len(shapes.costs)} layers; give one for each, "
            "or null for our own"
        )
    if given is not None:
        return shared_out(costs, given, "partition.costs")
    return costs if shapes.own_costs is None else shared_out(costs, shapes.own_costs, "gpipe_cost of the layers")


def _by_sheet(config: TrainConfig, device: str) -> Speeds:
    hardware = resolved(config.hardware, device)
    known = hardware.tflops is not None and hardware.memory_gb_per_second is not None
    return by_sheet(hardware if known else load_hardware("h200"), threads_of(config), known)


def stages_at_once(config: TrainConfig) -> int:
    """How many stages can compute at the same time; the others take turns with them on a device or on cores."""
    devices, distributed = place(config)
    if config.hardware.name != "auto":  # a machine that is not here has a device for each
        return config.partitions
    if distributed:
        crowded = torchrun() is None and devices[0] == "cpu"
        return max(1, usable_cores() // threads_of(config)) if crowded else config.partitions
    return len(set(devices))


def memory_limit(config: TrainConfig) -> int | None:
    """The bytes that a stage must stay below: what the settings say; or for recompute=auto what the device has.

    Raises ValueError if that has to be known and is not.
    """
    limit = config.hardware.memory_gib
    if limit is None and config.recompute == "auto":
        devices, _ = place(config)
        limit = resolved(config.hardware, devices[0]).memory_gib
        if limit is None and devices[0] == "cpu":
            limit = usable_memory_bytes() / 2**30
        if limit is not None and config.hardware.name == "auto":
            limit /= _stages_of_a_device(config, devices)
        if limit is None:
            raise ValueError(
                "recompute=auto: needs the memory of this GPU, which has no file in conf/hardware; give "
                "hardware.memory_gib=..."
            )
    return None if limit is None else int(limit * 2**30)


def _stages_of_a_device(config: TrainConfig, devices: Sequence[str]) -> int:
    """How many stages share the memory of one: of a GPU, or of this machine."""
    if devices[0] == "cpu" and (started := torchrun()) is not None:
        return started.here
    return max(devices.count(device) for device in devices)


def threads_of(config: TrainConfig) -> int:
    """Of each process."""
    return config.threads or default_threads(config)


def default_threads(config: TrainConfig) -> int:
    """What `threads=null` is on this machine, with this K: each process its share of the cores."""
    _, distributed = place(config)
    return max(1, usable_cores() // (config.partitions if distributed else 1))


def place(config: TrainConfig) -> tuple[tuple[str, ...], bool]:
    """The device of every stage, and whether each gets a process of its own."""
    partitions, executor, started = config.partitions, config.executor, torchrun()
    # counted through the driver's management library: asking CUDA itself would open a context in this process
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and gpus == 0:
        raise ValueError("device=cuda: torch finds no CUDA device on this machine; use device=cpu or device=auto")
    if started is not None:
        many = f"torchrun started {started.processes} processes"
        if executor == "in_process":
            raise ValueError(f"executor=in_process: {many}; start one, or leave executor out")
        if started.processes != partitions:
            raise ValueError(
                f"partitions={partitions}: {many}, one per partition is needed; use partitions={started.processes} or "
                f"--nproc-per-node={partitions}"
            )
    if gpus == 0:
        return ("cpu",) * partitions, partitions > 1 and executor != "in_process"
    here = partitions if started is None else started.here
    enough = gpus >= here
    if executor == "distributed" and not enough:
        raise ValueError(
            f"executor=distributed: {here} processes need a GPU each and there are {gpus}; "
            "use executor=in_process, fewer partitions, or device=cpu"
        )
    if partitions > 1 and enough and executor != "in_process":
        return tuple(f"cuda:{stage % here}" for stage in range(partitions)), True
    return tuple(
        f"cuda:{stage * gpus // partitions if gpus < partitions else stage}" for stage in range(partitions)
    ), False
