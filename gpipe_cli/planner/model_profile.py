"""What a model costs, from shapes alone: the basis of cuts, plans and memory limits.

A profile does not depend on K or M, and on the schedule only by split backwards: all plans compared share one profile.
"""

import math
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate

from torch import nn

from gpipe_cli.assembly import build
from gpipe_cli.assembly.freezing import find_frozen
from gpipe_cli.assembly.loss import loss_of_shapes
from gpipe_cli.assembly.optimizer import state_bytes
from gpipe_cli.config.pipeline_settings import Affects
from gpipe_cli.config.settings import TrainConfig, settings_affecting
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.errors import InputError
from gpipe_cli.models.skips import Skip, find_skips
from gpipe_cli.pipeline.profile.forward_trace import layer_kinds
from gpipe_cli.pipeline.profile.layer_cost import LayerCost
from gpipe_cli.pipeline.profile.operation_counter import cpu_fuses, gpu_fuses
from gpipe_cli.pipeline.profile.tracing import run_shapes, trace_layers
from gpipe_cli.pipeline.runtime.boundary import ALIGNED_BYTES, Boundary
from gpipe_cli.pipeline.runtime.frozen import Frozen, freeze
from gpipe_cli.pipeline.runtime.tied_weights import Tie, canonical_names, find_ties
from gpipe_cli.planner.data_sheet import computes_on_gpu
from gpipe_cli.planner.shared_layers import Shared, find_read, find_shared
from gpipe_cli.system.accelerator import DEVICE_TYPE
from gpipe_cli.units import plural


@dataclass(frozen=True)
class LayerWeights:
    """What a layer stores, whatever the size of a micro-batch: three counts, then bytes."""

    parameters: int  # number of parameters; a tied weight's count in the first layer that has it
    trained: int  # number of these that are trained
    tensors: int  # number of parameter tensors
    weight_bytes: int  # parameters and buffers
    gradient_bytes: int
    optimizer_bytes: int  # the optimizer's state, and the moving average of the weights
    summed_bytes: int  # the gradients as replicas send them to each other, each up to an aligned address
    saved_bytes: int  # what a checkpoint has of the layer; a tied weight is saved with the first layer that has it


@dataclass(frozen=True)
class TiedWeight:
    """A weight that several layers have. A stage with several of them has its values, and its optimizer's state, once;
    each layer has its own gradients."""

    tie: Tie
    layers: tuple[int, ...]  # the numbers of these layers
    weight_bytes: int
    gradient_bytes: int  # of one layer; 0 if the weight is not trained
    optimizer_bytes: int


@dataclass(frozen=True)
class TracedModel:
    """A model as traced on the meta device."""

    costs: tuple[LayerCost, ...]  # the cost of each layer in training; the loss belongs to the last layer
    evaluation: tuple[LayerCost, ...]  # the same in evaluation; only the boundaries are used
    shared: tuple[Shared, ...]  # the pairs of layers that must stay in one stage

    def boundaries(self, balance: Sequence[int]) -> tuple[tuple[Boundary, ...], tuple[Boundary, ...]]:
        """What crosses between stages of `balance` layers, in training and in evaluation."""
        last = [end - 1 for end in accumulate(balance[:-1])]
        return tuple(self.costs[at].outputs for at in last), tuple(self.evaluation[at].outputs for at in last)


@dataclass(frozen=True)
class ModelProfile(TracedModel):
    """A traced model, and what its layers store. Sequences have an entry per layer unless noted."""

    weights: tuple[LayerWeights, ...]
    inputs: Boundary  # tensors given to the first layer
    lengths: tuple[int, ...]  # the lengths that sentences are padded to
    frozen: Frozen
    skips: tuple[Skip, ...]
    tied: tuple[TiedWeight, ...]  # the weights that several layers have
    custom_costs: tuple[float, ...] | None  # `gpipe_cost` of a user's layers, in any unit
    model: nn.Sequential = field(repr=False, compare=False)  # the traced model; a module may be at several places
    kinds: tuple[Hashable, ...] = field(repr=False, compare=False)  # one for each layer; equal layers have equal kinds

    @property
    def splits(self) -> bool:
        """Whether the two halves of backwards were also traced."""
        return any(cost.split_backward is not None for cost in self.costs)


@dataclass(frozen=True)
class _Traced:
    """A cache key: a configuration that equals all others with the same profile."""

    facts: tuple[str, ...]
    config: TrainConfig = field(compare=False)


def profile_model(config: TrainConfig, lengths: tuple[int, ...] | None = None) -> ModelProfile:
    """Trace the model for sentences of `lengths` (default: the maximum), with the two halves of backwards if the
    schedule may split them. The last few profiles are cached, as the cells of a table mostly share one.

    Raises InputError if the model does not fit the data set, or its layers do not fit each other.
    """
    lengths = build.max_lengths(config) if lengths is None else lengths
    return _profile(_find_traced(config), lengths)


def number_of_layers(config: TrainConfig) -> int:
    """The number of the model's layers, which is built but not traced. Raises InputError if it cannot be built."""
    return len(_model(_find_traced(config)))


def _find_traced(config: TrainConfig) -> _Traced:
    facts = [f"{name}={getattr(config, name)}" for name in settings_affecting(Affects.LAYERS)]
    facts += [f"on_gpu={computes_on_gpu(config)}", f"splits={config.splits_backward}"]
    return _Traced(tuple(facts), config)


@lru_cache(maxsize=1)
def _model(traced: _Traced) -> nn.Sequential:
    config = traced.config
    return build.build_model(config, share_equal_layers=not config.freeze)  # a frozen layer differs from a trained one


@lru_cache(maxsize=16)
def _profile(traced: _Traced, lengths: tuple[int, ...]) -> ModelProfile:
    config = traced.config
    model, inputs = _model(traced), build.model_inputs(config)
    shared = {(sharing.first, sharing.second): sharing for sharing in find_shared(model)}
    frozen = find_frozen(config, model)
    freeze(model, frozen)
    memory_format = build.MEMORY_FORMATS[build.memory_format_of(config)]
    on_gpu = computes_on_gpu(config)
    kinds = layer_kinds(model)
    trace = partial(
        trace_layers, model, inputs, lengths=lengths, memory_format=memory_format, kinds=kinds,
        autocast_dtype=build.AUTOCAST_DTYPE[config.precision], device=DEVICE_TYPE if on_gpu else "cpu",
        fuses=partial(gpu_fuses, deterministic=config.deterministic) if on_gpu else cpu_fuses,
    )  # fmt: skip
    evaluation = trace(training=False)
    _check_outputs(config, evaluation[-1].outputs, lengths)
    auxiliary_weight = getattr(config.model, "auxiliary_weight", 0.0)
    loss = loss_of_shapes(config.label_smoothing, auxiliary_weight)
    costs = trace(training=True, loss=loss, splits=config.splits_backward)
    for sharing in find_read(costs, evaluation):
        shared.setdefault((sharing.first, sharing.second), sharing)
    ties = find_ties(model)
    tied_elsewhere = canonical_names(ties)
    weights_of = {layer: _layer_weights(config, name, layer, tied_elsewhere) for name, layer in model.named_children()}
    tied = tuple(_tied_weight(config, model, tie) for tie in ties)
    return ModelProfile(
        costs, evaluation, (*shared.values(),), tuple(weights_of[layer] for layer in model), inputs, lengths, frozen,
        find_skips(model), tied, _custom_costs(model), model, kinds,
    )  # fmt: skip


def _custom_costs(model: nn.Sequential) -> tuple[float, ...] | None:
    """The paper's optional cost estimate c_i of each layer (section 2.1): its attribute `gpipe_cost`, if it has one.

    Raises InputError if only some layers have one, as they can only be compared with each other.
    """
    given = {name: getattr(layer, "gpipe_cost", None) for name, layer in model._modules.items()}
    if not (costs := {name: cost for name, cost in given.items() if cost is not None}):
        return None
    for name, cost in given.items():
        if not isinstance(cost, int | float) or not 0 <= cost < math.inf:
            raise InputError(
                f"model.target: layer {name} has gpipe_cost={cost}, and layer {next(iter(costs))} has "
                f"{next(iter(costs.values()))}; give all layers a number, 0 or more, or none"
            )
    if not any(costs.values()):
        raise InputError("model.target: gpipe_cost is 0 in all layers; at least one must be above 0, or none have it")
    return tuple(costs.values())


def check_single_samples(
    config: TrainConfig, samples: int, profile: ModelProfile | None = None, *, last: bool = False
) -> None:
    """Check that no micro-batch is a single sample if batch norm would then train on one value per channel (1x1 maps).

    Raises InputError if a mini-batch of `samples` would have such a micro-batch; `last`: it is the short last one of an
    epoch. Without `profile` the model is built.
    """
    micro_batches, replicas = config.micro_batches, config.replicas
    if micro_batch_sizes(samples, replicas * micro_batches)[-1] > 1:
        return
    if profile is None:
        model = build.build_model(config)
        freeze(model, find_frozen(config, model))
    else:
        model = profile.model
    memory_format = build.MEMORY_FORMATS[build.memory_format_of(config)]
    try:
        inputs, lengths = build.model_inputs(config), build.max_lengths(config)
        run_shapes(model, inputs, lengths, memory_format, () if profile is None else profile.kinds)
    except InputError as error:
        what, remedies = f"micro_batches={micro_batches}: a", [f"batch_size={2 * replicas * micro_batches} or more"]
        if last:
            what, remedies = "dataset.drop_last=false: the last", ["dataset.drop_last=true"]
        if samples >= 2 * replicas:
            remedies.append(f"micro_batches={samples // 2 // replicas} or fewer")
        raise InputError(
            f"{what} mini-batch has {plural(samples, 'sample')} and so a micro-batch of one, which this model cannot "
            f"train on ({error}); use {', or '.join(remedies)}"
        ) from error


def _layer_weights(config: TrainConfig, name: str, layer: nn.Module, tied_elsewhere: Container[str]) -> LayerWeights:
    """The weights of layer `name`; `tied_elsewhere`: names of parameters that an earlier layer also has."""
    parameters, buffers = list(layer.parameters()), list(layer.buffers())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    first = [parameter for path, parameter in layer.named_parameters() if f"{name}.{path}" not in tied_elsewhere]
    later = [parameter for path, parameter in layer.named_parameters() if f"{name}.{path}" in tied_elsewhere]

    def stored_bytes(some: Sequence[nn.Parameter]) -> int:
        averaged = [*some, *(b for b in buffers if b.is_floating_point())] if config.ema_decay else []
        return state_bytes(config.optimizer, some) + sum(t.nbytes for t in averaged)

    weight_bytes = sum(t.nbytes for t in (*parameters, *buffers))
    return LayerWeights(
        parameters=sum(p.numel() for p in first),
        trained=sum(p.numel() for p in first if p.requires_grad),
        tensors=len(parameters),
        weight_bytes=weight_bytes,
        gradient_bytes=sum(p.nbytes for p in trained),
        optimizer_bytes=stored_bytes(parameters),
        summed_bytes=sum(-(-p.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for p in trained),
        saved_bytes=weight_bytes - sum(p.nbytes for p in later) + stored_bytes(first),
    )


def _tied_weight(config: TrainConfig, model: nn.Sequential, tie: Tie) -> TiedWeight:
    numbers = {name: number for number, name in enumerate(model._modules)}
    weight = model.get_parameter(tie.name)
    return TiedWeight(
        tie,
        tuple(numbers[layer] for layer in tie.layers),
        weight.nbytes,
        weight.nbytes if weight.requires_grad else 0,
        state_bytes(config.optimizer, [weight]) + (weight.nbytes if config.ema_decay else 0),
    )


def _check_outputs(config: TrainConfig, outputs: Boundary, lengths: tuple[int, ...]) -> None:
    """Raises InputError if the last layer of a user's own model does not return logits for this data set."""
    samples, classes = 2, build.outputs_of(config)
    first, *others = build.targets_of(config, samples, lengths)
    wanted = (first, classes, *others) if config.task == "segmentation" else (first, *others, classes)
    shape = outputs[0].shape(samples, lengths)
    if shape != wanted:
        what = "tokens in its vocabulary" if config.text else "classes"
        target = getattr(config.model, "target", config.model.name)
        raise InputError(
            f"model.target={target}: returns {shape} for {samples} samples, and dataset={config.dataset.name} has "
            f"{classes} {what}: {wanted} is needed; fix the model's last layer"
        )
