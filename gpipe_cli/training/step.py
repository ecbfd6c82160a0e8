"""A training step and a pass over the test set, for any number of processes.

Nothing here depends on whether the run is distributed: a process works on its own stages, and gets everything else by
a gather in each step. For that gather each process packs its own metrics into a float64 vector of four parts:

    sums       (5,)     over the mini-batch: elements, loss, cross-entropy, top-1, top-5
    stages     (K, 4)   the fields of `StageMetrics` for each stage
    norms      (P,)     of its parameters' gradients, in global order; -1 for parameters without gradient and as padding
                        (P is the most parameters of any process)
    recording  (S,)     `StepTimings.seconds` of the process's stages, concatenated

Other numbers that it does not know are 0: sums are added up over all processes, and metrics of a stage are maxima over
them. Norms and recordings are those of the first replica.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache, partial
from itertools import islice

import torch

from gpipe_cli.assembly.build import MEMORY_FORMATS
from gpipe_cli.assembly.loss import NO_TOTALS, CrossEntropy, Totals
from gpipe_cli.assembly.optimizer import clip_gradients, gradient_norms, set_learning_rate
from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.images import normalize
from gpipe_cli.distributed.control_group import BlockedOn, global_norm
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.boundary import Tensors, in_layout
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.step_timings import MARKS_PER_ACTION, MARKS_PER_STAGE, StepTimings, max_marks
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.named_schedules import forward_only
from gpipe_cli.schedule.schedule import Schedule
from gpipe_cli.system.accelerator import copy_to_host_async, to_device, using_device
from gpipe_cli.system.process_memory import overhead_bytes, peak_memory_bytes
from gpipe_cli.training.data_feed import MiniBatch, SplitReader
from gpipe_cli.training.engine import Engine


@dataclass(frozen=True)
class StageMetrics:
    """Metrics of a stage, measured in its process; with several replicas, the maximum of each."""

    memory_bytes: float  # peak memory so far
    activation_bytes: float  # most bytes of activations saved at once in this step; 0 if not counted
    overhead_bytes: float  # memory of the process's libraries; 0 if not counted, and on a GPU
    cpu_starved_share: float  # share of the stage's computing time without a core; 0 on a GPU


@dataclass(frozen=True)
class PendingMetrics:
    """What this process knows of a step that it has launched. Calling `totals` or `read_norms` waits for the device."""

    timings: StepTimings
    stages: Mapping[int, StageMetrics]
    totals: Callable[[], Totals] | None  # only in the process of the last stage
    norms: torch.Tensor  # float64: the norm of each gradient of this process, on the device
    read_norms: Callable[[], torch.Tensor]  # returns them on the host as `norms` (P,) above


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of a step, gathered from all processes."""

    totals: Totals  # over the mini-batch
    gradient_norm: float  # over all stages, before clipping
    stages: tuple[StageMetrics, ...]
    seconds: list[list[float]]  # `StepTimings.seconds` of each stage of the first replica, on the clock of process 0


def run_one_micro_batch(engine: Engine, mini_batch: MiniBatch, schedule: Schedule) -> None:
    """Run a mini-batch's first micro-batch alone, by `schedule`; gradients and statistics are then as after a step,
    weights as before. The mini-batch must be the next to be loaded, and stays so.

    Raises as the executor does.
    """
    if not mini_batch.shard.sizes:  # fewer samples than replicas: this replica has none
        return
    samples = mini_batch.shard.sizes[0]
    inputs = None
    targets = mini_batch.targets() if engine.has_last else None
    if (prefetched := mini_batch.reader.prefetched) is not None:
        with engine.control.blocked_on(BlockedOn.DATA):
            whole = prefetched.peek()
        inputs = to_first_device(engine.config, engine.spec, tuple(tensor[:samples] for tensor in whole))
    if targets is not None:
        targets = targets[0][:samples], 0
    objective = build_loss(engine.config, targets, (samples,), engine.config.label_smoothing, engine.last_device)
    engine.executor.run(schedule, 0, (samples,), inputs, objective, mini_batch.lengths)


def compute_gradients(
    engine: Engine, mini_batch: MiniBatch, step: int, bytes_at_start: int | None = None, *, counts: bool = False
) -> PendingMetrics:
    """Run a mini-batch forward and backward through the pipeline; gradients are summed over replicas, and those of
    tied weights over their uses.

    `counts`: saved activations are counted, too; with `bytes_at_start`, the memory that this process had when it began,
    that of libraries.
    """
    for stage in engine.stages.values():
        stage.counter.on = counts
    engine.check_still_frozen()
    smoothing, replicas = engine.config.label_smoothing, engine.replicas
    timings, objective = _run(engine, mini_batch, engine.spec.schedule, step, smoothing, replicas)
    engine.sum_gradients(timings)
    engine.executor.call_gradient_hooks()
    stages = {}
    for k, stage in engine.stages.items():
        device = torch.device(engine.spec.layout.devices[k])
        saved = stage.counter.peak_bytes if counts else 0
        libraries = 0 if bytes_at_start is None else overhead_bytes(device, bytes_at_start)
        stages[k] = StageMetrics(peak_memory_bytes(device), saved, libraries, timings.cpu_starved_share(k))
    norms = gradient_norms(engine.gradients_in_norm())
    totals = None if objective is None else objective.totals_async()
    owned_parameters = [parameter for k in engine.stages for parameter in engine.owned_parameters(k).values()]
    have = [index for index, parameter in enumerate(owned_parameters) if parameter.grad is not None]
    padded = partial(_pad_norms, copy_to_host_async(norms), have, engine.spec.max_parameter_tensors)
    return PendingMetrics(timings, stages, totals, norms, padded)


def update_weights(engine: Engine, pending: PendingMetrics, rate: float) -> None:
    """Clip the gradients by their global norm if `gradient_clipping` is set, step every stage's optimizer with learning
    rate `rate`, drop the gradients, and update the moving averages. `pending` has the norms of the gradients."""
    control, largest = engine.control, engine.config.gradient_clipping
    if largest:
        norms = pending.norms
        if control.size > 1:
            with control.blocked_on(BlockedOn.PROCESS):  # see `gather_metrics`
                padded = pending.read_norms()
            gathered = control.gather(padded)()[: engine.spec.layout.processes_per_pipeline]
            norms = _drop_padding(gathered).to(norms.device)
        clip_gradients(engine.gradients(), norms, largest)
    for k, optimizer in engine.optimizers.items():
        clock = engine.executor.timer.clocks[k]
        begun = clock.now()
        with using_device(engine.stages[k].device):
            if optimizer is not None:
                set_learning_rate(optimizer, rate)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if k in engine.averages:
                engine.averages[k].update(engine.stages[k].statistics.last_batch_stats)
        pending.timings.mark_update(k, begun, clock.now())


def evaluate(engine: Engine, test: SplitReader) -> Totals:
    """Sums over the test set, the same in all processes, by forwards in the executor; loss is plain cross entropy."""
    total = NO_TOTALS
    schedule_of = partial(forward_only, engine.spec.partitions)
    launched: list[Callable[[], Totals]] = []
    for position in range(test.batches.steps_per_epoch):
        _, objective = _run(engine, MiniBatch(test, 0, position), schedule_of, step=0, label_smoothing=0.0)
        if objective is not None:
            launched.append(objective.totals_async())
    with engine.control.blocked_on(BlockedOn.PROCESS):  # see `gather_metrics`
        for totals in launched:
            total += totals()
    return _sum(engine.control.gather(torch.tensor(astuple(total), dtype=torch.float64))())


def build_loss(
    config: TrainConfig,
    targets: tuple[torch.Tensor, int] | None,
    sizes: Sequence[int],
    label_smoothing: float,
    device: torch.device,
) -> CrossEntropy | None:
    """The loss that the last stage, on `device`, minimises. `targets` are from `MiniBatch.targets`; None gives None."""
    if targets is None:
        return None
    shard_targets, elements = targets
    return CrossEntropy(
        shard_targets,
        sizes,
        elements=elements,
        label_smoothing=label_smoothing,
        auxiliary_weight=getattr(config.model, "auxiliary_weight", 0.0),  # other models have no such head
        device=device,
    )


def to_first_device(config: TrainConfig, spec: PipelineSpec, inputs: Tensors | None) -> Tensors | None:
    """Inputs from the host, copied to the device of the first stage; images normalized, in its memory format."""
    if inputs is None:
        return None
    device, memory_format = torch.device(spec.layout.devices[0]), MEMORY_FORMATS[spec.memory_format]
    on_device = tuple(in_layout(to_device(tensor, device), memory_format) for tensor in inputs)
    return tuple(in_layout(tensor, memory_format) for tensor in normalize_inputs(config, on_device))


def normalize_inputs(config: TrainConfig, inputs: Tensors) -> Tensors:
    """The inputs as the first layer takes them: images that are uint8, as they are loaded, become float32."""
    dataset = config.dataset
    if not isinstance(dataset, ImagesConfig):
        return inputs
    return tuple(normalize(tensor, dataset) if tensor.dtype is torch.uint8 else tensor for tensor in inputs)


def _run(
    engine: Engine,
    mini_batch: MiniBatch,
    schedule_of: Callable[[int], Schedule],
    step: int,
    label_smoothing: float,
    replicas: Replicas | None = None,
) -> tuple[StepTimings, CrossEntropy | None]:
    """Run this pipeline's share of a mini-batch, by the schedule for its number of micro-batches. The objective is None
    without the last stage. With `replicas`, the sums of gradients are still in flight when this returns."""
    shard = mini_batch.shard
    inputs = None
    targets = mini_batch.targets() if engine.has_last else None
    objective = build_loss(engine.config, targets, shard.sizes, label_smoothing, engine.last_device)
    if shard.sizes:
        with engine.control.blocked_on(BlockedOn.DATA):
            inputs = mini_batch.inputs()
    inputs = to_first_device(engine.config, engine.spec, inputs)
    timings = engine.executor.run(
        schedule_of(len(shard.sizes)), step, shard.sizes, inputs, objective, mini_batch.lengths,
        first_micro_batch=shard.first_micro_batch, replicas=replicas,
    )  # fmt: skip
    return timings, objective


def gather_metrics(engine: Engine, pending: PendingMetrics) -> Callable[[], StepMetrics]:
    """Begin to gather the metrics of a step from all processes; the function returned waits for them. Recordings are
    converted to the clock of process 0."""
    spec, control = engine.spec, engine.control
    sizes = len(fields(Totals)), spec.partitions * len(fields(StageMetrics)), spec.max_parameter_tensors
    max_stages = max(len(spec.layout.stages_of(process)) for process in range(spec.layout.processes_per_pipeline))

    def parts(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sums, stages, norms, recorded = vector.split([*sizes, len(vector) - sum(sizes)])
        return sums, stages.view(spec.partitions, -1), norms, recorded

    vector = torch.zeros(sum(sizes) + max_stages * max_marks(engine.config.micro_batches), dtype=torch.float64)
    to_sums, to_stages, to_norms, to_recording = parts(vector)
    for k, stage_metrics in pending.stages.items():
        to_stages[k] = torch.tensor(astuple(stage_metrics), dtype=torch.float64)
    with control.blocked_on(BlockedOn.PROCESS):  # reading from a GPU blocks while that GPU waits for another process
        if pending.totals is not None:
            to_sums.copy_(torch.tensor(astuple(pending.totals()), dtype=torch.float64))
        to_norms.copy_(pending.read_norms())
        seconds = [value for _, values in sorted(pending.timings.seconds().items()) for value in values]
    if spec.layout.replica_of(control.rank) == 0:  # the timeline shows replica 0 only
        to_recording[: len(seconds)] = torch.tensor(seconds, dtype=torch.float64) - control.clock_offset_seconds
    gathered = control.gather(vector)
    schedule = pending.timings.schedule

    @cache
    def metrics() -> StepMetrics:
        all_sums, all_stages, all_norms, recordings = zip(*map(parts, gathered()), strict=True)
        recorded: list[list[float]] = [[]] * spec.partitions
        for process in range(spec.layout.processes_per_pipeline):
            of_process = iter(recordings[process].tolist())
            for stage in spec.layout.stages_of(process):
                recorded[stage] = list(
                    islice(of_process, MARKS_PER_ACTION * len(schedule.stages[stage]) + MARKS_PER_STAGE)
                )
        _check_gradients_agree(engine, all_norms)
        largest = torch.stack(all_stages).amax(dim=0).tolist()  # over processes, and so over replicas
        norm = float(global_norm(_drop_padding(all_norms[: spec.layout.processes_per_pipeline])))
        stages = tuple(StageMetrics(*values) for values in largest)
        return StepMetrics(_sum(all_sums), norm, stages, recorded)

    return metrics


def _sum(parts: Sequence[torch.Tensor]) -> Totals:
    elements, *sums = torch.stack(list(parts)).sum(dim=0).tolist()
    return Totals(int(elements), *sums)


def _check_gradients_agree(engine: Engine, norms: Sequence[torch.Tensor]) -> None:
    """Raises InputError if a parameter has a gradient in some replicas only, and RuntimeError if its gradients have
    different norms in two replicas: their weights would diverge. `norms`, (P,) each, are those of all processes."""
    spec = engine.spec
    for process, process_norms in enumerate(norms):
        first_norms = norms[process % spec.layout.processes_per_pipeline]
        close = torch.isclose(process_norms, first_norms, rtol=1e-3, equal_nan=True)
        place = int(close.int().argmin())  # the first that is not close, if any
        if close[place]:
            continue
        layers = {layer for k in spec.layout.stages_of(process) for layer in spec.layer_names[k]}
        names = [name for name, _ in engine.model.named_parameters() if name.partition(".")[0] in layers]
        replica = spec.layout.replica_of(process)
        where = f"replicas={spec.layout.replicas}: in replicas 0 and {replica}, the gradient of {names[place]}"
        if -1.0 not in (float(first_norms[place]), float(process_norms[place])):
            raise RuntimeError(f"{where} differs after it was summed")
        raise InputError(
            f"{where} exists in only one of them; which parameters a layer uses must not depend on the samples; "
            "use replicas=1"
        )


def _pad_norms(norms: Callable[[], torch.Tensor], have: Sequence[int], length: int) -> torch.Tensor:
    """Norms on the host, at the places of the parameters that `have` gradients; -1 elsewhere."""
    padded = torch.full((length,), -1.0, dtype=torch.float64)
    padded[torch.tensor(have, dtype=torch.long)] = norms()
    return padded


def _drop_padding(padded: Sequence[torch.Tensor]) -> torch.Tensor:
    """The norms of all processes, in global order, without their padding."""
    together = torch.cat(list(padded))
    return together[together != -1]
