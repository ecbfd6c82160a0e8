"""The workers' side of `gpipe check`: a mini-batch, run by every variant of the pipeline, and compared.

Paper, sections 1 and 2.2: the number of partitions changes nothing. This is checked layer by layer, with the code that
trains: each variant starts from the same weights and seeds, does a single step, and takes digests of every layer's
outputs, of every gradient, and of the weights and buffers after the step.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from gpipe_cli.assembly.build import AUTOCAST_DTYPE, user_model
from gpipe_cli.assembly.learning_rate import learning_rate
from gpipe_cli.config.groups import Precision
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.loading import PrefetchedBatches, batch_requests
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.distributed.control_group import BlockedOn
from gpipe_cli.errors import describe_error
from gpipe_cli.models.drop_path import set_progress
from gpipe_cli.pipeline.runtime.boundary import as_tuple, as_value, digest, split_all
from gpipe_cli.pipeline.runtime.deferred_batch_norm import find_tracking_norms
from gpipe_cli.pipeline.runtime.executor import ActionFailedError
from gpipe_cli.pipeline.runtime.frozen import freeze, set_training
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.pipeline.runtime.precision import autocast
from gpipe_cli.pipeline.runtime.randomness import mix_in, seed_generator, step_seed
from gpipe_cli.planner.model_profile import check_single_samples
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Action, Kind, RecomputeMode, Schedule
from gpipe_cli.system.accelerator import generators
from gpipe_cli.training.data_feed import Data, MiniBatch, SplitReader
from gpipe_cli.training.engine import Engine, WorkerProcess, build_engine
from gpipe_cli.training.fine_tuning import fine_tune
from gpipe_cli.training.milestones import initial_progress
from gpipe_cli.training.step import build_loss, compute_gradients, gather_metrics, to_first_device, update_weights

Executor = Literal["in_process", "pytorch", "distributed", "replicas"]  # pytorch: the plain model
REFERENCES = ("gpipe", "1f1b")  # schedules that sum gradients from the last micro-batch to the first, and vice versa
MODES = RECOMPUTE_MODES[::-1]  # the mode with the least recomputation first
EXECUTORS: tuple[Executor, ...] = get_args(Executor)
Verdict = Literal["reference", "identical", "within tolerance", "differs", "differs, as it must", "fails", "left out"]

# Norm of the gradients' difference, as a share of their norm: more than another order of summation causes, less than a
# lost micro-batch does. It depends on the bits of the significand: 24, 11 and 8. In bfloat16, batch norm over 4 values
# whose gradients arrive in channels_last makes it 1.2e-2 (timm's test_efficientnet, images of 32 pixels).
TOLERANCE: Mapping[Precision, float] = {"float32": 1e-5, "tf32": 1e-3, "bfloat16": 2e-2}
_BUFFER_TOLERANCE = 1e-3  # the same for a module's buffers: float32 moments of many values have fewer exact digits


class Variant(NamedTuple):
    """A way to run the mini-batch."""

    partitions: int
    micro_batches: int  # total of all replicas
    schedule: str
    recompute: RecomputeMode
    executor: Executor


@dataclass(frozen=True)
class Row:
    """A variant, and how its results compare with those of a reference: a single partition, no recomputation, and the
    schedule of `REFERENCES` that sums gradients in the same order (`1f1b` if neither does). The reference of `1f1b` is
    itself compared with `gpipe`'s."""

    variant: Variant
    verdict: Verdict
    difference: float | None = None  # norm of the gradients' difference, as a share of the gradients' norm
    layer: str | None = None  # the first layer that differs, or the layer that fails
    stage: int | None = None
    micro_batch: int | None = None
    text: str = ""  # the difference or the failure: where and why, as far as known

    @property
    def bad(self) -> bool:
        return self.verdict in ("differs", "fails")


class ResultKind(IntEnum):
    """The kinds of results of a step, in the order in which they are computed."""

    OUTPUT = 0
    RECOMPUTED_OUTPUT = 1
    LOSS = 2
    GRADIENT = 3
    BUFFER = 4
    WEIGHT = 5


class ResultKey(NamedTuple):
    """Where two variants can differ: a result of a step. Places sort in the order of computation."""

    kind: ResultKind
    order: int  # index of the layer in the model; negated for gradients, as the backward pass runs in reverse
    micro_batch: int  # for outputs; else 0
    name: str  # of a layer, a parameter or a buffer

    @property
    def layer(self) -> str:
        return layer_of(self.name)


Digests = dict[ResultKey, str]  # digests of a step's results in a process; "" for a parameter without gradient
Tensors = dict[str, torch.Tensor]  # by the names of the parameters or the buffers


@dataclass(frozen=True)
class MiniBatchRead:
    """Message to the parent, before the first variant: the numbers of samples of the micro-batches."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ReferenceDone:
    """Message to the parent: the reference of schedule gpipe has been run."""

    loss: float  # mean loss of the mini-batch


class Step(NamedTuple):
    """The results of a step in a process; tensors are on the CPU."""

    loss: float  # mean loss of the mini-batch
    digests: Digests
    gradients: Tensors
    buffers: Tensors
    of_micro_batches: str = ""  # why the results depend on the number of micro-batches, if they do


def _failed_row(variant: Variant, error: Exception) -> Row:
    """The row of a variant that failed with `error` in its layers or in plain PyTorch; other errors are raised."""
    if isinstance(error, ChangedInputError):
        return Row(variant, "fails", layer=error.layer, text=str(error))
    if isinstance(error, ActionFailedError):
        # the text does not name the micro-batch: which micro-batch fails first depends on the schedule
        action, layer = error.action, error.layer or None
        where = f"layer {layer}" if layer else f"{action.kind.name} of stage {action.stage}"
        text = f"{where} raises {describe_error(error.__cause__ or error).rstrip('.')}"
        return Row(variant, "fails", None, layer, action.stage, action.micro_batch, text)
    if variant.executor == "pytorch":
        return Row(variant, "fails", text=f"plain PyTorch raises {describe_error(error)}")
    raise error


class Check:
    """The task of a process of the layout of `specs`: runs the variants, in order, and reports a `Row` for each.

    The results of references are written to `folder`; they must be there before the variants that are compared with
    them. Weights are taken from the checkpoint `source`, if it is not None.
    """

    def __init__(
        self, config: TrainConfig, specs: Mapping[Variant, PipelineSpec], *, folder: Path, source: Path | None
    ) -> None:
        self._config, self._specs = config, specs
        self._folder, self._source = folder, source

    def __call__(self, process: WorkerProcess) -> None:
        """Raises InputError for errors that the user can fix, and with several processes any error of a variant."""
        config = self._config
        spec = self._specs[max(self._specs)]
        data = Data(replace(config, data_workers=0), spec, process.rank, initial_progress(config, None), self._source)
        self._process = process
        self._control, self._groups = process.connect()
        self._reader = data.reader(self._control, "training")
        self._classes = data.classes
        self._replica = spec.layout.replica_of(self._control.rank)
        self._layers = [name for names in spec.layer_names for name in names]
        self._samples = self._reader.batches.size(0, 0)
        self._current = ResultKind.OUTPUT, 0  # kind of results of the layers that run now, and their micro-batch
        if not any(self._folder.iterdir()):
            check_single_samples(config, self._samples)
            process.report(MiniBatchRead(micro_batch_sizes(self._samples, config.micro_batches)))
        for variant in self._specs:
            try:
                row = self._row(variant)
            except Exception as error:
                process.report(_failed_row(variant, error))
                if self._control.size > 1:
                    raise  # the other processes would wait for this process until the timeout
                continue
            if self._control.is_rank_zero:
                process.report(row)
        self._control.barrier()

    def _row(self, variant: Variant) -> Row:
        """Run a variant and compare it with its reference; a reference is also written to the folder."""
        summed = reference_schedule(self._specs[variant].order)
        usual = variant.executor != "replicas" and variant.micro_batches == self._config.micro_batches
        is_reference = usual and variant in references(variant.micro_batches)
        schedule = REFERENCES[0] if is_reference else summed or REFERENCES[-1]
        file = self._folder / schedule
        # mapped, so that large gradients are read separately
        reference: Step | None = torch.load(file, mmap=True, weights_only=False) if file.exists() else None
        if reference is None and not is_reference:
            return Row(variant, "left out", text=f"the reference of {schedule} failed")
        step = self._run_plain(variant) if variant.executor == "pytorch" else self._run(variant)
        step.digests[self._key(ResultKind.LOSS, self._layers[-1])] = step.loss.hex()
        if is_reference:
            torch.save(step, self._folder / variant.schedule)
            if variant.schedule == REFERENCES[0]:
                self._process.report(ReferenceDone(step.loss))
        if reference is None:
            return Row(variant, "reference")
        same_sums = usual and summed is not None and not is_reference
        row = self._compare(variant, step, reference, same_sums=same_sums)
        if row.verdict == "differs" and step.of_micro_batches:
            return Row(variant, "differs, as it must", row.difference, text=step.of_micro_batches)
        return row

    def _compare(self, variant: Variant, step: Step, reference: Step, *, same_sums: bool) -> Row:
        """The row of a variant. Variants with the `same_sums` as the reference are compared bit by bit. All others, and
        plain PyTorch, may differ within the tolerance: their gradients together, and the buffers of each module."""
        plain = variant.executor == "pytorch"
        spec = self._specs[variant]
        first = self._first_of_all(first_difference(step.digests, reference.digests)) if same_sums else None
        if same_sums and first is None and not plain:
            return Row(variant, "identical")
        share, layer = self._distance(step.gradients, reference.gradients)
        row = tolerance_row(variant, share, TOLERANCE[self._config.precision])
        if (plain or not same_sums) and not row.bad and (first is None or share):
            first = self._first_of_all(self._other_buffer(step.buffers, reference.buffers))
            if first is None:
                return row
        if first is not None:
            return difference_row(variant, spec, first, share)
        # with finite numbers, which add up, the layer is known
        return replace(row, layer=layer, stage=spec.stage_of(layer)) if row.difference else row

    def _first_of_all(self, key: ResultKey | None) -> ResultKey | None:
        """The first of the places of all processes."""
        keys = [other for other in self._control.collect(key) if other is not None]
        return min(keys, default=None)

    def _other_buffer(self, buffers: Tensors, references: Tensors) -> ResultKey | None:
        """The first of this process's buffers that differs from a reference's by more than a share of its norm, which
        is taken of all buffers of a shape in a module: a running mean may be zero except for rounding."""
        kinds: dict[tuple[str, torch.Size], list[str]] = {}
        for name, buffer in buffers.items():
            kinds.setdefault((name.rpartition(".")[0], buffer.shape), []).append(name)
        different = []
        for names in kinds.values():
            values, wanted = (
                torch.stack([tensors[name] for name in names]).to(torch.complex128) for tensors in (buffers, references)
            )
            if not torch.equal(values, wanted) and not (values - wanted).norm() <= _BUFFER_TOLERANCE * values.norm():
                worst = (values - wanted).abs().reshape(len(names), -1).sum(dim=1).argmax()
                different.append(self._key(ResultKind.BUFFER, names[int(worst)]))
        return min(different, default=None)

    def _run_plain(self, variant: Variant) -> Step:
        """Like `_run`, in plain PyTorch without a weight update: all pipelines could be wrong in the same way.

        The model is built again and called as its user would call it, once for each micro-batch. Only seeding is as in
        a pipeline, before each layer, as dropout would otherwise draw other numbers.
        """
        engine = self._engine(variant)
        config, device = engine.config, engine.first_device
        model = plain_model(config, engine.spec, [engine.stages[0].module])
        digests: Digests = {}
        self._observe(model, digests)
        mini_batch = first_mini_batch(self._reader, config.micro_batches)

        def before_micro_batch(micro_batch: int) -> None:
            self._current = ResultKind.OUTPUT, micro_batch

        def current() -> int:
            return self._current[1]

        with seeding_layers(model, 0, config.seed, device, current), tracking_mini_batch(model, current):
            loss = run_plain(model, engine.spec, config, mini_batch, mini_batch.shard.sizes, before_micro_batch)()
        parameters = dict(model.named_parameters())
        gradients = _gradients(parameters)
        digests |= self._digests(ResultKind.GRADIENT, {name: gradients.get(name) for name in parameters})
        return Step(loss, digests, gradients, _on_cpu(model.named_buffers()))

    def _run(self, variant: Variant) -> Step:
        engine = self._engine(variant)
        config = engine.config
        digests: Digests = {}
        modules = [stage.module for stage in engine.stages.values()]
        for module in modules:
            self._observe(module, digests)
        other_micro_batches = variant.executor == "in_process" and variant.micro_batches != self._config.micro_batches
        reasons = reasons_to_differ(modules[0], engine.first_device) if other_micro_batches else []
        steps = self._reader.batches.steps_per_epoch
        rate = learning_rate(config.learning_rate, 0, steps, config.batch_size, config.epochs * steps)
        numbers = compute_gradients(engine, first_mini_batch(self._reader, config.micro_batches), step=0)
        parameters = dict(chain.from_iterable(engine.owned_parameters(k).items() for k in engine.stages))
        gradients = _gradients(parameters)
        update_weights(engine, numbers, rate)
        engine.executor.drain_sends()
        digests |= self._digests(ResultKind.GRADIENT, {name: gradients.get(name) for name in parameters})
        for stage_parameters in engine.parameters.values():
            digests |= self._digests(ResultKind.WEIGHT, stage_parameters)
        buffers = _on_cpu(chain.from_iterable(module.named_buffers() for module in modules))
        digests |= self._digests(ResultKind.BUFFER, buffers)
        loss = gather_metrics(engine, numbers)().totals.means[0]
        return Step(loss, digests, gradients, buffers, next(iter(reasons), ""))

    def _on_action(self, action: Action, samples: int, lengths: Sequence[int]) -> None:
        self._current = ResultKind.OUTPUT if action.kind is Kind.F else ResultKind.RECOMPUTED_OUTPUT, action.micro_batch
        self._process.on_action(action, samples, lengths)

    def _observe(self, model: nn.Module, digests: Digests) -> None:
        """Put a digest of every layer's output into `digests`."""

        def after_layer(name: str, layer: nn.Module, inputs: Any, outputs: Any) -> None:
            kind, micro_batch = self._current
            digests[self._key(kind, name, micro_batch)] = digest(as_tuple(outputs))

        for name, layer in model.named_children():
            layer.register_forward_hook(partial(after_layer, name))

    def _digests(self, kind: ResultKind, tensors: Mapping[str, torch.Tensor | None]) -> Digests:
        """The digests of parameters, gradients or buffers by name; the name begins with the layer's."""
        return {self._key(kind, name): "" if tensor is None else digest((tensor,)) for name, tensor in tensors.items()}

    def _key(self, kind: ResultKind, name: str, micro_batch: int = 0) -> ResultKey:
        number = self._layers.index(layer_of(name))
        return ResultKey(kind, -number if kind is ResultKind.GRADIENT else number, micro_batch, name)

    def _engine(self, variant: Variant) -> Engine:
        """A new engine for a variant, with the weights from which all variants start."""
        config = replace(self._config, micro_batches=variant.micro_batches // self._config.replicas)
        engine = build_engine(
            config, self._specs[variant], self._control, self._groups,
            on_action=self._on_action, pretrained=config.init_from is None,
        )  # fmt: skip
        fine_tune(engine, self._source, self._classes)
        if config.compile:
            with self._control.blocked_on(BlockedOn.COMPILER):
                sizes = sorted(set(micro_batch_sizes(self._samples, config.micro_batches)))
                engine.compile(engine.spec.inputs, sizes, engine.spec.lengths)
        engine.set_progress(1.0)  # drop-path as at the end of training: at the beginning it drops nothing
        return engine

    def _distance(self, gradients: Tensors, references: Tensors) -> tuple[float, str]:
        """The norm of the difference from a reference's gradients, over all processes, as a share of their norm, and
        the first layer in the order of the backward with a part of it that is above the mean of all layers."""
        norm = sum(float(references[name].double().square().sum()) for name in sorted(references))
        squares = dict.fromkeys(self._layers, 0.0)
        for name, gradient in gradients.items():
            difference = gradient.double() - references.get(name, 0.0)
            squares[layer_of(name)] += float(difference.square().sum())
        if self._replica:
            squares.clear()  # the first replica counts these gradients
        all_squares = self._control.collect(squares)
        parts = {layer: sum(part.get(layer, 0.0) for part in all_squares) for layer in reversed(self._layers)}
        whole = sum(parts.values())
        layer = next(layer for layer, part in parts.items() if not part < whole / len(parts))
        return float((whole / norm) ** 0.5) if norm else float(whole > 0), layer


def references(micro_batches: int) -> list[Variant]:
    """The variants with which others are compared: a variant for each of `REFERENCES`."""
    return [Variant(1, micro_batches, schedule, "never", "in_process") for schedule in REFERENCES]


def layer_of(name: str) -> str:
    """The layer of a parameter or a buffer."""
    return name.partition(".")[0]


def reasons_to_differ(layers: nn.Module, device: torch.device) -> list[str]:
    """Why another number of micro-batches gives other results; that random numbers are drawn, and that layers change
    buffers, is seen while the layers run."""
    reasons = []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in layers.modules()):
        reasons.append("batch norm normalizes each micro-batch (paper, section 2.2)")
    before: list[torch.Tensor] = []
    buffers: list[tuple[torch.Tensor, int]] = []

    def before_layer(layer: nn.Module, inputs: Any) -> None:
        before[:] = [generator.get_state() for generator in generators(device)]
        buffers[:] = [(buffer, buffer._version) for buffer in layer.buffers()]

    def after_layer(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        after = [generator.get_state() for generator in generators(device)]
        if not all(map(torch.equal, after, before)):
            reasons.append("random numbers, as for dropout, are drawn for each micro-batch")
        pairs = zip(layer.buffers(), buffers, strict=False)
        if any(buffer is not earlier or buffer._version != version for buffer, (earlier, version) in pairs):
            reasons.append("layers change their own buffers with each micro-batch")

    for layer in layers.children():
        layer.register_forward_pre_hook(before_layer)
        layer.register_forward_hook(after_layer)
    return reasons


def plain_model(config: TrainConfig, spec: PipelineSpec, stages: Iterable[nn.Module]) -> nn.Sequential:
    """The user's model in training mode, with the weights and buffers of `stages`; only their layers can be run."""
    values: dict[str, torch.Tensor] = {}
    for stage in stages:
        values |= stage.named_parameters(remove_duplicate=False)
        values |= stage.named_buffers(remove_duplicate=False)
    model = user_model(config, values)
    freeze(model, spec.frozen)
    set_training(model, True)
    set_progress(model, 1.0)
    return model


def first_mini_batch(reader: SplitReader, micro_batches: int) -> MiniBatch:
    """The first mini-batch of a training, cut into `micro_batches`; its inputs are read again."""
    reader = replace(reader, batches=replace(reader.batches, micro_batches=micro_batches))
    if reader.prefetched is not None and reader.split is not None:
        prefetched = PrefetchedBatches(
            {"training": reader.split}, batch_requests("training", reader.batches, [(0, 0)]), workers=0
        )
        reader = replace(reader, prefetched=prefetched)
    return MiniBatch(reader, 0, 0)


def run_plain(
    model: nn.Module,
    spec: PipelineSpec,
    config: TrainConfig,
    mini_batch: MiniBatch,
    sizes: Sequence[int],
    before_micro_batch: Callable[[int], None],
) -> Callable[[], float]:
    """Run the forward and the backward of a mini-batch, in pieces of `sizes` samples, by calling `model`;
    `before_micro_batch` is called with the number of each. Returns a function that waits for the mean loss."""
    inputs, targets = to_first_device(config, spec, mini_batch.inputs()), mini_batch.targets()
    device = torch.device(spec.layout.devices[-1])
    objective = build_loss(config, targets, sizes, config.label_smoothing, device)
    assert inputs is not None
    assert targets is not None
    assert objective is not None
    losses = []
    for number, piece in enumerate(split_all(inputs, sizes)):
        before_micro_batch(number)
        with autocast(device, AUTOCAST_DTYPE[spec.precision]):
            losses.append(objective.loss(number, as_tuple(model(as_value(piece)))))
    for loss in reversed(losses):  # the order in which schedule gpipe sums gradients
        loss.backward()
    elements = max(1, targets[1])
    return lambda: sum(loss.item() * elements for loss in losses) / elements


@contextmanager
def tracking_mini_batch(model: nn.Module, micro_batch: Callable[[], int]) -> Iterator[None]:
    """While active, a plain model runs its micro-batches. Afterwards the running statistics of its batch norms are what
    plain PyTorch has if each norm is given the whole mini-batch, computed in float64."""
    norms = [norm for norm in find_tracking_norms(model) if norm.training]
    copies = [deepcopy(norm).double() for norm in norms]
    given: dict[nn.Module, dict[int, torch.Tensor]] = {norm: {} for norm in norms}

    def record(norm: nn.Module, inputs: tuple[torch.Tensor, ...], keywords: dict[str, torch.Tensor]) -> None:
        (value,) = (*inputs, *keywords.values())
        given[norm][micro_batch()] = value.detach()

    handles = [norm.register_forward_pre_hook(record, with_kwargs=True) for norm in norms]
    yield
    for handle, norm, copy in zip(handles, norms, copies, strict=True):
        handle.remove()
        with torch.no_grad():
            if given[norm]:
                # `forward` and not a call, as hooks observe micro-batches
                copy.forward(torch.cat([*given[norm].values()]).double())
            for buffer, exact in zip(norm.buffers(recurse=False), copy.buffers(recurse=False), strict=True):
                buffer.copy_(exact)


@contextmanager
def seeding_layers(
    layers: nn.Sequential, first_layer: int, run_seed: int, device: torch.device, micro_batch: Callable[[], int]
) -> Iterator[None]:
    """While active, before each layer of a plain model, generators are seeded as in a stage that runs step 0, so that
    dropout draws the same. `first_layer`: the number of the first of `layers`."""

    def seed(number: int, layer: nn.Module, inputs: Any) -> None:
        seed_generator(device, mix_in(mix_in(step_seed(run_seed, 0), micro_batch()), number))

    numbered = enumerate(layers, first_layer)
    handles = [layer.register_forward_pre_hook(partial(seed, number), prepend=True) for number, layer in numbered]
    yield
    for handle in handles:
        handle.remove()


def reference_schedule(order: Schedule) -> str | None:
    """The schedule of `REFERENCES` that sums the gradients of every weight in the same order; None if neither does."""
    for name, downwards in zip(REFERENCES, (True, False), strict=True):
        if all(
            (summed := [a.micro_batch for a in actions if a.kind in kinds]) == sorted(summed, reverse=downwards)
            for actions in order.stages
            for kinds in ((Kind.B, Kind.I), (Kind.B, Kind.W))  # gradients of weights: immediate or deferred
        ):
            return name
    return None


def _gradients(parameters: Mapping[str, nn.Parameter]) -> Tensors:
    """Copies of the gradients on the CPU, by the names of their parameters."""
    return _on_cpu((name, parameter.grad) for name, parameter in parameters.items() if parameter.grad is not None)


def _on_cpu(tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
    return {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors}


def first_difference(digests: Digests, reference: Digests) -> ResultKey | None:
    """The first place in this process's stages where a variant differs from its reference; None if there is none."""
    different = [
        key
        for key, value in digests.items()
        # a recomputed output is compared with the output of the reference, which does not recompute
        if value
        != reference.get(key._replace(kind=ResultKind.OUTPUT) if key.kind is ResultKind.RECOMPUTED_OUTPUT else key)
    ]
    return min(different, default=None)


def tolerance_row(variant: Variant, difference: float, tolerance: float) -> Row:
    """The row of a variant that is compared by tolerance, as its sums have another order than the reference's."""
    if difference == 0:
        return Row(variant, "identical")
    if not math.isfinite(difference):
        return Row(variant, "differs", text="its gradients, or the reference's, are not finite numbers")
    return Row(variant, "within tolerance" if difference <= tolerance else "differs", difference)


def difference_row(variant: Variant, spec: PipelineSpec, first: ResultKey, distance: float) -> Row:
    match first.kind:
        case ResultKind.OUTPUT:
            text = f"layer {first.layer} gives other values for micro-batch {first.micro_batch}"
        case ResultKind.RECOMPUTED_OUTPUT:
            text = f"layer {first.layer} gives other values when micro-batch {first.micro_batch} is recomputed"
        case ResultKind.LOSS:
            text = "the loss differs, though all layers agree"
        case ResultKind.GRADIENT:
            text = f"the gradient of {first.name} differs, though all layers agree"
        case ResultKind.BUFFER | ResultKind.WEIGHT:
            alike = "agree" if distance else "are the same"
            text = f"{first.name} differs after the step, though all gradients {alike}"
    return Row(
        variant,
        "differs",
        difference=distance if math.isfinite(distance) else None,
        layer=first.layer,
        stage=spec.stage_of(first.layer),
        micro_batch=first.micro_batch if first.kind in (ResultKind.OUTPUT, ResultKind.RECOMPUTED_OUTPUT) else None,
        text=text,
    )
