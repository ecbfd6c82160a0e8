"""The stages of a planned model and where they run: all that a worker needs to know about its pipeline.

The parent process makes the spec from shapes alone and passes it to every worker: none traces the model again.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from gpipe_cli.assembly.build import memory_format_of
from gpipe_cli.config.pipeline_settings import CudaGraphs
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.torchrun_env import Torchrun
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.runtime.frozen import Frozen
from gpipe_cli.pipeline.runtime.routes import inputs_of, outputs_of, routes
from gpipe_cli.pipeline.runtime.tied_weights import Tie, stages_of
from gpipe_cli.planner.data_sheet import sheet_of_devices
from gpipe_cli.planner.device_rates import effective_precision
from gpipe_cli.planner.make_plan import plan_step
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.process_layout import Layout
from gpipe_cli.planner.step_schedule import validated_schedule_for
from gpipe_cli.schedule.schedule import RecomputePlan, Schedule


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """A model cut into stages, where these compute, and the order of their actions. Boundaries have an entry per edge
    between stages: all tensors that cross it, skips to later stages among them."""

    layer_names: tuple[tuple[str, ...], ...]  # of each stage
    ties: tuple[Tie, ...]
    training_boundaries: tuple[Boundary, ...]
    evaluation_boundaries: tuple[Boundary, ...]
    order: Schedule  # the actions of a training step with all M micro-batches
    recompute: RecomputePlan  # micro-batches to recompute, unless `order` already has recomputations
    layout: Layout
    memory_format: str = "contiguous"
    precision: str = "float32"
    compile: bool = False
    graphs: CudaGraphs = "auto"

    @property
    def partitions(self) -> int:
        return len(self.layer_names)

    @property
    def stages_of_ties(self) -> tuple[tuple[int, ...], ...]:
        """For each tied weight, the stage of each of its uses."""
        return stages_of(self.ties, self.layer_names)

    @property
    def skips(self) -> tuple[tuple[int, int], ...]:
        """The pairs of stages, not neighbours, of which the first sends a skip to the second."""
        pairs = ((route.sender, route.receiver) for route in routes(self.training_boundaries))
        return tuple((sender, receiver) for sender, receiver in pairs if receiver > sender + 1)

    @property
    def first_layers(self) -> tuple[int, ...]:
        return tuple(accumulate((len(names) for names in self.layer_names[:-1]), initial=0))

    def schedule(self, micro_batches: int) -> Schedule:
        """The schedule of a training step of `micro_batches`. Raises ScheduleError if it cannot be performed."""
        return validated_schedule_for(self.order, micro_batches, self.recompute)


@dataclass(frozen=True, kw_only=True)
class PipelineSpec(PipelineCut):
    """The cut of a run's model, with what it was planned for. Costs and counts have an entry per stage."""

    parameters: tuple[int, ...]
    trained: tuple[int, ...]  # number of these parameters that are not frozen
    frozen: Frozen
    cost: tuple[float, ...]  # predicted seconds of a micro-batch's forward and backward
    inputs: Boundary  # tensors given to the first stage
    lengths: tuple[int, ...]  # the maximum lengths that sentences are padded to
    parameter_tensors: tuple[int, ...]
    effective_precision: str  # the type in which the devices here compute products and convolutions at that precision
    deterministic: bool

    def stage_of(self, layer: str) -> int:
        return next(k for k, names in enumerate(self.layer_names) if layer in names)

    def stage_inputs(self, stage: int) -> Boundary:
        """What a stage is given in training: by other stages, or the first layer's inputs."""
        return inputs_of(self.training_boundaries, stage) if stage else self.inputs

    def stage_outputs(self, stage: int) -> Boundary:
        """What a stage sends to others in training."""
        return outputs_of(self.training_boundaries, stage)

    @property
    def max_parameter_tensors(self) -> int:
        """The most parameter tensors of any process: the length of a vector with a number for each tensor."""
        return max(
            sum(self.parameter_tensors[k] for k in self.layout.stages_of(p))
            for p in range(self.layout.processes_per_pipeline)
        )

    def on(self, replica_devices: tuple[tuple[str, ...], ...]) -> "PipelineSpec":
        """This spec on other devices."""
        return replace(self, layout=replace(self.layout, replica_devices=replica_devices))


def make_pipeline_spec(
    config: TrainConfig, profile: ModelProfile | None = None, torchrun: Torchrun | None = None
) -> PipelineSpec:
    """Plan a step by the hardware's data sheet, cut the model and place its stages; `torchrun`: this process, if
    torchrun started it. Raises InputError if the model cannot be cut."""
    profile = profile_model(config) if profile is None else profile
    return spec_from_plan(plan_step(config, profile, torchrun=torchrun))


def spec_from_plan(plan: Plan) -> PipelineSpec:
    """Cut the model as planned and place its stages on this machine, even if the plan was for another."""
    config, profile, costs, bounds = plan.config, plan.profile, plan.profile.costs, plan.bounds
    layout = replace(plan.layout, is_local=True)
    in_training, in_evaluation = profile.boundaries(plan.balance)
    return PipelineSpec(
        layer_names=tuple(tuple(cost.name for cost in costs[first:end]) for first, end in bounds),
        parameters=tuple(sum(weights.parameters for weights in profile.weights[first:end]) for first, end in bounds),
        trained=tuple(sum(weights.trained for weights in profile.weights[first:end]) for first, end in bounds),
        frozen=profile.frozen,
        ties=tuple(tied.tie for tied in profile.tied),
        cost=tuple(stage.graph_seconds + stage.backward_seconds for stage in plan.stage_costs),
        inputs=profile.inputs,
        lengths=profile.lengths,
        training_boundaries=in_training,
        evaluation_boundaries=in_evaluation,
        parameter_tensors=tuple(sum(layer.tensors for layer in profile.weights[first:end]) for first, end in bounds),
        order=plan.order,
        recompute=plan.recompute,
        layout=layout,
        memory_format=memory_format_of(config),
        precision=config.precision,
        effective_precision=effective_precision(sheet_of_devices(layout.devices).name, config.precision),
        deterministic=config.deterministic,
        compile=config.compile,
        graphs=config.graphs,
    )
