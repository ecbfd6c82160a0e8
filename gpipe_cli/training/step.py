"""A training step and a pass over the test set, for any number of processes.

Nothing here depends on whether the run is distributed: a process works on its own stages, and gets everything else by
a gather in each step, for which each process packs its metrics into a float64 vector of four parts:

    sums       (5,)     over the mini-batch: elements, loss, cross-entropy, top-1, top-5
    stages     (K, 4)   the fields of `StageMetrics` for each stage
    norms      (P,)     of its parameters' gradients, in global order; -1 for parameters without gradient and as padding
                        (P is the most parameters of any process)
    timings    (S,)     `StepTimings.seconds` of the process's stages, concatenated

Numbers that a process does not know are 0: sums are added up over all processes, and a stage's metrics are maxima over
them. Norms and timings are the first replica's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from functools import cache, partial
from itertools import islice
from typing import NamedTuple

import torch

from gpipe_cli.assembly.build import MEMORY_FORMATS
from gpipe_cli.assembly.loss import NO_TOTALS, CrossEntropy, Totals
from gpipe_cli.assembly.optimizer import clip_gradients, gradient_norms, gradients_of, set_learning_rate
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


class StageMetrics(NamedTuple):
    """Metrics of a stage, measured in its process; with several replicas, the maximum of each."""

    memory_bytes: float  # peak memory so far
    activation_bytes: float  # peak bytes of saved activations in this step; 0 if not counted
    overhead_bytes: float  # memory of the process's libraries; 0 if not counted, and on a GPU
    cpu_starved_share: float  # share of the stage's computing time without a core; 0 on a GPU


class PendingMetrics(NamedTuple):
    """This process's metrics of a step that it has launched. Calling `totals` or `read_norms` waits for the device."""

    timings: StepTimings
    stages: Mapping[int, StageMetrics]
    totals: Callable[[], Totals] | None  # only in the process of the last stage
    norms: torch.Tensor  # float64: the norm of each gradient of this process, on the device
    read_norms: Callable[[], torch.Tensor]  # returns them on the host as `norms` (P,) above


class StepMetrics(NamedTuple):
    """The metrics of a step, gathered from all processes."""

    totals: Totals  # over the mini-batch
    gradient_norm: float  # over all stages, before clipping
    stages: tuple[StageMetrics, ...]
    seconds: list[list[float]]  # `StepTimings.seconds` of each stage of the first replica, on the clock of process 0


def run_one_micro_batch(engine: Engine, mini_batch: MiniBatch, schedule: Schedule) -> None:
    """Run only the first micro-batch of a mini-batch, by `schedule`; gradients and statistics are then as after a step,
    weights as before. The mini-batch must be the next to be loaded, and remains the next.

    Raises the executor's errors.
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
    """Run a mini-batch forward and backward through the pipeline; gradients are summed over replicas, and tied weights'
    also over their uses.

    `counts`: count saved activations; `bytes_at_start`, this process's memory when it began: count libraries' memory.
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
    owned_parameters = [parameter for k in engine.stages for parameter in engine.owned_parameters(k).values()]
    have = [index for index, parameter in enumerate(owned_parameters) if parameter.grad is not None]
    norms = gradient_norms(gradients_of(owned_parameters))  # a tied weight counts where it is used first
    totals = None if objective is None else objective.totals_async()
    padded = partial(_pad_norms, copy_to_host_async(norms), have, engine.spec.max_parameter_tensors)
    return PendingMetrics(timings, stages, totals, norms, padded)


def update_weights(engine: Engine, pending: PendingMetrics, rate: float) -> None:
    """Clip the gradients by their global norm if `gradient_clipping` is set, step every stage's optimizer with learning
    rate `rate`, drop the gradients, and update the moving averages. `pending` has the norms of the gradients."""
    control, largest = engine.control, engine.config.gradient_clipping
    if largest:
        norms = pending.norms
        if control.size > 1:
            with control.blocked_on(BlockedOn.PROCESS):  # see `_pack`
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
    with engine.control.blocked_on(BlockedOn.PROCESS):  # see `_pack`
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
    """The inputs as the first layer takes them: uint8 images, as they are loaded, become float32."""
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
    """Run this pipeline's shard of a mini-batch, by the schedule for its number of micro-batches. The objective is None
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
    """Begin to gather the metrics of a step from all processes; the function returned waits for them."""
    gathered, schedule = engine.control.gather(_pack(engine, pending)), pending.timings.schedule
    return cache(lambda: _merge(engine, schedule, [_unpack(engine.spec, vector) for vector in gathered()]))


def _pack(engine: Engine, pending: PendingMetrics) -> torch.Tensor:
    """The metrics that this process knows, as the vector above; timings on the clock of process 0."""
    spec, control = engine.spec, engine.control
    stages = torch.zeros(spec.partitions, len(StageMetrics._fields), dtype=torch.float64)
    for k, stage_metrics in pending.stages.items():
        stages[k] = torch.tensor(stage_metrics, dtype=torch.float64)
    with control.blocked_on(BlockedOn.PROCESS):  # reading from a GPU blocks while that GPU waits for another process
        totals = NO_TOTALS if pending.totals is None else pending.totals()
        norms = pending.read_norms()
        seconds = [value for _, values in sorted(pending.timings.seconds().items()) for value in values]
    max_stages = max(len(spec.layout.stages_of(process)) for process in range(spec.layout.processes_per_pipeline))
    timings = torch.zeros(max_stages * max_marks(engine.config.micro_batches), dtype=torch.float64)
    if spec.layout.replica_of(control.rank) == 0:  # the timeline shows replica 0 only
        timings[: len(seconds)] = torch.tensor(seconds, dtype=torch.float64) - control.clock_offset_seconds
    return torch.cat([torch.tensor(astuple(totals), dtype=torch.float64), stages.flatten(), norms, timings])


def _unpack(spec: PipelineSpec, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four parts of a process's vector: sums, stages, norms, timings."""
    sizes = len(fields(Totals)), spec.partitions * len(StageMetrics._fields), spec.max_parameter_tensors
    sums, stages, norms, timings = vector.split([*sizes, len(vector) - sum(sizes)])
    return sums, stages.view(spec.partitions, -1), norms, timings


def _merge(engine: Engine, schedule: Schedule, vectors: Sequence[tuple[torch.Tensor, ...]]) -> StepMetrics:
    """The metrics of the step, from the parts of the vectors of all processes."""
    layout = engine.spec.layout
    sums, stages, norms, all_timings = zip(*vectors, strict=True)
    _check_gradients_agree(engine, norms)
    seconds: list[list[float]] = [[]] * len(layout.devices)
    for process in range(layout.processes_per_pipeline):
        timings = iter(all_timings[process].tolist())
        for k in layout.stages_of(process):
            seconds[k] = list(islice(timings, MARKS_PER_ACTION * len(schedule.stages[k]) + MARKS_PER_STAGE))
    norm = float(global_norm(_drop_padding(norms[: layout.processes_per_pipeline])))
    largest = torch.stack(stages).amax(dim=0).tolist()  # over processes, and so over replicas
    return StepMetrics(_sum(sums), norm, tuple(StageMetrics(*values) for values in largest), seconds)


def _sum(parts: Sequence[torch.Tensor]) -> Totals:
    elements, *sums = torch.stack(list(parts)).sum(dim=0).tolist()
    return Totals(int(elements), *sums)


def _check_gradients_agree(engine: Engine, norms: Sequence[torch.Tensor]) -> None:
    """Raises InputError if a parameter has a gradient in only some replicas, and RuntimeError if its gradients have
    different norms in two replicas: their weights would diverge. `norms`: (P,) of each process."""
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
