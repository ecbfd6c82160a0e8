"""The workers' side of `gpipe check`: one mini-batch, run by every variant of the pipeline, and compared.

Paper, sections 1 and 2.2: the number of partitions changes nothing. This is checked layer by layer, with the code that
trains: each variant starts from the same weights and seeds, does one step, and records digests of every layer's
outputs, of every gradient, and of the weights and buffers after the step.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from gpipe_cli.assembly.build import COMPUTED_IN, user_model
from gpipe_cli.assembly.learning_rate import learning_rate
from gpipe_cli.config.groups import Precision
from gpipe_cli.config.settings import PartitionConfig, TrainConfig
from gpipe_cli.config.typed import with_type
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.distributed.control_group import Awaited, ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups
from gpipe_cli.models.amoebanet import set_progress
from gpipe_cli.pipeline.runtime.boundary import as_tuple, as_value, digest, split_all
from gpipe_cli.pipeline.runtime.deferred_batch_norm import tracking_norms
from gpipe_cli.pipeline.runtime.executor import ActionFailedError, OnAction
from gpipe_cli.pipeline.runtime.frozen import freeze, set_training
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.pipeline.runtime.precision import autocast
from gpipe_cli.pipeline.runtime.randomness import seed_layer
from gpipe_cli.pipeline.schedule.schedule import RECOMPUTE, Action, Kind, RecomputeMode, Schedule
from gpipe_cli.planner.model_profile import refuse_single_samples
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.system.accelerator import generators
from gpipe_cli.training.data_feed import Data, MiniBatch, Reading
from gpipe_cli.training.engine import Engine, WorkerProcess, build_engine
from gpipe_cli.training.fine_tuning import fine_tune
from gpipe_cli.training.milestones import starting_point
from gpipe_cli.training.step import compute_gradients, gather_metrics, objective_of, placed, update_weights

Executor = Literal["in_process", "pytorch", "distributed", "replicas"]  # pytorch: the plain model
REFERENCES = ("gpipe", "1f1b")  # schedules that sum gradients from the last micro-batch to the first, and vice versa
MODES = RECOMPUTE[::-1]  # the mode with the least recomputation first
EXECUTORS: tuple[Executor, ...] = ("in_process", "pytorch", "distributed", "replicas")
Verdict = Literal["reference", "identical", "within tolerance", "differs", "differs, as it must", "fails", "left out"]

# Norm of the gradients' difference, as a share of their norm: more than another order of summation causes, less than a
# lost micro-batch does. It depends on the bits of the significand: 24, 11 and 8. In bfloat16, batch norm over 4 values
# whose gradients arrive in channels_last makes it 1.2e-2 (timm's test_efficientnet, images of 32 pixels).
TOLERANCE: Mapping[Precision, float] = {"float32": 1e-5, "tf32": 1e-3, "bfloat16": 2e-2}
_BUFFER_TOLERANCE = 1e-3  # the same for a module's buffers: float32 moments of many values have fewer exact digits


class Variant(NamedTuple):
    """One way to run the mini-batch."""

    partitions: int
    micro_batches: int  # total of all replicas
    schedule: str
    recompute: RecomputeMode
    executor: Executor


@dataclass(frozen=True)
class Row:
    """A variant, and how its results compare with those of a reference: one partition, no recomputation, and the one of
    `REFERENCES` that sums gradients in the same order (`1f1b` if neither does). The reference of `1f1b` is itself
    compared with that of `gpipe`."""

    partitions: int
    micro_batches: int
    schedule: str
    recompute: RecomputeMode
    executor: Executor
    verdict: Verdict
    difference: float | None = None  # norm of the gradients' difference, as a share of the gradients' norm
    layer: str | None = None  # the first layer that differs, or the one that fails
    stage: int | None = None
    micro_batch: int | None = None
    text: str = ""  # the difference or the failure: where and why, as far as known

    @property
    def variant(self) -> Variant:
        return Variant(self.partitions, self.micro_batches, self.schedule, self.recompute, self.executor)

    @property
    def bad(self) -> bool:
        return self.verdict in ("differs", "fails")


class What(IntEnum):
    """The kinds of results of a step, in the order in which they are computed."""

    OUTPUT = 0
    RECOMPUTED_OUTPUT = 1
    LOSS = 2
    GRADIENT = 3
    BUFFER = 4
    WEIGHT = 5


class Place(NamedTuple):
    """Where two variants can differ: one result of a step. Sorts in the order of computation."""

    what: What
    order: int  # index of the layer in the model; negated for gradients, as the backward pass runs in reverse
    micro_batch: int  # for outputs; else 0
    layer: str
    name: str = ""  # name of a parameter or buffer; else ""


Digests = dict[Place, str]  # digests of a step's results in one process; "": the parameter has no gradient


@dataclass(frozen=True)
class MiniBatchRead:
    """Message to the parent, before the first variant: the numbers of samples of the micro-batches."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ReferenceDone:
    """Message to the parent: the results of a reference, with which later variants are compared."""

    schedule: str
    loss: float  # mean loss of the mini-batch
    digests: Digests


PipelineSpecs = Mapping[tuple[int, str], PipelineSpec]  # keys: partitions, schedule


class Step(NamedTuple):
    """The results of a step in one process; tensors are on the CPU, by name."""

    loss: float  # mean loss of the mini-batch
    digests: Digests
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    of_micro_batches: str = ""  # why the results depend on the number of micro-batches, if they do


def check(
    config: TrainConfig,
    specs: PipelineSpecs,
    process: WorkerProcess,
    *,
    variants: Sequence[Variant],
    earlier: Mapping[str, ReferenceDone],
    folder: Path,
    source: Path | None,
) -> None:
    """Run the variants, in order, as one process of the layout of their specs; report a `Row` for each.

    References must come before the variants that are compared with them; each is also reported as a `ReferenceDone`.
    `earlier` are references run by other processes, by schedule. Gradients of references are in `folder`. Weights are
    taken from the checkpoint `source`, if it is not None.

    Raises InputError for errors that the user can fix, and with several processes any error of a variant.
    """
    run = None if config.init_from is None else Path(config.init_from)
    spec = specs[max(specs)]
    data = Data(replace(config, data_workers=0), spec, process.number, starting_point(config, None), run)
    control, groups = process.connect()
    reading = data.reading(control, training=True)
    runs = _Runs(config, specs, process, control, groups, reading, folder, source)
    if not earlier:
        samples = reading.batches.size(0, 0)
        refuse_single_samples(config, samples)
        process.report(MiniBatchRead(micro_batch_sizes(samples, config.micro_batches)))
    references = dict(earlier)
    for variant in variants:
        if runs.reference_of(variant) not in references and not runs.is_reference(variant):
            text = f"the reference of {runs.reference_of(variant)} failed"
            process.report(Row(*variant, "left out", text=text))
            continue
        try:
            row, reference = runs.compare(variant, references)
        except Exception as error:
            process.report(_failed(variant, error))
            if control.size > 1:
                raise  # the other processes would wait for this one until the timeout
            continue
        if reference is not None:
            references[variant.schedule] = reference
            process.report(reference)
        if control.leads:
            process.report(row)
    control.barrier()


def _failed(variant: Variant, error: Exception) -> Row:
    """The row of a variant that failed with `error` in its layers or in plain PyTorch; other errors are raised."""
    if isinstance(error, ChangedInputError):
        return Row(*variant, "fails", layer=error.layer, text=str(error))
    if isinstance(error, ActionFailedError):
        # the text does not name the micro-batch: which one fails first depends on the schedule
        action, layer = error.action, error.layer or None
        where = f"layer {layer}" if layer else f"{action.kind.name} of stage {action.stage}"
        text = f"{where} raises {with_type(error.__cause__ or error).rstrip('.')}"
        return Row(*variant, "fails", None, layer, action.stage, action.micro_batch, text)
    if variant.executor == "pytorch":
        return Row(*variant, "fails", text=f"plain PyTorch raises {with_type(error)}")
    raise error


@dataclass(frozen=True)
class _Runs:
    """Runs and compares variants in one process."""

    base: TrainConfig
    specs: PipelineSpecs
    process: WorkerProcess
    control: ControlGroup
    groups: ProcessGroups | None
    reading: Reading
    folder: Path
    source: Path | None  # the checkpoint of `init_from`

    @cached_property
    def layers(self) -> list[str]:
        """The names of all layers of the model, in order."""
        return [name for names in self.specs[max(self.specs)].layer_names for name in names]

    def is_reference(self, variant: Variant) -> bool:
        usual = variant.micro_batches == self.base.micro_batches and variant.executor not in ("pytorch", "replicas")
        plain = variant.partitions == 1 and variant.recompute == "never"
        return usual and plain and variant.schedule in REFERENCES

    def reference_of(self, variant: Variant) -> str:
        """The schedule of the reference with which `variant` is compared."""
        return summed_as(self._spec(variant).order) or REFERENCES[-1]

    def _spec(self, variant: Variant) -> PipelineSpec:
        return self.specs[variant.partitions, variant.schedule]

    def compare(self, variant: Variant, references: Mapping[str, ReferenceDone]) -> tuple[Row, ReferenceDone | None]:
        """Run a variant; returns its row, and its results if it is a reference."""
        plain = variant.executor == "pytorch"
        step = self._run_plain(variant) if plain else self._run(variant)
        step.digests[Place(What.LOSS, 0, 0, self.layers[-1])] = step.loss.hex()
        if self.is_reference(variant):
            save_file(step.gradients, self.folder / f"{variant.schedule}.safetensors")
            torch.save(step.buffers, self.folder / f"{variant.schedule}.buffers")
            first = next(iter(references), None)
            row = Row(*variant, "reference") if first is None else self._within(variant, step, first)
            return row, ReferenceDone(variant.schedule, step.loss, step.digests)
        reference = self.reference_of(variant)
        other_sums = variant.executor == "replicas" or variant.micro_batches != self.base.micro_batches
        if other_sums or summed_as(self._spec(variant).order) is None:
            row = self._within(variant, step, reference)
            if row.verdict == "differs" and step.of_micro_batches:
                row = Row(*variant, "differs, as it must", row.difference, text=step.of_micro_batches)
            return row, None
        least = self._first(first_difference(step.digests, references[reference].digests))
        if plain:
            return self._within(variant, step, reference, least), None
        if least is None:
            return Row(*variant, "identical"), None
        share, _ = self._distance(step.gradients, reference)
        return differs(variant, self._spec(variant), least, share), None

    def _within(self, variant: Variant, step: Step, schedule: str, first: Place | None = None) -> Row:
        """The row of a variant that may differ from the reference of `schedule` within the tolerance: its gradients
        together, and the buffers of each module. `first`: the first place where bits differ, if that is known."""
        share, layer = self._distance(step.gradients, schedule)
        row, spec = within(variant, share, TOLERANCE[self.base.precision]), self._spec(variant)
        if first is not None and (row.bad or share == 0):
            return differs(variant, spec, first, share)
        if row.bad:  # with finite numbers, which add up, the layer is known
            return replace(row, layer=layer, stage=spec.stage_of(layer)) if row.difference else row
        first = self._first(self._other_buffer(step.buffers, schedule))
        return row if first is None else differs(variant, spec, first, share)

    def _first(self, place: Place | None) -> Place | None:
        """The first of the places of all processes."""
        return min((found for found in self.control.collect(place) if found is not None), default=None)

    def _other_buffer(self, buffers: Mapping[str, torch.Tensor], schedule: str) -> Place | None:
        """The first of this process's buffers that differs from a reference's by more than a share of its norm, which
        is taken of all buffers of a shape in a module: a running mean may be zero but for rounding."""
        references = torch.load(self.folder / f"{schedule}.buffers")
        kinds: dict[tuple[str, torch.Size], list[str]] = {}
        for name, buffer in buffers.items():
            kinds.setdefault((name.rpartition(".")[0], buffer.shape), []).append(name)
        different = []
        for names in kinds.values():
            own, other = (
                torch.stack([of[name] for name in names]).to(torch.complex128) for of in (buffers, references)
            )
            if not torch.equal(own, other) and not (own - other).norm() <= _BUFFER_TOLERANCE * own.norm():
                worst = (own - other).abs().reshape(len(names), -1).sum(dim=1).argmax()
                different.append(self._place(What.BUFFER, names[int(worst)]))
        return min(different, default=None)

    def _run_plain(self, variant: Variant) -> Step:
        """Like `_run`, in plain PyTorch without a weight update: all pipelines could be wrong in the same way.

        The model is built anew and called as its user would call it, once for each micro-batch. Only seeding is as in a
        pipeline, before each layer, as dropout would otherwise draw other numbers.
        """
        engine = self._engine(variant)
        config = engine.config
        device, current = engine.first_device, 0
        model = plain_model(config, engine.spec, [engine.stages[0].module])
        digests: Digests = {}
        self._observe(model, digests, lambda: (What.OUTPUT, current))
        mini_batch = first_mini_batch(self.reading, config.micro_batches)
        inputs, targets = placed(engine, mini_batch.inputs()), mini_batch.targets()
        sizes = mini_batch.share.sizes
        objective = objective_of(config, targets, sizes, config.label_smoothing, engine.last_device)
        assert inputs is not None
        assert objective is not None
        losses = []
        seeding = seeding_layers(model, 0, config.seed, device, lambda: current)
        with seeding, tracking_mini_batch(model, lambda: current):
            for current, piece in enumerate(split_all(inputs, sizes)):
                with autocast(device, COMPUTED_IN[config.precision]):
                    outputs = as_tuple(model(as_value(piece)))
                losses.append(objective.loss(current, outputs))
                objective.observe(current, outputs, losses[-1].detach())
            for loss in reversed(losses):  # the order in which schedule gpipe sums gradients
                loss.backward()
        gradients = _gradients(dict(model.named_parameters()))
        digests |= self._digests(What.GRADIENT, {name: gradients.get(name) for name, _ in model.named_parameters()})
        return Step(objective.totals().means[0], digests, gradients, _on_cpu(model.named_buffers()))

    def _run(self, variant: Variant) -> Step:
        digests: Digests = {}
        gradients: dict[str, torch.Tensor] = {}
        current: list[Action] = []

        def on_action(action: Action, samples: int, lengths: Sequence[int]) -> None:
            current[:] = [action]
            self.process.on_action(action, samples, lengths)

        def output() -> tuple[What, int]:
            return What.OUTPUT if current[0].kind is Kind.F else What.RECOMPUTED_OUTPUT, current[0].micro_batch

        engine = self._engine(variant, on_action)
        config = engine.config
        modules = [stage.module for stage in engine.stages.values()]
        for module in modules:
            self._observe(module, digests, output)
        other_micro_batches = variant.executor == "in_process" and variant.micro_batches != self.base.micro_batches
        reasons = reasons_to_differ(modules[0], engine.first_device) if other_micro_batches else []
        steps = self.reading.batches.steps_per_epoch
        rate = learning_rate(config.learning_rate, 0, steps, config.batch_size, config.epochs * steps)
        numbers = compute_gradients(engine, first_mini_batch(self.reading, config.micro_batches), step=0)
        for k in engine.stages:
            gradients |= _gradients(engine.owned(k))
        update_weights(engine, numbers, rate)
        engine.executor.settle()
        for k in engine.stages:
            digests |= self._digests(What.GRADIENT, {name: gradients.get(name) for name in engine.owned(k)})
            digests |= self._digests(What.WEIGHT, engine.parameters[k])
        buffers = _on_cpu(chain.from_iterable(module.named_buffers() for module in modules))
        digests |= self._digests(What.BUFFER, buffers)
        loss = gather_metrics(engine, numbers)().totals.means[0]
        return Step(loss, digests, gradients, buffers, next(iter(reasons), ""))

    def _observe(self, model: nn.Module, digests: Digests, output: Callable[[], tuple[What, int]]) -> None:
        """Record a digest of every layer's output in `digests`; `output` returns its kind and its micro-batch."""

        def ended(number: int, name: str, layer: nn.Module, inputs: Any, outputs: Any) -> None:
            what, micro_batch = output()
            digests[Place(what, number, micro_batch, name)] = digest(as_tuple(outputs))

        for name, layer in model.named_children():
            layer.register_forward_hook(partial(ended, self.layers.index(name), name))

    def _digests(self, what: What, tensors: Mapping[str, torch.Tensor | None]) -> Digests:
        """The digests of parameters, gradients or buffers by name; the name begins with that of the layer."""
        return {
            self._place(what, name): "" if tensor is None else digest((tensor,)) for name, tensor in tensors.items()
        }

    def _place(self, what: What, name: str) -> Place:
        layer = name.partition(".")[0]
        number = self.layers.index(layer)
        return Place(what, -number if what is What.GRADIENT else number, 0, layer, name)

    def _engine(self, variant: Variant, on_action: OnAction | None = None) -> Engine:
        """A new engine for a variant, with the weights from which all variants start."""
        spec = replace(self._spec(variant), recompute=variant.recompute)
        config = replace(
            self.base,
            partitions=variant.partitions,
            partition=PartitionConfig(tuple(map(len, spec.layer_names))),
            micro_batches=variant.micro_batches // self.base.replicas,
            schedule=variant.schedule,
            recompute=variant.recompute,
            executor="distributed" if spec.layout.distributed else "in_process",
        )
        engine = build_engine(
            config, spec, self.control, self.groups,
            on_action=on_action or self.process.on_action, pretrained=config.init_from is None,
        )  # fmt: skip
        fine_tune(engine, self.source)
        if config.compile:
            samples = self.reading.batches.size(0, 0)
            with self.control.waits(Awaited.COMPILER):
                engine.compile(sorted(set(micro_batch_sizes(samples, config.micro_batches))))
        engine.set_progress(1.0)  # drop-path as at the end of training: at the beginning it drops nothing
        return engine

    def _distance(self, gradients: Mapping[str, torch.Tensor], schedule: str) -> tuple[float, str]:
        """The norm of the difference from a reference's gradients, over all processes, as a share of their norm, and
        the first layer in the order of the backward with a part of it that is above the mean of all layers."""
        squares, norm, left = dict.fromkeys(self.layers, 0.0), 0.0, dict(gradients)
        with safe_open(self.folder / f"{schedule}.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dictionary
                reference = file.get_tensor(name).double()
                norm += float(reference.square().sum())
                if name in left:
                    left[name] = left[name].double() - reference
        for name, difference in left.items():
            squares[name.partition(".")[0]] += float(difference.double().square().sum())
        if self.specs[max(self.specs)].layout.replica_of(self.control.rank):
            squares.clear()  # counted by the first replica
        of_processes = self.control.collect(squares)
        parts = {layer: sum(of.get(layer, 0.0) for of in of_processes) for layer in reversed(self.layers)}
        whole = sum(parts.values())
        layer = next(layer for layer, part in parts.items() if not part < whole / len(parts))
        return float((whole / norm) ** 0.5) if norm else float(whole > 0), layer


def reasons_to_differ(layers: nn.Module, device: torch.device) -> list[str]:
    """Why another number of micro-batches gives other results; that random numbers are drawn is seen while the layers
    run."""
    reasons = []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in layers.modules()):
        reasons.append("batch norm normalizes each micro-batch (paper, section 2.2)")
    before: list[torch.Tensor] = []

    def begins(layer: nn.Module, inputs: Any) -> None:
        before[:] = [generator.get_state() for generator in generators(device)]

    def ended(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        now = [generator.get_state() for generator in generators(device)]
        if not all(map(torch.equal, now, before)):
            reasons.append("random numbers, as for dropout, are drawn for each micro-batch")

    for layer in layers.children():
        layer.register_forward_pre_hook(begins)
        layer.register_forward_hook(ended)
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


def first_mini_batch(reading: Reading, micro_batches: int) -> MiniBatch:
    """The first mini-batch of a training, cut into `micro_batches`; its inputs are read anew."""
    reading = replace(reading, batches=replace(reading.batches, micro_batches=micro_batches))
    if reading.loaded is not None and reading.split is not None:
        reading = replace(reading, loaded=LoadedBatches(reading.split, reading.batches, 0, 0, 1, 0))
    return MiniBatch(reading, 0, 0)


@contextmanager
def tracking_mini_batch(model: nn.Module, micro_batch: Callable[[], int]) -> Iterator[None]:
    """Inside, a plain model runs its micro-batches. Afterwards the running statistics of its batch norms are those that
    plain PyTorch has if each norm is given the whole mini-batch at once, computed in float64."""
    norms = [norm for norm in tracking_norms(model) if norm.training]
    copies = [deepcopy(norm).double() for norm in norms]
    given: dict[nn.Module, dict[int, list[torch.Tensor]]] = {norm: {} for norm in norms}

    def record(norm: nn.Module, inputs: tuple[torch.Tensor, ...], keywords: dict[str, torch.Tensor]) -> None:
        (value,) = (*inputs, *keywords.values())
        given[norm].setdefault(micro_batch(), []).append(value.detach())

    handles = [norm.register_forward_pre_hook(record, with_kwargs=True) for norm in norms]
    yield
    for handle, norm, copy in zip(handles, norms, copies, strict=True):
        handle.remove()
        with torch.no_grad():
            for pieces in zip_longest(*given[norm].values()):  # more than one if a forward applies the norm again
                # not a call: hooks observe micro-batches
                copy.forward(torch.cat([piece for piece in pieces if piece is not None]).double())
            for buffer, exact in zip(norm.buffers(recurse=False), copy.buffers(recurse=False), strict=True):
                buffer.copy_(exact)


@contextmanager
def seeding_layers(
    layers: nn.Sequential, first_layer: int, run_seed: int, device: torch.device, micro_batch: Callable[[], int]
) -> Iterator[None]:
    """Inside, before each layer of a plain model, generators are seeded as in a stage that runs step 0, so that dropout
    draws the same. `first_layer`: the number of the first of `layers`."""

    def seed(number: int, layer: nn.Module, inputs: Any) -> None:
        seed_layer(device, run_seed, 0, micro_batch(), number)

    numbered = enumerate(layers, first_layer)
    handles = [layer.register_forward_pre_hook(partial(seed, number), prepend=True) for number, layer in numbered]
    yield
    for handle in handles:
        handle.remove()


def summed_as(order: Schedule) -> str | None:
    """The one of `REFERENCES` that sums the gradients of every weight in the same order; None if neither does."""
    for name, downwards in zip(REFERENCES, (True, False), strict=True):
        if all(
            (found := [a.micro_batch for a in actions if a.kind in kinds]) == sorted(found, reverse=downwards)
            for actions in order.stages
            for kinds in ((Kind.B, Kind.I), (Kind.B, Kind.W))  # gradients of weights: immediate or deferred
        ):
            return name
    return None


def _gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Copies of the gradients on the CPU, by the names of their parameters."""
    return _on_cpu((name, one.grad) for name, one in parameters.items() if one.grad is not None)


def _on_cpu(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors}


def first_difference(own: Digests, reference: Digests) -> Place | None:
    """The first place in this process's stages where a variant differs from its reference; None if there is none."""
    same = {What.RECOMPUTED_OUTPUT: What.OUTPUT}
    referred = {place: place._replace(what=same.get(place.what, place.what)) for place in own}
    return min((place for place, value in own.items() if value != reference.get(referred[place])), default=None)


def within(variant: Variant, difference: float, tolerance: float) -> Row:
    """The row of a variant that is compared by tolerance, as its sums have another order than the reference's."""
    if difference == 0:
        return Row(*variant, "identical")
    if not math.isfinite(difference):
        return Row(*variant, "differs", text="its gradients, or those that it is compared with, are not finite numbers")
    return Row(*variant, "within tolerance" if difference <= tolerance else "differs", difference)


def differs(variant: Variant, spec: PipelineSpec, first: Place, distance: float) -> Row:
    match first.what:
        case What.OUTPUT:
            text = f"micro-batch {first.micro_batch} leaves layer {first.layer} with other values"
        case What.RECOMPUTED_OUTPUT:
            text = f"layer {first.layer} gives other values when micro-batch {first.micro_batch} is recomputed"
        case What.LOSS:
            text = "the loss is another, though all layers gave the same"
        case What.GRADIENT:
            text = f"the gradient of {first.name} is another, though all layers gave the same"
        case What.BUFFER | What.WEIGHT:
            alike = "agree" if distance else "are the same"
            text = f"{first.name} is another after the step, though all gradients {alike}"
    return Row(
        *variant,
        "differs",
        difference=distance if math.isfinite(distance) else None,
        layer=first.layer,
        stage=spec.stage_of(first.layer),
        micro_batch=first.micro_batch if first.what in (What.OUTPUT, What.RECOMPUTED_OUTPUT) else None,
        text=text,
    )
