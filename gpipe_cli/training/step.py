"""One training step and one pass over the test set, for any number of processes.

Nothing here asks whether the run is distributed: a process works on the stages that it has, and what it does not know
comes with the one gather of a step. For that each process packs what it knows into a vector, float64, of four parts:

    sums       (5,)     over the mini-batch: elements, loss, cross-entropy, top-1, top-5
    stages     (K, 4)   of each stage, the fields of `StageMetrics`
    norms      (P,)     of the gradients of the process's parameters in global order; P is the most that a process has
    recording  (S,)     when the process's stages did what in the step before

What a process does not know is 0 in its vector: the sums of all processes add up, and of a stage the most counts.
Norms and recordings are those of the first replica.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache, partial
from itertools import groupby, islice
from operator import attrgetter

import torch

from gpipe_cli.assembly.loss import CrossEntropy, Totals
from gpipe_cli.assembly.optimizer import set_learning_rate
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import Awaited, global_norm
from gpipe_cli.pipeline.runtime.boundary import Tensors, in_layout
from gpipe_cli.pipeline.runtime.host_copies import to_device, to_host
from gpipe_cli.pipeline.runtime.recording import ENDS, MARKS, Recording, room
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.schedule.named_schedules import build, forward_only
from gpipe_cli.pipeline.schedule.schedule import Schedule
from gpipe_cli.system.process_memory import library_bytes, peak_memory_bytes
from gpipe_cli.training.data_feed import MiniBatch, Reading
from gpipe_cli.training.engine import Engine


@dataclass(frozen=True)
class StageMetrics:
    """What the process of a stage knows of it; of several replicas the most."""

    memory_bytes: float  # the peak so far
    activation_bytes: float  # the most that was saved at once, if it was counted
    library_bytes: float  # memory of this process's libraries, if it was counted
    without_core: float  # the share of its computing time in which it had no core; 0 on a GPU


@dataclass(frozen=True)
class StepNumbers:
    """What this process knows of a step that has been launched. To call what is to be called waits for the device."""

    recording: Recording
    stages: Mapping[int, StageMetrics]
    totals: Callable[[], Totals] | None  # only in the process of the last stage
    norms: torch.Tensor  # float64, of each gradient, on the device
    read_norms: Callable[[], torch.Tensor]  # on the host


@dataclass(frozen=True)
class StepMetrics:
    """What all processes know of a step together."""

    totals: Totals  # over the mini-batch
    gradient_norm: float  # global
    stages: tuple[StageMetrics, ...]
    seconds: list[list[float]]  # per stage of the first replica, what `Recording.seconds` gives


def rehearse(engine: Engine, mini_batch: MiniBatch) -> None:
    """Run the first micro-batch of a mini-batch forward, forward again and backward, and change no weight. The next
    mini-batch that is loaded is this one, and stays the next.

    Gradients and statistics are as after a step. Raises as the executor does.
    """
    if not mini_batch.share.sizes:  # the other replicas have all of it
        return
    samples = mini_batch.share.sizes[0]
    schedule = build("gpipe", engine.spec.partitions, 1, "always")
    inputs, targets = None, mini_batch.targets() if engine.has_last else None
    if (loaded := mini_batch.reading.loaded) is not None:
        with engine.control.waits(Awaited.DATA):
            whole = loaded.peek()
        inputs = placed(engine, tuple(tensor[:samples] for tensor in whole))
    if targets is not None:
        targets = targets[0][:samples], 0
    objective = objective_of(engine.config, targets, (samples,), engine.config.label_smoothing, engine.last_device)
    engine.executor.run(schedule, 0, (samples,), inputs, objective, mini_batch.lengths)


def compute_gradients(engine: Engine, mini_batch: MiniBatch, step: int, begun_bytes: int | None = None) -> StepNumbers:
    """Run a mini-batch forward and backward through the pipeline; of several replicas, the gradients are added up.

    With `begun_bytes`, the memory that this process had when it began, saved activations are counted, and the memory
    that libraries have taken since.
    """
    counts = begun_bytes is not None
    for stage in engine.stages.values():
        stage.counter.on = counts
    smoothing, replicas = engine.config.label_smoothing, engine.replicas
    recording, objective = _run(engine, mini_batch, engine.spec.schedule, step, smoothing, replicas)
    if replicas is not None:
        clocks = engine.executor.recorder.clocks
        waits = {k: clocks[k].now() for k in engine.stages}
        replicas.finish()
        for k in engine.stages:
            recording.added_up(k, waits[k], clocks[k].now())
    stages = {}
    for k, stage in engine.stages.items():
        device = torch.device(engine.spec.layout.devices[k])
        counted = (0, 0) if begun_bytes is None else (stage.counter.peak_bytes, library_bytes(device, begun_bytes))
        stages[k] = StageMetrics(peak_memory_bytes(device), *counted, recording.without_core(k))
    norms = norms_of(engine.gradients())
    totals = None if objective is None else objective.begin_totals()
    return StepNumbers(recording, stages, totals, norms, to_host(norms))


def update_weights(engine: Engine, numbers: StepNumbers, rate: float) -> None:
    """Clip the gradients by their global norm, if the settings ask for that, and step every stage's optimizer with
    learning rate `rate`; moving averages follow. The gradients, whose norms are in `numbers`, are dropped."""
    control, largest = engine.control, engine.config.gradient_clipping
    if largest:
        norms = numbers.norms
        if control.size > 1:
            with control.waits(Awaited.PROCESS):  # see `gather_metrics`
                padded = _padded(numbers.read_norms(), engine.spec.most_parameter_tensors)
            norms = _known(control.gather(padded)()[: engine.spec.layout.of_pipeline]).to(norms.device)
        clip(engine.gradients(), norms, largest)
    for k, optimizer in engine.optimizers.items():
        now = engine.executor.recorder.clocks[k].now
        begun = now()
        if optimizer is not None:
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if k in engine.averages:
            engine.averages[k].update(engine.stages[k].statistics.newest)
        numbers.recording.update(k, begun, now())


def evaluate(engine: Engine, test: Reading) -> Totals:
    """Sums over the test set: forwards only, through the same executor. The loss is the plain cross entropy."""
    total = Totals(0, 0.0, 0.0, 0.0, 0.0)
    schedule_of = partial(forward_only, engine.spec.partitions)
    for position in range(test.batches.steps_per_epoch):
        _, objective = _run(engine, MiniBatch(test, 0, position), schedule_of, step=0, label_smoothing=0.0)
        if objective is not None:
            with engine.control.waits(Awaited.PROCESS):  # see `gather_metrics`
                total += objective.totals()
    return _sum(engine.control.gather(torch.tensor(astuple(total), dtype=torch.float64))())


def objective_of(
    config: TrainConfig,
    targets: tuple[torch.Tensor, int] | None,
    sizes: Sequence[int],
    label_smoothing: float,
    device: torch.device,
) -> CrossEntropy | None:
    """What the last stage, on `device`, minimises; None where there are no targets, as the last stage is elsewhere."""
    if targets is None:
        return None
    of_share, elements = targets
    return CrossEntropy(
        of_share,
        sizes,
        elements=elements,
        label_smoothing=label_smoothing,
        auxiliary_weight=getattr(config.model, "auxiliary_weight", 0.0),  # other models have no such head
        device=device,
    )


def placed(engine: Engine, inputs: Tensors | None) -> Tensors | None:
    """Inputs from the host as the first stage wants them: on its device, images in its memory format."""
    if inputs is None:
        return None
    return tuple(in_layout(to_device(tensor, engine.first_device), engine.memory_format) for tensor in inputs)


def _run(
    engine: Engine,
    mini_batch: MiniBatch,
    schedule_of: Callable[[int], Schedule],
    step: int,
    label_smoothing: float,
    replicas: Replicas | None = None,
) -> tuple[Recording, CrossEntropy | None]:
    """This pipeline's share of a mini-batch, by the schedule for its number of micro-batches; the objective where the
    last stage is. With `replicas` the gradients are being added up."""
    share, inputs = mini_batch.share, None
    targets = mini_batch.targets() if engine.has_last else None
    objective = objective_of(engine.config, targets, share.sizes, label_smoothing, engine.last_device)
    if share.sizes:
        with engine.control.waits(Awaited.DATA):
            inputs = mini_batch.inputs()
    recording = engine.executor.run(
        schedule_of(len(share.sizes)), step, share.sizes, placed(engine, inputs), objective, mini_batch.lengths,
        first_micro_batch=share.first_micro_batch, replicas=replicas,
    )  # fmt: skip
    return recording, objective


def gather_metrics(engine: Engine, numbers: StepNumbers) -> Callable[[], StepMetrics]:
    """Share what this process knows of a step (its recording on the clock of process 0); what is returned waits for the
    other processes."""
    spec, control = engine.spec, engine.control
    sizes = len(fields(Totals)), spec.partitions * len(fields(StageMetrics)), spec.most_parameter_tensors
    stages_here = max(len(spec.layout.stages_of(process)) for process in range(spec.layout.of_pipeline))

    def parts(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums, of_stages, of_gradients, recorded = vector.split([*sizes, len(vector) - sum(sizes)])
        return sums, of_stages.view(spec.partitions, -1), of_gradients, recorded

    vector = torch.zeros(sum(sizes) + stages_here * room(engine.config.micro_batches), dtype=torch.float64)
    to_sums, to_stages, to_norms, to_recording = parts(vector)
    for k, of_stage in numbers.stages.items():
        to_stages[k] = torch.tensor(astuple(of_stage), dtype=torch.float64)
    with control.waits(Awaited.PROCESS):  # a GPU that waits for another process holds up this one here
        if numbers.totals is not None:
            to_sums.copy_(torch.tensor(astuple(numbers.totals()), dtype=torch.float64))
        to_norms.copy_(_padded(numbers.read_norms(), len(to_norms)))
        seconds = [value for _, values in sorted(numbers.recording.seconds().items()) for value in values]
    if spec.layout.replica_of(control.rank) == 0:  # the timeline drawn is that of replica 0
        to_recording[: len(seconds)] = torch.tensor(seconds, dtype=torch.float64) - control.clock_offset_seconds
    gathered = control.gather(vector)
    schedule = numbers.recording.schedule

    @cache
    def metrics() -> StepMetrics:
        all_sums, all_stages, all_norms, recordings = zip(*map(parts, gathered()), strict=True)
        recorded: list[list[float]] = [[]] * spec.partitions
        for process in range(spec.layout.of_pipeline):
            values = iter(recordings[process].tolist())
            for stage in spec.layout.stages_of(process):
                recorded[stage] = list(islice(values, MARKS * len(schedule.stages[stage]) + ENDS))
        of_stages = torch.stack(all_stages).amax(dim=0).tolist()  # the largest over replicas
        norm = float(global_norm(_known(all_norms[: spec.layout.of_pipeline])))
        return StepMetrics(_sum(all_sums), norm, tuple(StageMetrics(*of) for of in of_stages), recorded)

    return metrics


def _sum(parts: Sequence[torch.Tensor]) -> Totals:
    elements, *sums = torch.stack(list(parts)).sum(dim=0).tolist()
    return Totals(int(elements), *sums)


def norms_of(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of each gradient, float64 (P,), on the device of the first one; no GPU is waited for."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    by_device = groupby(torch._foreach_norm(gradients), key=attrgetter("device"))
    norms = [torch.stack(list(of_device)).double() for _, of_device in by_device]
    return torch.cat([of_device.to(norms[0].device, non_blocking=True) for of_device in norms])


def clip(gradients: list[torch.Tensor], norms: torch.Tensor, largest: float) -> None:
    """Scale all gradients of this process so that the global norm, that of all `norms`, is `largest` at most."""
    norm = global_norm(norms)
    factor = torch.full_like(norm, largest).div_(norm).clamp_(max=1.0)  # stays on the device
    for (device, dtype), group in groupby(gradients, key=attrgetter("device", "dtype")):
        torch._foreach_mul_(list(group), factor.to(device, dtype, non_blocking=True))


def _padded(norms: torch.Tensor, length: int) -> torch.Tensor:
    padded = torch.full((length,), -1.0, dtype=torch.float64)
    padded[: len(norms)] = norms
    return padded


def _known(padded: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms of all processes, in global order."""
    together = torch.cat(list(padded))
    return together[together != -1]
