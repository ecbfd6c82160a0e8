"""One training step and one pass over the test set, for any number of processes.

Nothing here asks whether the run is distributed: a process works on the stages that it has, and what it does not know
comes with the one gather of a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

import torch

from gpipe_cli.assembly.loss import CrossEntropy, Totals
from gpipe_cli.assembly.optimizer import gradients_of, set_learning_rate
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.activity import Awaited
from gpipe_cli.distributed.control_group import ControlGroup, Gathered
from gpipe_cli.pipeline.runtime.boundary import Tensors, in_layout
from gpipe_cli.pipeline.runtime.micro_batch import micro_batch_sizes
from gpipe_cli.pipeline.runtime.recording import Recording
from gpipe_cli.pipeline.schedule.schedules import forward_only
from gpipe_cli.planner.placement import Placement
from gpipe_cli.planner.step_schedule import checked_schedule
from gpipe_cli.system.process_memory import library_bytes, peak_memory_bytes
from gpipe_cli.training.data_feed import Reading
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.step_metrics import StageMetrics, StepMetrics


@dataclass(frozen=True)
class StepResult:
    """A step that was done here; what the other processes know of it may still be on its way."""

    placement: Placement
    gathered: Gathered
    recording: Recording
    before: Recording | None  # of the step before, whose numbers come with this step's

    @cached_property
    def metrics(self) -> StepMetrics:
        """What all processes know of it together; waits for them."""
        return StepMetrics.unpack(
            self.placement, self.gathered(), None if self.before is None else self.before.schedule
        )


def rehearse(
    config: TrainConfig, engine: Engine, control: ControlGroup, data: Reading, epoch: int, position: int
) -> None:
    """Run the first micro-batch of a mini-batch forward, forward again and backward, and change no weight. The next
    mini-batch that `data` loads is that one, and stays the next.

    Gradients and statistics are as after a step. Raises as the executor does.
    """
    samples = micro_batch_sizes(data.batches.size(epoch, position), config.micro_batches)[0]
    schedule = checked_schedule("gpipe", engine.placement.partitions, 1, "always")
    inputs, targets = None, None
    if data.loaded is not None:
        with control.waits(Awaited.DATA):
            whole = data.loaded.peek()
        inputs = placed(engine, tuple(tensor[:samples] for tensor in whole))
    if engine.has_last:
        targets = data.targets(epoch, position)
        assert targets is not None
        targets = targets[:samples]
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
) -> StepResult:
    """Mini-batch `position` of `epoch`: forward and backward through the pipeline, then every stage's optimizer with
    learning rate `rate`.

    `before` is the recording of the step before. With `count` the saved activations are counted, and what libraries
    need of a process that began with `begun_bytes` of its own. `before_update` is called when all gradients are there.
    """
    sizes = micro_batch_sizes(data.batches.size(epoch, position), config.micro_batches)
    schedule = checked_schedule(config.schedule, engine.placement.partitions, len(sizes), engine.placement.recompute)
    targets = data.targets(epoch, position) if engine.has_last else None
    objective = objective_of(config, targets, sizes, config.label_smoothing, engine.last_device)
    lengths = data.batches.lengths(epoch, position)
    for stage in engine.stages.values():
        stage.count_saved(count)
    recording = engine.executor.run(schedule, step, sizes, _next_inputs(engine, control, data), objective, lengths)

    stages = {}
    for k, stage in engine.stages.items():
        device = torch.device(engine.placement.devices[k])
        counted = (stage.peak_saved_bytes, library_bytes(device, begun_bytes)) if count else (0, 0)
        stages[k] = StageMetrics(peak_memory_bytes(device), *counted, recording.without_core(k))
    gradients = [g for k in engine.stages for g in gradients_of(engine.parameters[k].values())]
    vector = StepMetrics.pack(
        engine.placement,
        config.micro_batches,
        totals=None if objective is None else objective.totals(),
        stages=stages,
        norms=_norms(gradients) if gradients else None,
        before=before,
        clock_offset_seconds=control.clock_offset_seconds,
    )
    result = StepResult(engine.placement, control.gather(vector), recording, before)

    before_update()
    if config.gradient_clipping:
        norm = result.metrics.gradient_norm
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
    return result


def gather_recording(
    engine: Engine, control: ControlGroup, recording: Recording, micro_batches: int
) -> list[list[float]]:
    """As `StepMetrics.seconds_before`, of the last step, which no other follows."""
    vector = StepMetrics.pack(
        engine.placement, micro_batches, before=recording, clock_offset_seconds=control.clock_offset_seconds
    )
    return StepMetrics.unpack(engine.placement, control.gather(vector)(), recording.schedule).seconds_before


def evaluate(config: TrainConfig, engine: Engine, control: ControlGroup, data: Reading) -> Totals:
    """Sums over the test set: forwards only, through the same executor. The loss is the plain cross entropy."""
    total = Totals(0, 0.0, 0.0, 0.0, 0.0)
    for position in range(data.batches.steps_per_epoch):
        sizes = micro_batch_sizes(data.batches.size(0, position), config.micro_batches)
        schedule = forward_only(engine.placement.partitions, len(sizes))
        targets = data.targets(0, position) if engine.has_last else None
        objective = objective_of(config, targets, sizes, 0.0, engine.last_device)
        lengths = data.batches.lengths(0, position)
        engine.executor.run(schedule, 0, sizes, _next_inputs(engine, control, data), objective, lengths)
        if objective is not None:
            total += objective.totals()
    numbers = torch.tensor(astuple(total), dtype=torch.float64)
    elements, *sums = torch.stack(control.gather(numbers)()).sum(dim=0).tolist()
    return Totals(int(elements), *sums)


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


def _next_inputs(engine: Engine, control: ControlGroup, data: Reading) -> Tensors | None:
    with control.waits(Awaited.DATA):
        inputs = data.inputs()
    return placed(engine, inputs)


def placed(engine: Engine, inputs: Tensors | None) -> Tensors | None:
    if inputs is None:
        return None
    return tuple(
        in_layout(tensor.to(engine.first_device, non_blocking=True), engine.memory_format) for tensor in inputs
    )


def _norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    """Of each gradient, in float64 on the CPU, with one read per device instead of one per parameter."""
    by_device = groupby(torch._foreach_norm(gradients), key=attrgetter("device"))
    return torch.cat([torch.stack(list(norms)).double().cpu() for _, norms in by_device])
