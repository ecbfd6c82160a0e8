"""One training step and one pass over the test set, for any number of processes.

Nothing here asks whether the run is distributed: a process works on the stages that it has, and what it does not know
comes with the one gather of a step. For that each process packs what it knows into a vector, float64, of four parts:

    sums       (5,)     over the mini-batch: elements, loss, cross-entropy, top-1, top-5
    stages     (K, 4)   of each stage, the fields of `StageMetrics`
    norms      (P,)     of the gradients of the process's parameters in global order; P is the most that a process has
    recording  (S,)     when the process's stages did what in the step before

What a process does not know is 0 in its vector, so that the first two parts of all processes add up.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache, partial
from itertools import groupby, islice
from operator import attrgetter

import torch

from gpipe_cli.assembly.loss import CrossEntropy, Totals
from gpipe_cli.assembly.optimizer import gradients_of, set_learning_rate
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import Awaited, ControlGroup, gradient_norm
from gpipe_cli.pipeline.runtime.boundary import Tensors, in_layout, micro_batch_sizes
from gpipe_cli.pipeline.runtime.recording import MARKS, Recording, room
from gpipe_cli.pipeline.schedule.schedules import Schedule, forward_only
from gpipe_cli.planner.step_schedule import checked_schedule
from gpipe_cli.system.process_memory import library_bytes, peak_memory_bytes
from gpipe_cli.training.data_feed import Reading
from gpipe_cli.training.engine import Engine


@dataclass(frozen=True)
class StageMetrics:
    """What the process of a stage knows of it."""

    memory_bytes: float  # the peak so far
    activation_bytes: float  # the most that was saved at once, if it was counted
    library_bytes: float  # of its process, if it was counted
    without_core: float  # the share of its computing time in which it had no core; 0 on a GPU


@dataclass(frozen=True)
class StepMetrics:
    """What all processes know of a step together."""

    totals: Totals  # over the mini-batch
    gradient_norm: float  # global
    stages: tuple[StageMetrics, ...]
    seconds_before: list[list[float]]  # of the step before: of each stage, what `Recording.seconds` gives; [] if none


def rehearse(
    config: TrainConfig, engine: Engine, control: ControlGroup, data: Reading, epoch: int, position: int
) -> None:
    """Run the first micro-batch of a mini-batch forward, forward again and backward, and change no weight. The next
    mini-batch that `data` loads is that one, and stays the next.

    Gradients and statistics are as after a step. Raises as the executor does.
    """
    samples = micro_batch_sizes(data.batches.size(epoch, position), config.micro_batches)[0]
    schedule = checked_schedule("gpipe", engine.placement.partitions, 1, "always")
    inputs, targets = None, data.targets(epoch, position) if engine.has_last else None
    if data.loaded is not None:
        with control.waits(Awaited.DATA):
            whole = data.loaded.peek()
        inputs = placed(engine, tuple(tensor[:samples] for tensor in whole))
    targets = None if targets is None else targets[:samples]
    objective = objective_of(config, targets, (samples,), config.label_smoothing, engine.last_device)
    engine.executor.run(schedule, 0, (samples,), inputs, objective, data.batches.lengths(epoch, position))


def train_step(
    config: TrainConfig,
    engine: Engine,
    control: ControlGroup,
    step: int,
    rate: float,
    data: Reading,
    epoch: int,
    position: int,
    *,
    before: Recording | None,
    count: bool = False,
    begun_bytes: int = 0,
    before_update: Callable[[], None] = lambda: None,
) -> tuple[Recording, Callable[[], StepMetrics]]:
    """Mini-batch `position` of `epoch`: forward and backward through the pipeline, then every stage's optimizer with
    learning rate `rate`. The metrics that it returns wait for the other processes.

    `before` is the recording of the step before. With `count` the saved activations are counted, and what libraries
    need of a process that began with `begun_bytes` of its own. `before_update` is called when all gradients are there.
    """
    for stage in engine.stages.values():
        stage.count_saved(count)

    def schedule_of(micro_batches: int) -> Schedule:
        placement = engine.placement
        return checked_schedule(config.schedule, placement.partitions, micro_batches, placement.recompute)

    recording, objective = _run(
        config, engine, control, data, epoch, position, schedule_of, step, config.label_smoothing
    )
    stages = {}
    for k, stage in engine.stages.items():
        device = torch.device(engine.placement.devices[k])
        counted = (stage.peak_saved_bytes, library_bytes(device, begun_bytes)) if count else (0, 0)
        stages[k] = StageMetrics(peak_memory_bytes(device), *counted, recording.without_core(k))
    gradients = [g for k in engine.stages for g in gradients_of(engine.parameters[k].values())]
    totals, norms = None if objective is None else objective.totals(), norms_of(gradients)
    metrics = gather_metrics(config, engine, control, before, totals, stages, norms)

    before_update()
    if config.gradient_clipping:
        norm = metrics().gradient_norm
        if gradients and norm > config.gradient_clipping:
            torch._foreach_mul_(gradients, config.gradient_clipping / norm)
    for k, optimizer in engine.optimizers.items():
        now = engine.executor.recorder.clocks[k].now
        begun = now()
        if optimizer is not None:
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if k in engine.averages:
            engine.averages[k].update(engine.stages[k].statistics.newest)
        recording.update(k, begun, now())
    return recording, metrics


def evaluate(config: TrainConfig, engine: Engine, control: ControlGroup, data: Reading) -> Totals:
    """Sums over the test set: forwards only, through the same executor. The loss is the plain cross entropy."""
    total = Totals(0, 0.0, 0.0, 0.0, 0.0)
    for position in range(data.batches.steps_per_epoch):
        schedule_of = partial(forward_only, engine.placement.partitions)
        _, objective = _run(config, engine, control, data, 0, position, schedule_of, 0, 0.0)
        if objective is not None:
            total += objective.totals()
    return _sum(control.gather(torch.tensor(astuple(total), dtype=torch.float64))())


def objective_of(
    config: TrainConfig,
    targets: torch.Tensor | None,
    sizes: Sequence[int],
    label_smoothing: float,
    device: torch.device,
) -> CrossEntropy | None:
    """What the last stage, on `device`, minimises; None where there are no targets, as the last stage is elsewhere."""
    if targets is None:
        return None
    return CrossEntropy(
        targets,
        sizes,
        label_smoothing=label_smoothing,
        auxiliary_weight=getattr(config.model, "auxiliary_weight", 0.0),  # other models have no such head
        device=device,
    )


def placed(engine: Engine, inputs: Tensors | None) -> Tensors | None:
    if inputs is None:
        return None
    return tuple(
        in_layout(tensor.to(engine.first_device, non_blocking=True), engine.memory_format) for tensor in inputs
    )


def _run(
    config: TrainConfig,
    engine: Engine,
    control: ControlGroup,
    data: Reading,
    epoch: int,
    position: int,
    schedule_of: Callable[[int], Schedule],
    step: int,
    label_smoothing: float,
) -> tuple[Recording, CrossEntropy | None]:
    """One mini-batch, by the schedule for its number of micro-batches; the objective where the last stage is."""
    sizes = micro_batch_sizes(data.batches.size(epoch, position), config.micro_batches)
    targets = data.targets(epoch, position) if engine.has_last else None
    objective = objective_of(config, targets, sizes, label_smoothing, engine.last_device)
    lengths = data.batches.lengths(epoch, position)
    with control.waits(Awaited.DATA):
        inputs = data.inputs()
    schedule = schedule_of(len(sizes))
    return engine.executor.run(schedule, step, sizes, placed(engine, inputs), objective, lengths), objective


def gather_metrics(
    config: TrainConfig,
    engine: Engine,
    control: ControlGroup,
    before: Recording | None,
    totals: Totals | None = None,
    stages: Mapping[int, StageMetrics] | None = None,
    norms: torch.Tensor | None = None,
) -> Callable[[], StepMetrics]:
    """Share what this process knows of a step, and its recording of the step before (read on the clock of process 0);
    what is returned waits for the other processes."""
    placement = engine.placement
    sizes = len(fields(Totals)), placement.partitions * len(fields(StageMetrics)), placement.most_parameter_tensors
    stages_here = max(len(placement.stages_of(process)) for process in range(placement.processes))

    def parts(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums, of_stages, of_gradients, recorded = vector.split([*sizes, len(vector) - sum(sizes)])
        return sums, of_stages.view(placement.partitions, -1), of_gradients, recorded

    vector = torch.zeros(sum(sizes) + stages_here * room(config.micro_batches), dtype=torch.float64)
    to_sums, to_stages, to_norms, to_recording = parts(vector)
    if totals is not None:
        to_sums.copy_(torch.tensor(astuple(totals), dtype=torch.float64))
    for k, of_stage in (stages or {}).items():
        to_stages[k] = torch.tensor(astuple(of_stage), dtype=torch.float64)
    if norms is not None:
        to_norms[: len(norms)] = norms
    if before is not None:
        seconds = [value for _, values in sorted(before.seconds().items()) for value in values]
        to_recording[: len(seconds)] = torch.tensor(seconds, dtype=torch.float64) - control.clock_offset_seconds
    gathered = control.gather(vector)

    @cache
    def metrics() -> StepMetrics:
        all_sums, all_stages, all_norms, recordings = zip(*map(parts, gathered()), strict=True)
        seconds_before: list[list[float]] = []
        if before is not None:
            for process, recorded in enumerate(recordings):
                values = iter(recorded.tolist())
                for stage in placement.stages_of(process):
                    seconds_before.append(list(islice(values, MARKS * len(before.schedule[stage]) + 2)))
        numbers = torch.stack(all_stages).sum(dim=0).tolist()
        return StepMetrics(
            _sum(all_sums), gradient_norm(all_norms), tuple(StageMetrics(*of) for of in numbers), seconds_before
        )

    return metrics


def _sum(parts: Sequence[torch.Tensor]) -> Totals:
    elements, *sums = torch.stack(list(parts)).sum(dim=0).tolist()
    return Totals(int(elements), *sums)


def norms_of(gradients: list[torch.Tensor]) -> torch.Tensor | None:
    """Of each gradient, in float64 on the CPU, with one read per device instead of one per parameter."""
    if not gradients:
        return None
    by_device = groupby(torch._foreach_norm(gradients), key=attrgetter("device"))
    return torch.cat([torch.stack(list(norms)).double().cpu() for _, norms in by_device])
