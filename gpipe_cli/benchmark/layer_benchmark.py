"""Times each layer for micro-batches of two sizes on this device (c_i in section 2.1 of the paper), and messages.

Layers are timed inside a stage, all forwards before all backwards, as in training: a layer that runs alone, again and
again, finds its input in the cache. A model that is too large for a device is timed in segments. Where stages are
replayed as CUDA graphs, each layer is a separate stage: the clock cannot be read inside a graph.

What is predicted is a step in which all processes compute, and they share memory and caches: so all of them time both
micro-batches at the same time, alternately for about a second, as other programs may slow down a machine for part of
it. One process then times the larger micro-batch alone, and with all threads of the machine, as a single device has:
only the ratio to the other times counts. Time in which other programs had a process's core does not count, except
for the share that a run loses on its own cores, too (CONTENDED_SHARE).
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from gpipe_cli.assembly.build import MEMORY_FORMATS, build_model, full_model_builder, outputs_of, targets_of
from gpipe_cli.assembly.optimizer import build_optimizer, gradient_norms, gradients_of
from gpipe_cli.assembly.weight_average import WeightAverage
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups
from gpipe_cli.pipeline.runtime.boundary import Boundary, Tensors, as_tuple, in_layout
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.step_timings import StepTimer
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.results.run import CONTENDED_SHARE
from gpipe_cli.schedule.schedule import Action, Kind, Retain
from gpipe_cli.system.accelerator import DEVICE_TYPE, is_accelerator, wait_for_device
from gpipe_cli.training.engine import WorkerProcess, build_layers
from gpipe_cli.training.pipeline_part import build_stage
from gpipe_cli.training.step import build_loss

_WARM_UP, _MIN_PASSES, _MAX_PASSES = 3, 3, 400  # numbers of passes over a segment
_FRACTION_ALONE = 0.3  # of `TimingJob.seconds`: for the passes of a process alone, and for those with all threads
_PASSES_PER_TURN = 3  # passes of a size, before the other's
_MAX_TIME_FACTOR = 3  # the first _MIN_PASSES passes may take this many times `TimingJob.seconds`
_WARM_UP_SECONDS = 0.1  # about the longest warm-up
_LONG_SECONDS = 0.5  # work that takes longer runs only twice
_LINK_BYTES = {"cpu": (1 << 10, 1 << 22), DEVICE_TYPE: (1 << 10, 1 << 26)}  # two sizes give latency and bandwidth
_LINK_ROUNDS = 15


Link = tuple[float, float]  # latency in seconds, bandwidth in bytes per second
# The seconds of each layer: forward, forward that saves its graph, backward; if that is split, also its halves for the
# inputs and for the weights.
Pass = list[tuple[float, ...]]


@dataclass(frozen=True)
class TimingJob:
    """How every layer of a model is timed."""

    config: TrainConfig
    segments: PipelineSpec  # the model cut into segments, each of which fits the device
    layers: PipelineSpec | None  # the model cut into single layers, to be replayed as CUDA graphs; None without
    samples: tuple[int, int]  # samples of the smaller and of the larger micro-batch
    seconds: float  # about how long all passes over the model together are repeated
    splits: bool  # also time the two halves of each backward: gradients of inputs, and of weights
    max_threads: int  # threads of a device that has the whole machine


@dataclass(frozen=True)
class TimingResult:
    """What process 0 reports."""

    seconds: tuple[Pass, Pass]  # for both sizes
    updates: list[float]  # seconds of the update of each layer's weights
    set_up: float  # seconds once a step
    slowdown: float  # how much longer layers take while all processes compute
    faster: float  # how many times as fast a process is with `TimingJob.max_threads`
    scatter: tuple[float, float]  # quartiles of the passes' seconds by the clock, as parts of the seconds reported
    link: Link | None  # the slowest link; None if nothing is sent


def measure(timing: TimingJob, spec: PipelineSpec, process: WorkerProcess) -> None:
    """Time every layer. All processes of `spec` call this at the same time; process 0 reports its `TimingResult`."""
    config = timing.config
    control, groups = process.connect()
    device = spec.layout.device_of(process.rank)
    builder = full_model_builder(config, pretrained=False)

    def timers(cut: PipelineSpec) -> Iterator[_LayerTimer]:
        """Every process times all stages, one after another."""
        on_device = cut.on(((device,) * cut.partitions,))
        for index in range(cut.partitions):
            stage = build_stage(
                on_device, index, build_layers(config, on_device, index, build_model(config), builder), config.seed
            )
            yield _LayerTimer(timing, on_device, stage, hooks=cut is timing.segments)

    all_passes: tuple[Pass, Pass] = [], []
    quartiles = [0.0, 0.0]
    passes_alone: Pass = []
    passes_with_all_threads: Pass = []
    updates: list[float] = []
    set_up = 0.0
    for timer in timers(timing.layers or timing.segments):
        control.barrier()
        for layers, timed in zip(all_passes, timer.passes(timing.samples), strict=True):
            layers += timed
        quartiles = [before + seconds for before, seconds in zip(quartiles, timer.quartiles, strict=True)]
        control.barrier()
        if control.is_rank_zero and control.size > 1:
            passes_alone += timer.passes(timing.samples[1:], _FRACTION_ALONE)[0]
        if control.is_rank_zero and timing.layers is None:
            updates += timer.updates()
            set_up += timer.set_up()
            if timing.max_threads > spec.layout.threads:
                torch.set_num_threads(timing.max_threads)
                passes_with_all_threads += timer.passes(timing.samples[1:], _FRACTION_ALONE)[0]
                torch.set_num_threads(spec.layout.threads)
        control.barrier()
    if control.is_rank_zero and timing.layers is not None:
        for timer in timers(timing.segments):
            timer.warm_up(timing.samples[0])  # which makes the gradients
            updates += timer.updates()
            set_up += timer.set_up()
    link = _slowest_link(spec, process.rank, control, groups)
    if control.is_rank_zero:
        slowdown = max(1.0, _sum(all_passes[1]) / _sum(passes_alone)) if passes_alone else 1.0
        small, large = ([tuple(seconds / slowdown for seconds in layer) for layer in layers] for layers in all_passes)
        faster = max(1.0, _sum(large) / _sum(passes_with_all_threads)) if passes_with_all_threads else 1.0
        low, high = (seconds / _sum(all_passes[1]) for seconds in quartiles)
        process.report(TimingResult((small, large), updates, set_up, slowdown, faster, (low, high), link))
    control.barrier()


def _sum(layers: Pass) -> float:
    return sum(map(sum, layers))


class _LayerTimer:
    """Runs a segment repeatedly, and reads the clock at every boundary between layers."""

    def __init__(self, timing: TimingJob, spec: PipelineSpec, stage: Stage, *, hooks: bool) -> None:
        """`hooks`: read the clock between the layers of the stage; else it has a single layer, and may be replayed."""
        self._timing, self._spec, self._config, self._stage = timing, spec, timing.config, stage
        self._layers = list(stage.module.children())
        self._clock = StepTimer({stage.index: stage.device}).clocks[stage.index]
        # by samples: inputs, gradients of outputs, and targets, which only the segment with the last layer has
        self._drawn: dict[int, tuple[Tensors, Sequence[torch.Tensor | None], torch.Tensor | None]] = {}
        self._finishing: list[float] = []
        self._core_shares: list[float] = []  # share of each pass for which this process had its core
        self.quartiles = (0.0, 0.0)  # of the seconds of the last passes of `passes`, by the clock
        self._forward: list[Any] = []
        self._backward: dict[int, Any] = {}
        self._weights: list[tuple[int, Any]] = []  # number of the layer and mark of each weight gradient
        self._hooks = hooks
        self._seconds = timing.seconds / spec.partitions
        if stage.cuda_graphs is not None:
            stage.cuda_graphs.capture_eagerly = True
        for number, layer in enumerate(self._layers) if hooks else ():
            for weight in layer.parameters() if timing.splits else ():
                if weight.requires_grad:
                    weight.register_post_accumulate_grad_hook(partial(self._mark_weight, number))
            layer.register_forward_pre_hook(lambda layer, inputs: self._forward.append(self._clock.now()))
            layer.register_forward_hook(partial(self._await_gradient, number))

    def _draw(self, samples: int) -> None:
        """Take a micro-batch of `samples`, and gradients of the segment's outputs, drawn when they are first needed."""
        if samples not in self._drawn:
            self._drawn[samples] = self._make_micro_batch(samples)
        self._samples = samples
        self._inputs, self._gradients, self._targets = self._drawn[samples]

    def _make_micro_batch(self, samples: int) -> tuple[Tensors, Sequence[torch.Tensor | None], torch.Tensor | None]:
        """Inputs of the segment, gradients of its outputs and, for the segment with the last layer, targets instead."""
        stage, spec, config = self._stage, self._spec, self._config
        generator = torch.Generator().manual_seed(0)
        memory_format = MEMORY_FORMATS[spec.memory_format]

        def draw_all(boundary: Boundary, highest: int) -> Tensors:
            tensors = []
            for described in boundary:
                draw = torch.randn if described.dtype.is_floating_point else partial(torch.randint, highest)
                shape = described.shape(samples, spec.lengths)
                tensors.append(draw(shape, generator=generator, dtype=described.dtype))
            return tuple(in_layout(tensor.to(stage.device), memory_format) for tensor in tensors)

        outputs = outputs_of(config)
        inputs = draw_all(spec.stage_inputs(stage.index), outputs)
        if stage.index == spec.partitions - 1:
            return inputs, (), torch.randint(outputs, targets_of(config, samples, spec.lengths), generator=generator)
        boundary = spec.stage_outputs(stage.index)
        gradients = draw_all(boundary, 1)
        return inputs, [g if t.has_gradient else None for g, t in zip(gradients, boundary, strict=True)], None

    def _await_gradient(self, number: int, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        def mark_backward(gradient: torch.Tensor) -> None:
            self._backward[number] = self._clock.now()

        given = [tensor for value in inputs for tensor in as_tuple(value)]
        for tensor in as_tuple(outputs):
            # the gradient of an input that is passed on is complete only after the backward of other layers
            if tensor.requires_grad and not any(tensor is other for other in given):
                tensor.register_hook(mark_backward)

    def _mark_weight(self, number: int, weight: torch.Tensor) -> None:
        self._weights.append((number, self._clock.now()))

    def passes(self, sizes: Sequence[int], share: float = 1.0) -> list[Pass]:
        """The seconds of each layer for micro-batches of these sizes, timed alternately for a share of
        `TimingJob.seconds`: medians, scaled by a common factor so that they sum to a mean pass, as what happens now and
        then (a page fault, a garbage collection) shows in no layer's median, but slows down every step."""
        for samples in sorted(sizes, reverse=True):  # CUDA graphs share memory, and are dropped if it is too small
            self.warm_up(samples)
        taken: list[list[Pass]] = [[] for _ in sizes]
        core_shares: list[list[float]] = [[] for _ in sizes]
        began = time.perf_counter()
        while not taken[0] or (
            len(taken[0]) < _MAX_PASSES
            and time.perf_counter() - began
            < share * self._seconds * (_MAX_TIME_FACTOR if len(taken[0]) < _MIN_PASSES else 1)
        ):
            for passes, shares, samples in zip(taken, core_shares, sizes, strict=True):
                self._draw(samples)
                self._core_shares.clear()
                passes += [self._one_pass() for _ in range(_PASSES_PER_TURN)]
                shares += self._core_shares
        low, _, high = quantiles(map(_sum, taken[-1]), n=4, method="inclusive")
        self.quartiles = (low, high)
        return list(map(self._median_pass, taken, core_shares))

    @staticmethod
    def _median_pass(passes: Sequence[Pass], core_shares: Sequence[float]) -> Pass:
        medians = [tuple(map(median, zip(*layer, strict=True))) for layer in zip(*passes, strict=True)]
        totals = [_sum(layers) * share for layers, share in zip(passes, core_shares, strict=True)]
        factor = sum(totals) / len(passes) / _sum(medians)
        return [tuple(factor * seconds for seconds in layer) for layer in medians]

    def warm_up(self, samples: int) -> None:
        """Run passes of micro-batches of `samples` until nothing is set up any more: which outputs get a gradient shows
        in a first backward, after which CUDA graphs may be captured again."""
        self._draw(samples)
        began = time.perf_counter()
        for number in itertools.count(1):
            recordings = self._recordings()
            self._one_pass()
            long = time.perf_counter() - began > _WARM_UP_SECONDS  # passes this long need no more warm-up
            if (long or number >= _WARM_UP) and self._recordings() == recordings:
                break

    def _recordings(self) -> int:
        return 0 if self._stage.cuda_graphs is None else self._stage.cuda_graphs.captures

    def _one_pass(self) -> Pass:
        """The seconds of each layer, by the clock; the share of them that counts is added to `_core_shares`."""
        began, core_began = time.perf_counter(), self._clock.cpu_seconds()
        seconds = self._timed_pass()
        cpu_seconds, elapsed = self._clock.cpu_seconds() - core_began, time.perf_counter() - began
        usual_seconds = (1 - CONTENDED_SHARE) * elapsed  # with a core, where no other program uses the cores
        self._core_shares.append(min(1.0, cpu_seconds / usual_seconds) if cpu_seconds else 1.0)
        return seconds

    def _timed_pass(self) -> Pass:
        stage, clock = self._stage, self._clock
        self._begin_step()
        clock.begin_step()
        reader = clock.reader()

        def layers_of(work: Callable[[], Any]) -> list[float]:
            self._forward.clear()
            begun = clock.now()
            work()
            ended = clock.now()
            return [b - a for a, b in itertools.pairwise(reader([begun, *self._forward[1:], ended]))]

        forward = layers_of(lambda: stage.forward(0, self._inputs, Retain.INPUT))
        if not stage.needs_backward:  # this segment and all before it are frozen
            stage.finish_step()
            self._finishing.append(0.0)
            return [(seconds, seconds, *[0.0] * (3 if self._timing.splits else 1)) for seconds in forward]
        graph = layers_of(lambda: stage.recompute(0))
        columns = [forward, graph, self._backward_seconds(reader, split=False)]
        ended = clock.now()
        stage.finish_step()
        finished, committed = reader([ended, clock.now()])
        self._finishing.append(committed - finished)
        if self._timing.splits:
            self._begin_step(Action(Kind.I, stage.index, 0))
            stage.forward(0, self._inputs, Retain.ACTIVATIONS)
            columns.append(self._backward_seconds(reader, split=True))
            columns.append(self._weights_seconds(reader))
            stage.finish_step()
        return list(zip(*columns, strict=True))

    def _begin_step(self, *actions: Action) -> None:
        smoothing = self._config.label_smoothing
        targets = None if self._targets is None else (self._targets, 0)
        objective = build_loss(self._config, targets, [self._samples], smoothing, self._stage.device)
        self._stage.begin_step(0, objective, actions=actions)

    def _backward_seconds(self, reader: Callable[[Sequence[Any]], list[float]], *, split: bool) -> list[float]:
        """Seconds of each layer's backward: from the gradient of its outputs to the gradient of its inputs."""
        self._backward.clear()
        begun = self._clock.now()
        self._stage.backward(0, self._gradients, split=split)
        ended = self._clock.now()
        seconds = []
        # with no trained layer before a layer, its inputs get no gradient: it takes all the time that is left
        marks = [self._backward.get(number - 1, ended) for number in reversed(range(len(self._layers)))]
        since, *ends = reader([begun, *marks])
        for until in ends:
            seconds.append(max(0.0, until - since))
            since = max(since, until)
        return seconds[::-1]

    def _weights_seconds(self, reader: Callable[[Sequence[Any]], list[float]]) -> list[float]:
        """Seconds of each layer's weight gradients: each gradient counts from the end of the last."""
        self._weights.clear()
        begun = self._clock.now()
        self._stage.backward_weights(0)
        weights = self._weights if self._hooks else [(0, self._clock.now())]
        seconds = [0.0] * len(self._layers)
        since, *ends = reader([begun, *(mark for _, mark in weights)])
        for (number, _), until in zip(weights, ends, strict=True):
            seconds[number] += until - since
            since = until
        return seconds

    def updates(self) -> list[float]:
        """The median seconds that the optimizer and the moving average take for each layer."""
        seconds = []
        for layer in self._layers:
            work: list[Callable[[], object]] = []
            if (optimizer := build_optimizer(self._config.optimizer, dict(layer.named_parameters()))) is not None:
                work.append(optimizer.step)
            if self._config.ema_decay:
                work.append(WeightAverage(layer, self._config.ema_decay).update)
            seconds.append(median_seconds(self._stage.device, *work))
        return seconds

    def set_up(self) -> float:
        """The median seconds of work once per step other than updates: batch norm's commit, the norms of gradients."""
        gradients = gradients_of(self._stage.module.parameters())
        return median_seconds(self._stage.device, partial(gradient_norms, gradients)) + median(self._finishing)


def median_seconds(device: torch.device, *work: Callable[[], object]) -> float:
    """The median seconds that the device takes for all of `work`, after warm-up. Work that takes longer than half a
    second runs only twice, as a CPU without units for bfloat16 takes seconds for a product."""
    clock = StepTimer({0: device}).clocks[0]
    taken = []
    for _ in range(_WARM_UP + _MIN_PASSES):
        clock.begin_step()
        reader = clock.reader()
        begun = clock.now()
        for part in work:
            part()
        since, until = reader([begun, clock.now()])
        taken.append(until - since)
        if min(taken[-2:]) > _LONG_SECONDS and taken[1:]:
            return taken[-1]
    return median(taken[_WARM_UP:])


def _slowest_link(spec: PipelineSpec, rank: int, control: ControlGroup, groups: ProcessGroups | None) -> Link | None:
    """The slowest link between neighbouring stages, the only links of a pipeline; None for a single process on a CPU.

    Several processes send messages over a run's process groups, one pair of neighbours after another. A single process
    copies from GPU to GPU or, if it has a single GPU, to the host and back.
    """
    device = torch.device(spec.layout.device_of(rank))
    if groups is None:
        return None if device.type == "cpu" else slowest_copies([torch.device(name) for name in spec.layout.devices])
    links = []
    # processes that have neighbouring stages -> the first of two such stages
    pairs = enumerate(itertools.pairwise(spec.layout.rank_of_stage))
    for ends, stage in {frozenset(pair): stage for stage, pair in pairs if pair[0] != pair[1]}.items():
        if rank in ends:
            seconds = [_message_seconds(spec, rank, stage, groups, size) for size in _LINK_BYTES[device.type]]
            links.append(_link(device, seconds))
        control.barrier()
    return max((link for process_links in control.collect(links) for link in process_links), key=_large_seconds)


def slowest_copies(devices: Sequence[torch.device]) -> Link:
    """The slowest link from one of a process's `devices` to the next; for a single device, to the host and back."""
    pairs = [pair for pair in itertools.pairwise(devices) if pair[0] != pair[1]]
    links = []
    for device, other in pairs or [(devices[0], torch.device("cpu"))]:
        seconds = []
        for size in _LINK_BYTES[device.type]:
            source = torch.zeros(size, dtype=torch.uint8, device=device)
            pinned = is_accelerator(device) and not is_accelerator(other)
            target = torch.zeros(size, dtype=torch.uint8, device=other, pin_memory=pinned)
            back = [] if pairs else [partial(source.copy_, target, non_blocking=True)]
            seconds.append(median_seconds(device, partial(target.copy_, source, non_blocking=True), *back))
        links.append(_link(device, seconds))
    return max(links, key=_large_seconds)


def _message_seconds(spec: PipelineSpec, rank: int, stage: int, groups: ProcessGroups, size: int) -> float:
    """Seconds of a message of `size` bytes from `stage` to the next, in another process: half the median round trip."""
    sender, receiver = spec.layout.rank_of_stage[stage : stage + 2]
    device = torch.device(spec.layout.device_of(rank))
    by_edge = groups.links.by_edge
    forward, backward = by_edge[Kind.F, stage, stage + 1], by_edge[Kind.B, stage + 1, stage]
    message = [torch.zeros(size, dtype=torch.uint8, device=device)]
    taken = []
    for _ in range(_LINK_ROUNDS):
        began = time.perf_counter()
        for link, target in ((forward, receiver), (backward, sender)):
            for work in link.receive(message) if rank == target else link.send([*message]):
                work.wait()
        wait_for_device(device)
        taken.append((time.perf_counter() - began) / 2)
    return median(taken)


def _link(device: torch.device, seconds: Sequence[float]) -> Link:
    """Latency and bandwidth from the seconds of the small and of the large message."""
    small, large = _LINK_BYTES[device.type]
    per_byte = max((seconds[1] - seconds[0]) / (large - small), 1e-13)
    return max(0.0, seconds[0] - small * per_byte), 1.0 / per_byte


def _large_seconds(link: Link) -> float:
    """The seconds of a message of 64 MiB."""
    return link[0] + (1 << 26) / link[1]
