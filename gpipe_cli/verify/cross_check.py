"""The workers' side of `gpipe check against=...`: a way to train a few steps, by our executor or by another program.

All ways start from the same weights, take the same mini-batch in the same micro-batches, minimise the same loss (a sum
over elements divided by the mini-batch's denominator) and draw the same random numbers in the first step, whose
gradients are written to files. The steps after it are timed, with the weights updated by the same optimizer. Running
statistics of batch norm are not compared: other programs update them in every micro-batch, ours once (section 2.2 of
the paper). Each way runs in separate processes, so that its peak memory and its failure are its own.
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from gpipe_cli.assembly.build import AUTOCAST_DTYPE, MEMORY_FORMATS, build_model, full_model_builder
from gpipe_cli.assembly.learning_rate import learning_rate
from gpipe_cli.assembly.loss import CrossEntropy
from gpipe_cli.assembly.optimizer import build_optimizer, set_learning_rate
from gpipe_cli.config.groups import Precision
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups, new_group
from gpipe_cli.errors import describe_error
from gpipe_cli.pipeline.runtime.boundary import as_tuple, as_value, in_layout
from gpipe_cli.pipeline.runtime.precision import autocast
from gpipe_cli.pipeline.runtime.tied_weights import trained_parameters
from gpipe_cli.planner.model_profile import check_single_samples
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.schedule import Action, Kind
from gpipe_cli.system.accelerator import is_accelerator, wait_for_device
from gpipe_cli.system.process_memory import peak_memory_bytes
from gpipe_cli.training.data_feed import Data, MiniBatch
from gpipe_cli.training.engine import WorkerProcess, build_engine, build_layers
from gpipe_cli.training.milestones import initial_progress
from gpipe_cli.training.step import (
    PendingMetrics,
    build_loss,
    compute_gradients,
    gather_metrics,
    to_first_device,
    update_weights,
)
from gpipe_cli.verify.self_check import first_mini_batch, layer_of, plain_model, run_plain, seeding_layers

Program = Literal["gpipe", "torch", "torchgpipe", "pytorch"]
# The distance from our gradients, in units of what the order of summation explains, up to which they agree.
MAX_UNITS = 16.0
EPSILON: Mapping[Precision, float] = {"float32": 2**-23, "tf32": 2**-10, "bfloat16": 2**-7}
WARM_UP_STEPS = 2  # these steps are not timed: torch runs a micro-batch to learn its shapes, and files are written


@dataclass(frozen=True)
class TimedRun:
    """Message to the parent: what a process measured."""

    samples: int  # of the mini-batch, over all processes
    seconds: tuple[float, ...]  # of each timed step
    memory_bytes: int  # peak: of the allocator on a GPU, on a CPU what the process has grown by


@dataclass(frozen=True)
class ProgramFailed:
    """Message to the parent: the other program failed in a process; `text` is its message, on a single line."""

    rank: int
    text: str


def run(
    config: TrainConfig,
    spec: PipelineSpec,
    process: WorkerProcess,
    *,
    program: Program,
    schedule: str,
    steps: int,
    folder: Path,
) -> None:
    """Train `steps` steps as a process of the layout of `spec`, and report a `TimedRun`.

    `schedule`: a class of torch's; for other programs it is in `spec`. The gradients of the first step are written to
    `folder`, a file for each process. If another program fails, a `ProgramFailed` is reported. Raises InputError for
    what the user can fix, and what the program raises.
    """
    device = torch.device(spec.layout.device_of(process.rank))
    bytes_at_start = peak_memory_bytes(device)
    data = Data(replace(config, data_workers=0), spec, process.rank, initial_progress(config, None), None)
    control, groups = process.connect()
    bytes_at_start = 0 if is_accelerator(device) else bytes_at_start
    reader = data.reader(control, "training")
    samples = reader.batches.size(0, 0)
    check_single_samples(config, samples)
    runner: GpipeRunner | TorchPipeliningRunner | SequentialRunner
    seconds = []
    try:
        if program == "gpipe":
            runner = GpipeRunner(config, spec, process, control, groups)
        elif program == "torch":
            runner = TorchPipeliningRunner(config, spec, process, schedule)
        else:
            runner = SequentialRunner(config, spec, process, chunked=program == "torchgpipe")
        for step in range(WARM_UP_STEPS + steps):
            begun = time.perf_counter()
            runner.backward(first_mini_batch(reader, config.micro_batches), first=step == 0)
            if step == 0:
                gradients = ((name, parameter.grad) for name, parameter in runner.parameters.items())
                written = {name: gradient.cpu().contiguous() for name, gradient in gradients if gradient is not None}
                save_file(written, folder / f"{process.rank}.safetensors")
            runner.update()
            wait_for_device(device)
            if step >= WARM_UP_STEPS:
                seconds.append(time.perf_counter() - begun)
    except Exception as error:
        if program != "gpipe":
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            process.report(ProgramFailed(process.rank, shorten(describe_error(cause), 200, placeholder=" ...")))
        raise
    process.report(TimedRun(samples, tuple(seconds), peak_memory_bytes(device) - bytes_at_start))
    control.barrier()  # what the last step sent has arrived before a process ends


class GpipeRunner:
    """Our executor, with all that a step of `gpipe train` does, metrics included."""

    def __init__(
        self,
        config: TrainConfig,
        spec: PipelineSpec,
        process: WorkerProcess,
        control: ControlGroup,
        groups: ProcessGroups | None,
    ) -> None:
        self._engine = build_engine(config, spec, control, groups, on_action=process.on_action)
        self._engine.set_progress(1.0)
        self._numbers: PendingMetrics | None = None
        # a tied weight, which several stages have, is the first stage's, which has the sum of its gradients
        self.parameters = dict(
            chain.from_iterable(self._engine.owned_parameters(k).items() for k in self._engine.stages)
        )

    def backward(self, mini_batch: MiniBatch, *, first: bool) -> None:
        """Leave the gradients of a mini-batch in `.grad` of the parameters."""
        self._numbers = compute_gradients(self._engine, mini_batch, step=0)

    def update(self) -> None:
        """Update the weights and drop the gradients."""
        assert self._numbers is not None
        update_weights(self._engine, self._numbers, _rate(self._engine.config))
        gather_metrics(self._engine, self._numbers)()
        self._engine.executor.drain_sends()


class BaselineRunner:
    """What other programs share: the user's layers by stage of this process, an optimizer, the seeds."""

    def __init__(self, config: TrainConfig, spec: PipelineSpec, process: WorkerProcess) -> None:
        self.config, self.spec, self.process = config, spec, process
        self.device = torch.device(spec.layout.device_of(process.rank))
        model, builder = build_model(config, pretrained=True), full_model_builder(config, pretrained=True)
        ours = {k: build_layers(config, spec, k, model, builder) for k in spec.layout.stages_of(process.rank)}
        theirs = plain_model(config, spec, ours.values())
        starts = spec.first_layers
        self.stages = {k: theirs[starts[k] : starts[k] + len(layers)] for k, layers in ours.items()}
        self.parameters: dict[str, nn.Parameter] = {}
        for module in self.stages.values():
            self.parameters |= trained_parameters(module, spec.ties)
        self._optimizer = build_optimizer(config.optimizer, self.parameters)
        self.current = 0  # the micro-batch that runs now

    def update(self) -> None:
        if self._optimizer is not None:
            set_learning_rate(self._optimizer, _rate(self.config))
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def before_forward(self, stage: int, micro_batch: int, mini_batch: MiniBatch, samples: int) -> None:
        """Called before the forward of a stage."""
        self.current = micro_batch
        self.process.on_action(Action(Kind.F, stage, micro_batch), samples, mini_batch.lengths)

    def seed_layers(self) -> AbstractContextManager[None]:
        """While active, before each layer of this process's only stage, generators are seeded as our stages do."""
        ((index, layers),) = self.stages.items()
        first_layer = self.spec.first_layers[index]
        return seeding_layers(layers, first_layer, self.config.seed, self.device, lambda: self.current)


class SequentialRunner(BaselineRunner):
    """The model as its user would call it: by plain PyTorch, or as torchgpipe's `GPipe` on the devices of the stages.

    Plain PyTorch takes its first step in micro-batches, backwards from the last to the first as in schedule gpipe, and
    with the threads of a single process of ours, so that gradients can be compared; its other steps take the whole
    mini-batch in one call, with all threads of the machine.
    """

    def __init__(self, config: TrainConfig, spec: PipelineSpec, process: WorkerProcess, *, chunked: bool) -> None:
        super().__init__(config, spec, process)
        self._chunked = chunked
        self._model: nn.Module
        if not chunked:
            (self._model,) = self.stages.values()
            return
        from torchgpipe import GPipe

        autocast_dtype = AUTOCAST_DTYPE[spec.precision]
        self._model = GPipe(
            nn.Sequential(
                *(_InPrecision(layer, self.device, autocast_dtype) for layer in chain(*self.stages.values()))
            ),
            balance=[len(names) for names in spec.layer_names],
            devices=[torch.device(device) for device in spec.layout.devices],
            chunks=config.micro_batches,
            checkpoint=str(spec.recompute),
        )

    def backward(self, mini_batch: MiniBatch, *, first: bool) -> None:
        in_one = self._chunked or not first
        sizes = mini_batch.shard.sizes
        sizes = (sum(sizes),) if in_one else sizes
        if not in_one and self.config.threads is not None:
            torch.set_num_threads(self.config.threads)

        def before_micro_batch(number: int) -> None:
            self.before_forward(0, number, mini_batch, sizes[number])

        with nullcontext() if in_one else self.seed_layers():
            run_plain(self._model, self.spec, self.config, mini_batch, sizes, before_micro_batch)
        torch.set_num_threads(self.spec.layout.threads)


class _InPrecision(nn.Module):
    """Autocast inside a layer: torchgpipe runs layers in its own threads, which do not inherit it."""

    def __init__(self, layer: nn.Module, device: torch.device, autocast_dtype: torch.dtype | None) -> None:
        super().__init__()
        self.layer = layer
        self._autocast = partial(autocast, device, autocast_dtype)

    def forward(self, inputs: Any) -> Any:
        with self._autocast():
            return self.layer(inputs)


class TorchPipeliningRunner(BaselineRunner):
    """A schedule of torch.distributed.pipelining, with a stage in each process."""

    def __init__(self, config: TrainConfig, spec: PipelineSpec, process: WorkerProcess, schedule: str) -> None:
        super().__init__(config, spec, process)
        from torch.distributed import pipelining

        # it draws the whole schedule at a failure
        logging.getLogger(pipelining.schedules.__name__).setLevel(logging.CRITICAL)
        members = range(spec.layout.processes)
        timeout = timedelta(seconds=config.timeout_seconds)
        group = new_group(process.rank, members, self.device, timeout)
        self._objective: CrossEntropy | None = None
        self.mini_batch: MiniBatch
        ((index, layers),) = self.stages.items()
        stage = pipelining.PipelineStage(
            _Positional(self, index, layers), index, spec.partitions, self.device, group=group
        )
        if not is_accelerator(self.device):
            # torch 2.9 greets its neighbours, which NCCL needs, with 8 bytes where 4 are awaited: Gloo aborts
            vars(stage)["_get_init_p2p_neighbors_ops"] = list
        kind = getattr(pipelining, schedule)
        self._runner = kind(stage, n_microbatches=config.micro_batches, loss_fn=self._loss, scale_grads=False)

    def _loss(self, output: Any, micro_batch: torch.Tensor) -> torch.Tensor:
        assert self._objective is not None
        return self._objective.loss(int(micro_batch), as_tuple(output))

    def backward(self, mini_batch: MiniBatch, *, first: bool) -> None:
        self.mini_batch = mini_batch
        inputs = to_first_device(self.config, self.spec, mini_batch.inputs())
        targets = mini_batch.targets() if self.spec.partitions - 1 in self.stages else None
        sizes = mini_batch.shard.sizes
        self._objective = build_loss(self.config, targets, sizes, self.config.label_smoothing, self.device)
        # torch splits all arguments: so every stage, and the loss, gets the number of its micro-batch
        numbers = torch.arange(self.config.micro_batches)
        of_loss = {} if self._objective is None else {"target": numbers}
        with self.seed_layers() if first else nullcontext():
            self._runner.step(*(inputs or ()), **of_loss, micro_batch=numbers)


class _Positional(nn.Module):
    """Adapts a stage's layers, which take a tensor or a tuple, to torch's stages, which pass separate contiguous
    tensors: with memory_format=channels_last both ends of a boundary convert images."""

    def __init__(self, runner: TorchPipeliningRunner, stage: int, layers: nn.Sequential) -> None:
        super().__init__()
        self._runner_of_stages, self._stage = runner, stage
        spec = runner.spec
        self.layers = _InPrecision(layers, runner.device, AUTOCAST_DTYPE[spec.precision])
        self._last = stage == spec.partitions - 1
        self._in_tuple = any(tensor.in_tuple for tensor in spec.stage_inputs(stage))
        self._memory_format = MEMORY_FORMATS[spec.memory_format]

    def forward(self, *tensors: torch.Tensor, micro_batch: torch.Tensor) -> Any:
        mini_batch = self._runner_of_stages.mini_batch
        number = int(micro_batch)
        self._runner_of_stages.before_forward(self._stage, number, mini_batch, mini_batch.shard.sizes[number])
        inner, sent = self._memory_format, torch.contiguous_format
        if inner is not sent and self._stage > 0:
            tensors = tuple(_Converted.apply(tensor, inner, sent) for tensor in tensors)
        outputs = self.layers(as_value(tensors, self._in_tuple))
        if inner is sent or self._last:
            return outputs
        return tuple(_Converted.apply(tensor, sent, inner) for tensor in as_tuple(outputs))


class _Converted(torch.autograd.Function):
    """A tensor in a memory format, and its gradient in another."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, memory_format: torch.memory_format, back: torch.memory_format
    ) -> torch.Tensor:
        ctx.back = back
        return in_layout(tensor, memory_format)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return in_layout(gradients[0], ctx.back), None, None


def _rate(config: TrainConfig) -> float:
    return learning_rate(config.learning_rate, 0, 1, config.batch_size, 1)


class Distance(NamedTuple):
    """How far gradients are from ours. A unit is, for each layer, what the order of summation explains: the larger of
    the distance between our own gradients summed from the last micro-batch to the first and from the first to the last,
    and epsilon sqrt(n) of our gradient's norm, where n is the number of terms of a sum over samples and positions.
    Distances are norms over a layer."""

    units: float  # of the layer below; 0: all bits are the same; infinite: not finite, or ours is zero
    share: float  # the distance as a share of our gradient's norm, in the same layer
    layer: str | None  # the first in the order of the backward with more than MAX_UNITS; else that with the most


def distance(theirs: Path, ours: Path, orders: tuple[Path, Path], layers: Sequence[str], share: float) -> Distance:
    """The distance of the gradients in the files of folder `theirs` from `ours`. `orders`: ours in both orders of
    summation, which give the unit; `layers`: their names in order; `share`: epsilon sqrt(n)."""
    largest = Distance(0.0, 0.0, None)
    read = [_open(folder) for folder in (theirs, ours, *orders)]
    names = sorted(set().union(*read))
    for layer in reversed(layers):
        squares = torch.zeros(3, dtype=torch.float64)  # of the difference, of the unit, of our gradient
        for name in names:
            if layer_of(name) == layer:
                their_gradient, our_gradient, first_order, second_order = (
                    _gradient(files.get(name, ()), name) for files in read
                )
                summands = their_gradient - our_gradient, first_order - second_order, our_gradient
                squares += torch.stack([tensor.square().sum() for tensor in summands])
        difference, order, norm = squares.sqrt().tolist()
        unit = max(order, share * norm)
        units = difference / unit if unit else 0.0 if difference == 0 else math.inf
        units = math.inf if math.isnan(units) else units
        if units > largest.units:
            largest = Distance(units, difference / norm if norm else math.inf, layer)
        if units > MAX_UNITS:
            break
    return largest


def _open(folder: Path) -> dict[str, list[Any]]:
    """For each parameter, the open files with its gradient, of all processes that have the parameter."""
    files: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        file = safe_open(path, "pt")
        for name in file.keys():  # noqa: SIM118  # not a dictionary
            files.setdefault(name, []).append(file)
    return files


def _gradient(files: Iterable[Any], name: str) -> torch.Tensor:
    """The gradient in float64, zero if there is none; a tied weight's gradients are added up."""
    return sum((file.get_tensor(name).double() for file in files), torch.zeros((), dtype=torch.float64))
