"""Where the stages of a plan are: the devices, the processes and the threads of a run, before anything is allocated.

The parent makes the placement from shapes alone and hands it to every worker, so that none of them traces the model
again and all of them agree.
"""

from dataclasses import dataclass
from itertools import accumulate

from gpipe_cli.assembly.build import memory_format_of
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.runtime.frozen import Frozen
from gpipe_cli.pipeline.schedule.schedules import Recompute
from gpipe_cli.planner.cost_model import predicted_costs
from gpipe_cli.planner.devices import memory_limit, place
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import Plan, make_plan
from gpipe_cli.system.machine import usable_cores


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


def make_placement(config: TrainConfig, profile: ModelProfile | None = None, plan: Plan | None = None) -> Placement:
    """Cut the model as planned, or else by the data sheet, and place the parts. Raises ValueError, one line, for what
    cannot be cut or placed."""
    devices = place(config)
    profile = profile_model(config) if profile is None else profile
    if plan is None:
        plan = make_plan(config, profile, predicted_costs(config, profile), memory_limit(config, devices))
    costs, bounds = profile.costs, plan.bounds
    return Placement(
        layer_names=tuple(tuple(cost.name for cost in costs[first:end]) for first, end in bounds),
        parameters=tuple(sum(cost.parameters for cost in costs[first:end]) for first, end in bounds),
        trained=tuple(sum(w.trained for w in profile.weights[first:end]) for first, end in bounds),
        frozen=profile.frozen,
        cost=tuple(stage.graph_seconds + stage.backward_seconds for stage in plan.stages),
        inputs=profile.inputs,
        lengths=profile.lengths,
        training_boundaries=tuple(costs[end - 1].outputs for _, end in bounds[:-1]),
        evaluation_boundaries=tuple(profile.evaluation[end - 1].outputs for _, end in bounds[:-1]),
        parameter_tensors=tuple(sum(w.tensors for w in profile.weights[first:end]) for first, end in bounds),
        recompute=plan.recompute,
        devices=devices.stages,
        distributed=devices.distributed,
        threads=devices.threads,
        memory_format=memory_format_of(config),
    )
