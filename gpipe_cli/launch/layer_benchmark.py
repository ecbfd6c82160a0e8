"""`cost=measured`: how long each layer takes on the device at hand, for one micro-batch (paper section 2.1: c_i).

Layers are timed inside a stage, one after another and forwards before backwards, as they run in a training: a layer
that is run alone, again and again, finds its input in the cache. A model that is too large for one device is timed in
segments. Processes that share a machine share its memory and caches too, so everything is timed twice: by one process
alone, and by all of them at the same time.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from gpipe_cli.assembly.build import MEMORY_FORMATS, build_model, outputs_of, real_model
from gpipe_cli.assembly.optimizer import build_optimizer, gradients_of
from gpipe_cli.assembly.weight_average import WeightAverage
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.process_groups import ProcessGroups
from gpipe_cli.pipeline.runtime.boundary import Boundary, Tensors, as_tuple, in_layout
from gpipe_cli.pipeline.runtime.recording import Recorder
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.schedule.schedules import Kind, Retain
from gpipe_cli.planner.cost_model import LayerTimes, Pass
from gpipe_cli.planner.placement import Placement
from gpipe_cli.training.engine import WorkerProcess, build_stage
from gpipe_cli.training.step import norms_of, objective_of

_WARM_UP, _LEAST, _MOST = 3, 5, 40  # passes over a segment
_LINK_BYTES = (1 << 10, 1 << 22)  # two messages show latency and bandwidth
_LINK_ROUNDS = 15


def measure(
    config: TrainConfig,
    placement: Placement,
    segments: Placement,
    samples: int,
    seconds: float,
    process: WorkerProcess,
) -> None:
    """Time every layer for a micro-batch of `samples`, as one process of those that `placement` has.

    Process 0 reports what was measured (LayerTimes). `segments` cuts the model into parts that fit the device one after
    another; each is timed for about `seconds`.
    """
    control, groups = process.connect()
    segments = replace(segments, devices=(placement.devices[process.number],) * segments.partitions)  # each on its own
    whole = real_model(config, pretrained=False)
    alone: Pass = []
    together: Pass = []
    updates: list[float] = []
    set_up = 0.0
    for index in range(segments.partitions):
        stage = build_stage(config, segments, index, build_model(config), whole)
        timer = _Timer(config, segments, stage, samples, seconds)
        if control.leads:
            alone += timer.passes()
        control.barrier()
        if control.size > 1:
            together += timer.passes()
        if control.leads:
            updates += timer.updates()
            set_up += timer.set_up()
        control.barrier()
    link = _time_link(placement, process.number, groups) if groups is not None else None
    if control.leads:
        process.report(LayerTimes(alone, together or None, updates, set_up, link))
    control.barrier()


class _Timer:
    """Runs one segment repeatedly, and reads the clock at every boundary between layers."""

    def __init__(self, config: TrainConfig, placement: Placement, stage: Stage, samples: int, seconds: float) -> None:
        self._config, self._stage, self._seconds = config, stage, seconds
        self._layers = list(stage.module.children())
        device = stage.device
        self._clock = Recorder({stage.index: device}).clocks[stage.index]
        generator = torch.Generator().manual_seed(0)
        memory_format = MEMORY_FORMATS[placement.memory_format]

        def drawn(boundary: Boundary, highest: int) -> Tensors:
            made = []
            for described in boundary:
                draw = torch.randn if described.dtype.is_floating_point else partial(torch.randint, highest)
                shape = described.shape(samples, placement.lengths)
                made.append(draw(shape, generator=generator, dtype=described.dtype))
            return tuple(in_layout(tensor.to(device), memory_format) for tensor in made)

        outputs = outputs_of(config)
        inputs = placement.training_boundaries[stage.index - 1] if stage.index else placement.inputs
        self._inputs = drawn(inputs, outputs)
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._targets: torch.Tensor | None = None  # where the last layer is
        if stage.index == placement.partitions - 1:
            self._targets = torch.randint(outputs, (samples, *placement.lengths[-1:]), generator=generator)
        else:
            boundary = placement.training_boundaries[stage.index]
            gradients = drawn(boundary, 1)
            self._gradients = [g if t.has_gradient else None for g, t in zip(gradients, boundary, strict=True)]
        self._samples = samples
        self._finishing: list[float] = []
        self._forward: list[Any] = []
        self._backward: dict[int, Any] = {}
        for number, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda layer, inputs: self._forward.append(self._clock.now()))
            layer.register_forward_hook(partial(self._await_gradient, number))

    def _await_gradient(self, number: int, layer: nn.Module, inputs: Any, outputs: Any) -> None:
        def gradient_is_there(gradient: torch.Tensor) -> None:
            self._backward[number] = self._clock.now()

        given = [tensor for value in inputs for tensor in as_tuple(value)]
        for tensor in as_tuple(outputs):
            # an input that is passed on has its gradient only when other layers have run backward too
            if tensor.requires_grad and not any(tensor is other for other in given):
                tensor.register_hook(gradient_is_there)

    def passes(self) -> Pass:
        """The median seconds of each layer over as many passes as there is time for."""
        for _ in range(_WARM_UP):
            self._one_pass()
        taken: list[Pass] = []
        began = time.perf_counter()
        while len(taken) < _LEAST or (len(taken) < _MOST and time.perf_counter() - began < self._seconds):
            taken.append(self._one_pass())
        return [
            (median(p[0] for p in layer), median(p[1] for p in layer), median(p[2] for p in layer))
            for layer in zip(*taken, strict=True)
        ]

    def _one_pass(self) -> Pass:
        stage, clock = self._stage, self._clock
        sizes, smoothing = [self._samples], self._config.label_smoothing
        objective = objective_of(self._config, self._targets, sizes, smoothing, stage.device)
        stage.begin_step(0, objective)
        clock.begin_step()
        reader = clock.reader()
        self._backward.clear()

        def layers_of(work: Callable[[], Any]) -> list[float]:
            self._forward.clear()
            begun = clock.now()
            work()
            ended = clock.now()
            marks = [reader(mark) for mark in (begun, *self._forward[1:], ended)]
            return [b - a for a, b in itertools.pairwise(marks)]

        forward = layers_of(lambda: stage.forward(0, self._inputs, Retain.INPUT))
        if not stage.needs_backward:  # it is frozen, as is everything before it
            stage.finish_step()
            self._finishing.append(0.0)
            return [(seconds, seconds, 0.0) for seconds in forward]
        graph = layers_of(lambda: stage.recompute(0))
        begun = clock.now()
        stage.backward(0, self._gradients)
        ended = clock.now()
        stage.finish_step()
        self._finishing.append(reader(clock.now()) - reader(ended))
        return list(zip(forward, graph, self._backward_seconds(reader, begun, ended), strict=True))

    def _backward_seconds(self, reader: Callable[[Any], float], begun: Any, ended: Any) -> list[float]:
        """A layer's backward lasts from the gradient of its outputs to that of the outputs before it."""
        seconds, at = [], reader(begun)
        for number in reversed(range(len(self._layers))):
            # where nothing trained lies before it no gradient reaches its inputs: all that is left is this layer's
            until = reader(self._backward.get(number - 1, ended))
            seconds.append(max(0.0, until - at))
            at = max(at, until)
        return seconds[::-1]

    def updates(self) -> list[float]:
        """The median seconds that the optimizer and the moving average take for each layer."""
        seconds = []
        for layer in self._layers:
            work: list[Callable[[], object]] = []
            if (optimizer := build_optimizer(self._config.optimizer, dict(layer.named_parameters()))) is not None:
                work.append(optimizer.step)
            if self._config.ema_decay:
                work.append(WeightAverage(layer, self._config.ema_decay).update)
            seconds.append(self._median_seconds(*work))
        return seconds

    def set_up(self) -> float:
        """The median seconds of what comes once a step beside updates: batch norm's commit, the norms of gradients."""
        gradients = gradients_of(self._stage.module.parameters())
        return self._median_seconds(partial(norms_of, gradients)) + median(self._finishing)

    def _median_seconds(self, *work: Callable[[], object]) -> float:
        taken = []
        for _ in range(_WARM_UP + _LEAST):
            self._clock.begin_step()
            reader = self._clock.reader()
            begun = self._clock.now()
            for one in work:
                one()
            taken.append(reader(self._clock.now()) - reader(begun))
        return median(taken[_WARM_UP:])


def _time_link(placement: Placement, process: int, groups: ProcessGroups) -> tuple[float, float]:
    """Latency in seconds and bytes a second from process 0 to process 1, by messages there and back."""
    device = torch.device(placement.device_of(process))
    there, back = (
        groups.links.get(edge) for edge in ((Kind.F, placement.stages_of(1)[0]), (Kind.B, placement.stages_of(0)[-1]))
    )
    seconds = []
    for size in _LINK_BYTES if process < 2 else ():
        assert there is not None
        assert back is not None
        message = [torch.zeros(size, dtype=torch.uint8, device=device)]
        taken = []
        for _ in range(_LINK_ROUNDS):
            began = time.perf_counter()
            for link, receiver in ((there, 1), (back, 0)):
                for work in link.receive(message) if process == receiver else link.send(message):
                    work.wait()
            if device.type != "cpu":
                torch.cuda.synchronize(device)
            taken.append((time.perf_counter() - began) / 2)
        seconds.append(median(taken))
    if not seconds:
        return 0.0, 0.0
    small, large = _LINK_BYTES
    per_byte = max((seconds[1] - seconds[0]) / (large - small), 1e-13)
    return max(0.0, seconds[0] - small * per_byte), 1.0 / per_byte
