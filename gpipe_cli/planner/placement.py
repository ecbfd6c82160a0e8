"""Where the stages of a plan are (the devices, the processes and the threads of a run), and what these could do.

The parent makes the placement from shapes alone and hands it to every worker, so that none of them traces the model
again and all of them agree.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from gpipe_cli.assembly.build import memory_format_of
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.runtime.frozen import Frozen
from gpipe_cli.pipeline.schedule.schedules import Recompute, Schedule
from gpipe_cli.planner.cost_model import StepCosts, predicted_costs
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.device_rates import Figures, computes_in
from gpipe_cli.planner.devices import device_numbers, memory_limit, place
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import Plan, make_plan
from gpipe_cli.planner.step_schedule import checked_schedule, mini_batch_samples
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
    order: Schedule  # of a training step, for all M micro-batches
    recompute: Recompute  # what it does not say itself
    process_of_stage: tuple[int, ...]  # the process of each stage, among those of its pipeline
    replica_devices: tuple[tuple[str, ...], ...]  # of each pipeline, the device of each stage
    threads: int
    memory_format: str
    precision: str
    computes_in: str  # of that precision, by the devices that are here
    deterministic: bool
    compile: bool
    replica: int = 0  # the pipeline that this is looked at from

    @property
    def devices(self) -> tuple[str, ...]:
        """Of the stages of this pipeline."""
        return self.replica_devices[self.replica]

    @property
    def partitions(self) -> int:
        return len(self.layer_names)

    @property
    def replicas(self) -> int:
        """R; process p of pipeline r is process r P + p of the run, so that a pipeline stays on a machine."""
        return len(self.replica_devices)

    @property
    def of_pipeline(self) -> int:
        """P, the processes of each pipeline."""
        return 1 + max(self.process_of_stage)

    @property
    def processes(self) -> int:
        return self.of_pipeline * self.replicas

    @property
    def distributed(self) -> bool:
        return self.of_pipeline > 1

    @property
    def device_of_stage(self) -> tuple[int, ...]:
        """The number of each stage's device, from 0 on."""
        return device_numbers(self.process_of_stage, self.devices)

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
        return max(sum(self.parameter_tensors[k] for k in self.stages_of(p)) for p in range(self.of_pipeline))

    def device_of(self, process: int) -> str:
        return self.replica_devices[self.replica_of(process)][self.stages_of(process)[0]]

    def replica_of(self, process: int) -> int:
        return process // self.of_pipeline

    def stages_of(self, process: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.process_of_stage) if owner == process % self.of_pipeline)

    def schedule(self, micro_batches: int) -> Schedule:
        """Of a training step with so many micro-batches."""
        return checked_schedule(self.order, micro_batches, self.recompute)

    def of_replica(self, replica: int) -> "Placement":
        """The same, looked at from another pipeline."""
        return replace(self, replica=replica)


def make_placement(config: TrainConfig, profile: ModelProfile | None = None, plan: Plan | None = None) -> Placement:
    """Cut the model as planned, or else by the data sheet, and place the parts. Raises InputError, one line, for what
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
        order=plan.order,
        recompute=plan.recompute,
        process_of_stage=devices.process_of_stage,
        replica_devices=devices.replicas,
        threads=devices.threads,
        memory_format=memory_format_of(config),
        precision=config.precision,
        computes_in=computes_in(resolved(load_hardware("auto"), devices.stages).name, config.precision),
        deterministic=config.deterministic,
        compile=config.compile,
    )


@dataclass(frozen=True)
class StepFlops:
    """The operations that the model itself needs in a step, as the plan counts them, and what the devices could do."""

    step: float  # forward and backward of every layer, recomputation not counted, of a full mini-batch
    samples: int  # of that mini-batch
    tokens: int | None  # of that mini-batch, all as long as the longest; None for images
    peak_per_second: float | None  # of all devices that are used, by their data sheet; None: not known
    peak_source: str  # where the peak comes from, or why it is not known

    def per_second(self, samples_per_second: float | None, tokens_per_second: float | None) -> float | None:
        """Of real samples, or for text of real tokens: padding is no work. None without a speed."""
        rate, planned = (samples_per_second, self.samples) if self.tokens is None else (tokens_per_second, self.tokens)
        return None if rate is None else self.step / planned * rate


def step_flops(config: TrainConfig, profile: ModelProfile, placement: Placement, costs: StepCosts) -> StepFlops:
    """What the model needs of a full mini-batch, and what the devices that it runs on could do."""
    samples = mini_batch_samples(config, profile.lengths)
    peak, source = _peak(config, placement, costs.figures)
    return StepFlops(
        step=sum(cost.flops for cost in profile.costs) * samples,
        samples=samples,
        tokens=samples * max(profile.lengths) if config.task != "classification" else None,
        peak_per_second=peak,
        peak_source=source,
    )


def _peak(config: TrainConfig, placement: Placement, figures: Figures | None) -> tuple[float | None, str]:
    """Operations a second of all devices in use, and where the figure comes from; or None, and why it is not known.

    Of a GPU without a data sheet it is the speed of products that was timed. The peak of a machine that the settings
    name but that is not here says nothing of what ran here.
    """
    hardware, on_cpu = config.hardware, placement.devices[0] == "cpu"
    here = resolved(load_hardware("auto"), placement.devices).name  # auto: a GPU without a file
    sheet = resolved(hardware, placement.devices)
    if hardware.name not in ("auto", here) and (here != "auto" or on_cpu):
        return None, f"hardware={hardware.name} is not what it ran on, so its peak says nothing; leave it out"
    key, peak = sheet.peak(config.precision)
    if peak is not None:
        of_sheet = f"{sheet.name} in {'float32' if key == 'peak_tflops' else config.precision}"
        source = of_sheet if (key, peak) == load_hardware(sheet.name).peak(config.precision) else f"hardware.{key}"
    elif figures is not None and not on_cpu:
        peak, source = figures.product_flops_per_second / 1e12, "the measured product rate"
    else:
        return None, f"the peak of this {'CPU' if on_cpu else 'GPU'} is not known; hardware.peak_tflops=... says it"
    # under torchrun machines count their GPUs from 0, each
    devices = placement.of_pipeline if placement.distributed and not on_cpu else len(set(placement.devices))
    devices *= placement.replicas
    each = f"{peak:.4g} TFLOP/s"
    return peak * 1e12 * devices, f"{each} ({source})" if devices == 1 else f"{devices} x {each} ({source})"
