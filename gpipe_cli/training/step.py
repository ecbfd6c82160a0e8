"""One training step and one pass over the test set, told once, for any number of processes.

Nothing here asks whether the run is distributed: what a process does not own it does not touch, and what it does not
know it gets from the team.
"""

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import torch

from gpipe_cli.assembly.loss import CrossEntropy, Totals
from gpipe_cli.assembly.optimizer import gradients_of, set_learning_rate
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.activity import Awaited
from gpipe_cli.distributed.control_group import ControlGroup, Gathered, gradient_norm
from gpipe_cli.pipeline.runtime.memory_layout import in_layout
from gpipe_cli.pipeline.runtime.micro_batch import Tensors, micro_batch_sizes
from gpipe_cli.pipeline.runtime.recording import MARKS, Recording, room
from gpipe_cli.pipeline.schedule.schedules import Schedule, forward_only
from gpipe_cli.planner.placement import Placement
from gpipe_cli.planner.step_schedule import checked_schedule
from gpipe_cli.system.process_memory import library_bytes, peak_memory_bytes
from gpipe_cli.training.data_feed import Reading
from gpipe_cli.training.engine import Engine

_SUMS = 5  # elements, loss, cross entropy, top-1, top-5
_OF_A_STAGE = 4  # peak memory, counted bytes of activations, bytes of libraries, share of computing time without a core


@lru_cache
def evaluation_schedule(partitions: int, micro_batches: int) -> Schedule:
    return forward_only(partitions, micro_batches)


@dataclass(frozen=True)
class StepNumbers:
    """What is known of a step; the same in every process."""

    totals: Totals  # over the mini-batch
    gradient_norm: float  # global
    memory_bytes: list[int]  # of each stage, the peak so far
    activation_bytes: list[int] | None  # of each stage, the most that was saved at once, if it was counted
    library_bytes: list[int] | None  # of each stage's process, of the peak, if it was counted
    without_core: list[float]  # of each stage, the share of its computing time in which it had no core; 0 on a GPU


@dataclass(frozen=True)
class StepResult:
    """A step that was done here; what the others know of it may still be on its way."""

    layout: Placement
    gathered: Gathered
    counted: bool  # whether saved activations were
    recording: Recording
    before: Recording | None  # of the step before: its numbers came with this step's

    def read(self) -> StepNumbers:
        """What all processes know of it together."""
        # what a process does not know is zero in its vector: only the last stage has seen the loss
        vectors = [_split(self.layout, vector) for vector in self.gathered.wait()]
        sums, stages = (torch.stack(parts).sum(dim=0) for parts in list(zip(*vectors, strict=True))[:2])
        elements, loss, cross_entropy, top1, top5 = sums.tolist()
        memory, activations, libraries = ([int(value) for value in column] for column in stages.T[:3].tolist())
        return StepNumbers(
            Totals(int(elements), loss, cross_entropy, top1, top5),
            gradient_norm([norms for _, _, norms, _ in vectors]),
            memory,
            activations if self.counted else None,
            libraries if self.counted else None,
            stages[:, 3].tolist(),
        )

    def read_before(self) -> list[list[float]]:
        """Of the step before, for each stage when it did what (`Recording.seconds`); [] if there was none."""
        if self.before is None:
            return []
        recordings = [_split(self.layout, vector)[3] for vector in self.gathered.wait()]
        return _by_stage(self.layout, recordings, self.before.schedule)


def _split(layout: Placement, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of what the processes tell each other in a step: the sums, the numbers of the stages (K, _OF_A_STAGE), the norms
    of the gradients of this process's parameters, and when each of its stages did what in the step before."""
    sizes = _sizes(layout)
    sums, stages, norms, recording = vector.split([*sizes, len(vector) - sum(sizes)])
    return sums, stages.view(layout.partitions, _OF_A_STAGE), norms, recording


def _sizes(layout: Placement) -> list[int]:
    return [_SUMS, layout.partitions * _OF_A_STAGE, layout.most_parameter_tensors]


def gather_recording(engine: Engine, team: ControlGroup, recording: Recording, micro_batches: int) -> list[list[float]]:
    """As `StepResult.read_before`, of the last step, which no other follows."""
    numbers = torch.zeros(_room(engine.layout, micro_batches), dtype=torch.float64)
    _put(numbers, recording, team)
    return _by_stage(engine.layout, team.gather(numbers).wait(), recording.schedule)


def _room(layout: Placement, micro_batches: int) -> int:
    return room(micro_batches) * (1 if layout.distributed else layout.partitions)


def _put(numbers: torch.Tensor, recording: Recording, team: ControlGroup) -> None:
    """When the stages of this process did what, on the clock of process 0."""
    own = [value for _, values in sorted(recording.seconds().items()) for value in values]
    numbers[: len(own)] = torch.tensor(own, dtype=torch.float64) - team.clock_offset_seconds


def _by_stage(layout: Placement, parts: Sequence[torch.Tensor], schedule: Schedule) -> list[list[float]]:
    seconds: list[list[float]] = []
    for process, part in enumerate(parts):
        values = part.tolist()
        for stage in layout.stages_of(process):
            length = MARKS * len(schedule[stage]) + 2
            seconds.append(values[:length])
            values = values[length:]
    return seconds


def rehearse(config: TrainConfig, engine: Engine, team: ControlGroup, data: Reading, epoch: int, position: int) -> None:
    """Run the first micro-batch of a mini-batch forward, forward again and backward, and change no weight. The next
    mini-batch that `data` loads is that one, and stays the next.

    Gradients and statistics are as after a step. Raises as the executor does.
    """
    samples = micro_batch_sizes(data.batches.size(epoch, position), config.micro_batches)[0]
    schedule = checked_schedule("gpipe", engine.layout.partitions, 1, "always")
    inputs, targets = None, None
    if data.loaded is not None:
        with team.waits(Awaited.DATA):
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
    team: ControlGroup,
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
    learning rate `rate`. `before` is the step before this one; with `count` the saved activations are counted, and what
    libraries need of a process that began with `begun_bytes` of its own."""
    sizes = micro_batch_sizes(data.batches.size(epoch, position), config.micro_batches)
    schedule = checked_schedule(config.schedule, engine.layout.partitions, len(sizes), engine.layout.recompute)
    targets = data.targets(epoch, position) if engine.has_last else None
    objective = objective_of(config, targets, sizes, config.label_smoothing, engine.last_device)
    lengths = data.batches.lengths(epoch, position)
    for stage in engine.stages.values():
        stage.count_saved(count)
    recording = engine.executor.run(schedule, step, sizes, _next_inputs(engine, team, data), objective, lengths)

    layout = engine.layout
    numbers = torch.zeros(sum(_sizes(layout)) + _room(layout, config.micro_batches), dtype=torch.float64)
    sums, stages, norms, recorded = _split(layout, numbers)
    if before is not None:
        _put(recorded, before, team)
    if objective is not None:
        sums.copy_(torch.tensor(astuple(objective.totals()), dtype=torch.float64))
    for k, stage in engine.stages.items():
        device = torch.device(layout.devices[k])
        counted = (stage.peak_saved_bytes, library_bytes(device, begun_bytes)) if count else (0, 0)
        stages[k] = torch.tensor([peak_memory_bytes(device), *counted, recording.without_core(k)], dtype=torch.float64)
    gradients = [g for k in engine.stages for g in gradients_of(engine.parameters[k].values())]
    if gradients:
        norms[: len(gradients)] = torch.cat(_stacked(torch._foreach_norm(gradients)))
    result = StepResult(layout, team.gather(numbers), count, recording, before)
    before_update()
    if config.gradient_clipping:
        norm = result.read().gradient_norm
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


def evaluate(config: TrainConfig, engine: Engine, team: ControlGroup, data: Reading) -> Totals:
    """Sums over the test set: forwards only, through the same executor. The loss is the plain cross entropy."""
    total = Totals(0, 0.0, 0.0, 0.0, 0.0)
    for position in range(data.batches.steps_per_epoch):
        sizes = micro_batch_sizes(data.batches.size(0, position), config.micro_batches)
        schedule = evaluation_schedule(engine.layout.partitions, len(sizes))
        targets = data.targets(0, position) if engine.has_last else None
        objective = objective_of(config, targets, sizes, 0.0, engine.last_device)
        lengths = data.batches.lengths(0, position)
        engine.executor.run(schedule, 0, sizes, _next_inputs(engine, team, data), objective, lengths)
        if objective is not None:
            total += objective.totals()
    numbers = torch.tensor(astuple(total), dtype=torch.float64)
    elements, *sums = torch.stack(team.gather(numbers).wait()).sum(dim=0).tolist()
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


def _next_inputs(engine: Engine, team: ControlGroup, data: Reading) -> Tensors | None:
    with team.waits(Awaited.DATA):
        inputs = data.inputs()
    return placed(engine, inputs)


def placed(engine: Engine, inputs: Tensors | None) -> Tensors | None:
    if inputs is None:
        return None
    return tuple(
        in_layout(tensor.to(engine.first_device, non_blocking=True), engine.memory_format) for tensor in inputs
    )


def _stacked(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms in float64 on the CPU, with one read per device instead of one per parameter."""
    by_device: list[list[torch.Tensor]] = []
    for norm in norms:
        if not by_device or by_device[-1][0].device != norm.device:
            by_device.append([])
        by_device[-1].append(norm)
    return [torch.stack(part).double().cpu() for part in by_device]
