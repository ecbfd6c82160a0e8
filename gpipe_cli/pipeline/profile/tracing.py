"""What each layer costs and what crosses each boundary, from shapes alone (paper section 2.1: the cost estimate c_i).

The model is on the meta device: nothing is allocated, nothing is computed, and every process gets the same figures
without a handshake. FLOPs are counted forward and backward (as Lingvo's `FPropMeta`, `lingvo/core/gpipe.py`, does for
the forward), and the bytes that autograd saves. Shapes are traced at two micro-batch sizes, from which those of any
other size follow. Equal layers with equal inputs are traced once.

Tracing also finds the weights of other layers that a layer reads through a function, a hook or an object, without
torch's knowledge.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from gpipe_cli.errors import InputError, describe_error
from gpipe_cli.models.skips import Pop, Stash, find_skips, naming_skip_errors
from gpipe_cli.pipeline.profile.carried_skips import carry_skips_through
from gpipe_cli.pipeline.profile.layer_cost import (
    LayerCost,
    OperationCounts,
    OperationKind,
    Operations,
    SavedMemory,
    SplitBackward,
)
from gpipe_cli.pipeline.profile.layer_signature import signature
from gpipe_cli.pipeline.profile.operation_counter import AttentionKernels, Fuses, OperationCounter, cpu_fuses
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor, Tensors, as_tuple, in_layout, layout_strides
from gpipe_cli.pipeline.runtime.deferred_batch_norm import batch_norm_deferred
from gpipe_cli.pipeline.runtime.deferred_weights import backward_inputs, backward_weights
from gpipe_cli.pipeline.runtime.frozen import set_training
from gpipe_cli.pipeline.runtime.layer_call import traced_call
from gpipe_cli.pipeline.runtime.precision import autocast
from gpipe_cli.pipeline.runtime.saved_activations import (
    ByteRange,
    StorageBytes,
    byte_range,
    counting_saved,
    storage_id,
)
from gpipe_cli.system.hidden_gpus import hidden_gpus

Loss: TypeAlias = Callable[[Tensors], torch.Tensor]

# Older torch records no graph of a GPU's tensors without a driver. Types are then traced as on a CPU; a boundary whose
# type differs on the GPU ends the run with a one-line error.
_RECORDS_WITHOUT_GPU = "2.11"
# Two sizes show which dimensions grow with the micro-batch; not 1, as batch norm refuses a single value per channel.
_TRACED_SIZES = (2, 3)


@hidden_gpus()
def trace_layers(
    model: nn.Sequential,
    inputs: Boundary,
    *,
    training: bool,
    lengths: Sequence[int] = (),
    loss: Loss | None = None,
    memory_format: torch.memory_format = torch.contiguous_format,
    autocast_dtype: torch.dtype | None = None,
    device: str = "cpu",
    fuses: Fuses = cpu_fuses,
    splits: bool = False,
    kinds: Sequence[Hashable] = (),
) -> tuple[LayerCost, ...]:
    """The cost and the boundary of every layer of a model on the meta device; without `training` no backward.

    `inputs` describes what the first layer gets; `lengths` are the greatest that sentences are padded to, and costs are
    those of such a sample. Frozen layers cost less: they have no gradients of weights, and no backward if nothing
    before them is trained. `loss`, computed from the last layer's outputs (on the meta device, of any number of
    samples), counts as part of the last layer. Images and the model's weights have `memory_format`, as in training: a
    layer that flattens images copies channels-last ones. Afterwards the weights' format is as before, as the order in
    which initial values are drawn depends on it. Layers compute in `autocast_dtype` where autocast on `device`, `cpu`
    or `cuda`, uses it; `fuses` says when attention is a single kernel. With `splits` the backward is also traced in two
    halves. `kinds` are those of `layer_kinds`, if known. Hides the GPUs: this process can use none afterwards, unless
    it has before.

    Raises InputError if a layer does not accept what the previous one returns, has an unknown batch norm or reads a
    parameter that would not be trained, and ChangedInputError if a layer changes its input in place in training.
    """
    set_training(model, training)
    layers = _describe_layers(model, kinds)
    trace_backward = partial(_trace_backward, layers, split_format=memory_format if splits else None)
    first_size = _TRACED_SIZES[0]
    with _weights_as_on_stage(model, memory_format, device) as old_owner, batch_norm_deferred(model):
        tracer = _Tracer(layers, inputs, memory_format, autocast_dtype, fuses, old_owner)
        if torch.__version__ < _RECORDS_WITHOUT_GPU:
            device = "cpu"
        with _fake_weights(model, device) if autocast_dtype else nullcontext("meta") as where:
            small, large = runs = [
                tracer.trace(where, samples, lengths, graph=training, loss=loss) for samples in _TRACED_SIZES
            ]
            shorter = [
                tracer.trace(where, first_size, [length - (i == at) for i, length in enumerate(lengths)])
                for at in range(len(lengths))
            ]
            if where != "cuda":
                backward, backward_of_large = map(trace_backward, runs)
        if where == "cuda":  # a backward on cuda needs a GPU, which may be missing: operations are those of a CPU
            with _fake_weights(model, "cpu") as where:
                runs = [tracer.trace(where, samples, lengths, graph=training, loss=loss) for samples in _TRACED_SIZES]
                backward, backward_of_large = map(trace_backward, runs)
    cost = cache(partial(_cost, lengths))  # equal layers share their runs, and so their cost
    traced = zip(backward, backward_of_large, small, large, *shorter, strict=True)
    costs = [replace(cost(*layer_runs), name=layer.name) for layer, layer_runs in zip(layers, traced, strict=True)]
    return carry_skips_through(costs, inputs, find_skips(model))


def run_shapes(
    model: nn.Sequential,
    inputs: Boundary,
    lengths: Sequence[int] = (),
    memory_format: torch.memory_format = torch.contiguous_format,
    kinds: Sequence[Hashable] = (),
) -> None:
    """Run one forward of a single sample in training mode on the meta device; `kinds` as in `trace_layers`.

    Raises InputError, which names the layer, if a layer refuses, as batch norm does with a single value per channel.
    """
    set_training(model, True)
    layers = _describe_layers(model, kinds)
    with batch_norm_deferred(model):
        _Tracer(layers, inputs, memory_format).trace("meta", 1, lengths)


@dataclass(frozen=True, eq=False)
class _Layer:
    name: str
    module: nn.Module
    kind: Hashable  # the same for equal layers
    tied: tuple[int, ...]  # indices of its parameters that lie in modules shared with other layers


@dataclass(frozen=True, eq=False)
class _Backward:
    """A layer's backward, for a choice of outputs that have gradients; figures are those of the traced size."""

    receives_grad: tuple[bool, ...]  # for each output, whether it has a gradient
    wanted: tuple[bool, ...]  # for each input, whether it gets a gradient
    operations: OperationCounts = field(default_factory=OperationCounts)
    split_backward: SplitBackward | None = None


@dataclass(eq=False)
class _Run:
    """A layer's forward on its inputs; figures are those of the traced size."""

    module: nn.Module
    cross_layer_tensors: Mapping[
        str, torch.Tensor
    ]  # parameters and buffers of other layers that it reads, by global name
    inputs: Tensors
    outputs: Tensors  # what the layer returns, followed by what a `Stash` keeps
    in_tuple: bool  # whether the layer returns a tuple
    loss: torch.Tensor | None
    operations: OperationCounts
    saved: SavedMemory
    # keys: for each output whether it has a gradient, and indices of parameters that other layers have or read, too
    backwards: dict[tuple[tuple[bool, ...], tuple[int, ...]], _Backward] = field(default_factory=dict)

    @property
    def trained(self) -> list[torch.Tensor]:
        """The trained parameters, the layer's own and foreign ones."""
        return [
            tensor for tensor in (*self.module.parameters(), *self.cross_layer_tensors.values()) if tensor.requires_grad
        ]


@contextmanager
def _weights_as_on_stage(model: nn.Module, memory_format: torch.memory_format, device: str) -> Iterator[dict[int, str]]:
    """Inside, the weights lie in `memory_format`, as on a stage.

    Yields the names of parameters that a stage moves in memory, by the storage that they had before. Of those that move
    to a GPU only scalars are named, as torch refuses to compute there with any other tensor left on the CPU.
    """
    dimensions = {0} if device == "cuda" else set[int]()
    if memory_format is torch.channels_last:
        dimensions.add(4)
    before = {
        name: (parameter, parameter.data)
        for name, parameter in model.named_parameters()
        if parameter.dim() in dimensions
    }
    if any(tensor.ndim in (4, 5) for tensor in chain(model.parameters(), model.buffers())):  # `to` changes no others
        model.to(memory_format=memory_format)
    for parameter, _ in before.values():
        if not parameter.dim():
            parameter.data = torch.empty_like(parameter)
    try:
        yield {
            storage_id(data): name
            for name, (parameter, data) in before.items()
            if storage_id(data) != storage_id(parameter)
        }
    finally:
        for parameter, data in before.values():
            parameter.data = data


class _StandIns(TorchFunctionMode):
    """Replaces weights that a function or an object holds by their stand-ins."""

    def __init__(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        """`stand_ins`: id of a weight -> its stand-in."""
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {key: self._replace(value) for key, value in (kwargs or {}).items()}
        return func(*map(self._replace, args), **kwargs)

    def _replace(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(self._replace, value))
        if type(value) not in (torch.Tensor, nn.Parameter) or not value.is_meta:
            return value
        if id(value) not in self._stand_ins:
            raise InputError(f"reads a tensor {tuple(value.shape)} that is {_NEITHER}")
        return self._stand_ins[id(value)]


_NEITHER = (
    "neither a parameter nor a buffer, so that it stays where and what it is; use register_buffer, or precision=float32"
)


@contextmanager
def _fake_weights(model: nn.Module, device: str) -> Iterator[str]:
    """Inside, the weights are fake tensors of `device`, without memory: autocast has no rules for the meta device.

    Raises InputError for a module with a tensor that is neither a parameter nor a buffer.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                raise InputError(f"{name}.{key}: is a tensor and {_NEITHER}")
    fakes: dict[int, torch.Tensor] = {}  # id of a weight -> its fake: a weight may be used in several places
    groups: list[dict[str, Any]] = [
        group for module in model.modules() for group in (module._parameters, module._buffers)
    ]
    before = [dict(group) for group in groups]
    with FakeTensorMode():
        for group in groups:
            for name, tensor in group.items():
                if tensor is not None and id(tensor) not in fakes:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, tensor.requires_grad)
                    fakes[id(tensor)] = fake
                group[name] = fakes.get(id(tensor))
        try:
            with _StandIns(fakes):
                yield device
        finally:
            for group, tensors in zip(groups, before, strict=True):
                group.update(tensors)


def layer_kinds(model: nn.Sequential) -> tuple[Hashable, ...]:
    """The kind of each layer, the same for equal layers. Puts `model` in training mode; holds in evaluation, too."""
    set_training(model, True)
    return _kinds(model)


def _kinds(model: nn.Sequential) -> tuple[Hashable, ...]:
    numbers: dict[Hashable, int] = {}  # numbers for long signatures, so that these are hashed once
    kind_of = {layer: numbers.setdefault(signature(layer), len(numbers)) for layer in model.children()}
    return tuple(kind_of[layer] for layer in model)


def _describe_layers(model: nn.Sequential, kinds: Sequence[Hashable]) -> list[_Layer]:
    find_skips(model)  # wrong skips are refused before any layer runs
    uses = Counter(module for layer in model.children() for module in layer.modules())
    shared_modules = {module for module, layers in uses.items() if layers > 1}
    described = []
    for name, layer, kind in zip(model._modules, model, kinds or _kinds(model), strict=True):
        inside = shared_modules and shared_modules.intersection(layer.modules())
        shared = {id(parameter) for module in inside for parameter in module.parameters(recurse=False)}
        tied = tuple(at for at, parameter in enumerate(layer.parameters()) if id(parameter) in shared) if shared else ()
        described.append(_Layer(name, layer, kind, tied))
    return described


class _TensorOwners:
    """Finds the owner of memory that a layer reads."""

    def __init__(self, layers: Sequence[_Layer], old_owner: Mapping[int, str]) -> None:
        """`old_owner`: storage that a parameter had when the model was built, and has no longer -> its name."""
        self._layers, self._old_owner = layers, old_owner
        self.boundary_storages: set[int] = set()  # storages of the tensors that layers hand on to each other

    @cached_property  # most models never need it
    def _names(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Parameters and buffers with their global names, by storage."""
        names: dict[int, tuple[str, torch.Tensor]] = {}
        for layer in self._layers:
            for name, tensor in (*layer.module.named_parameters(), *layer.module.named_buffers()):
                names.setdefault(storage_id(tensor), (f"{layer.name}.{name}", tensor))
        return names

    def cross_layer_tensors(
        self, layer: str, read: Mapping[int, torch.Tensor], expected: Collection[int]
    ) -> dict[str, torch.Tensor]:
        """The parameters and buffers of other layers, by global name, among the tensors that a layer has `read`, by
        storage; `expected` are the storages of its own tensors and of its inputs.

        Raises InputError for a tensor that would not be trained: it belongs to no layer, or keeps its first values.
        """
        cross_layer_tensors = {}
        for storage, tensor in read.items():
            if storage in expected:
                continue
            if storage in self._names:
                name, owned = self._names[storage]
                cross_layer_tensors[name] = owned
            elif (old_owner := self._old_owner.get(storage)) is not None:
                raise InputError(
                    f"layer {layer} reads {old_owner} through a tensor that was taken from it when the model was built "
                    "(.data, .detach()): a stage moves its weights in memory, and that tensor would keep the first "
                    f"values; let the layer take it from {old_owner} whenever it is run"
                )
            elif tensor.requires_grad and tensor.is_leaf and storage not in self.boundary_storages:
                raise InputError(
                    f"layer {layer} reads a parameter {tuple(tensor.shape)} that no layer has: no optimizer would "
                    "train it and no checkpoint keep it; make it, or its module, an attribute of a layer, or freeze it "
                    "by requires_grad_(False)"
                )
        return cross_layer_tensors


@dataclass(frozen=True)
class _Tracer:
    """Runs all layers of a model forward, on shapes alone. Fields are as in `trace_layers`, `old_owner` as in
    `_TensorOwners`."""

    layers: Sequence[_Layer]
    inputs: Boundary
    memory_format: torch.memory_format
    autocast_dtype: torch.dtype | None = None
    fuses: Fuses = cpu_fuses
    old_owner: Mapping[int, str] = field(default_factory=dict)

    def trace(
        self, device: str, samples: int, lengths: Sequence[int], *, graph: bool = False, loss: Loss | None = None
    ) -> list[_Run]:
        """Run every layer forward, with its graph or without; equal layers share a run that reads no other layer's
        tensors. `loss` counts as part of the last layer."""
        made = (
            torch.empty(tensor.shape(samples, lengths), dtype=tensor.dtype, device=device) for tensor in self.inputs
        )
        value = tuple(in_layout(tensor, self.memory_format) for tensor in made)
        in_tuple = False
        stashed: dict[str, tuple[str, Tensors]] = {}  # name of a skip -> the layer that keeps it, and its tensors
        run_of_key: dict[Hashable, _Run] = {}
        runs: list[_Run] = []
        owners = _TensorOwners(self.layers, self.old_owner)
        for layer in self.layers:
            popping_skip: AbstractContextManager[None] = nullcontext()
            if isinstance(layer.module, Pop):
                stash, skip = stashed.pop(layer.module.name)
                popping_skip = naming_skip_errors(layer.module, layer.name, stash, skip, value)
                value, in_tuple = (*value, *skip), True
            owners.boundary_storages.update(map(storage_id, value))
            layer_loss = loss if layer is self.layers[-1] else None
            key = (layer.kind, layer_loss is not None, in_tuple, _describe_inputs(value))
            if key not in run_of_key or run_of_key[key].cross_layer_tensors:
                given = tuple(tensor.detach().requires_grad_(graph and tensor.requires_grad) for tensor in value)
                with popping_skip:
                    run_of_key[key] = self._run(layer, given, in_tuple, graph, layer_loss, owners)
            run = run_of_key[key]
            runs.append(run)
            value, in_tuple = run.outputs, run.in_tuple
            if isinstance(layer.module, Stash):
                half = len(value) // 2
                value, stashed[layer.module.name] = value[:half], (layer.name, value[half:])
        return runs

    def _run(
        self, layer: _Layer, inputs: Tensors, in_tuple: bool, graph: bool, loss: Loss | None, owners: _TensorOwners
    ) -> _Run:
        layer_storages = {storage_id(tensor) for tensor in (*layer.module.parameters(), *layer.module.buffers())}
        saved = StorageBytes(layer_storages, inputs)
        loss_value: torch.Tensor | None = None
        counter = OperationCounter()
        with torch.set_grad_enabled(graph), counter, AttentionKernels(self.fuses), counting_saved(saved):
            try:
                with autocast(inputs[0].device, self.autocast_dtype):
                    returned = traced_call(layer.name, layer.module, inputs, in_tuple, check_in_place=graph)
                counter.add(as_tuple(returned))
            finally:  # if both raise, this error wins: the tensor it is about is why the layer fails
                cross_layer_tensors = owners.cross_layer_tensors(
                    layer.name, counter.tensors, layer_storages.union(map(storage_id, inputs))
                )
            outputs = tuple(in_layout(tensor, self.memory_format) for tensor in as_tuple(returned))
            if isinstance(layer.module, Stash):
                outputs = tuple(tensor.view_as(tensor) for _ in range(2) for tensor in outputs)
            if loss is not None:
                loss_value = loss(outputs)
        saved.exclude(map(storage_id, cross_layer_tensors.values()))
        return _Run(
            layer.module,
            cross_layer_tensors,
            inputs,
            outputs,
            in_tuple=not isinstance(returned, torch.Tensor),
            loss=loss_value,
            operations=OperationCounts(counter.by_kind),
            saved=_describe_memory(saved, list(map(byte_range, (*inputs, *outputs))), len(inputs)),
        )


def _describe_inputs(value: Tensors) -> Hashable:
    """Shapes, strides and types of inputs, whether they require gradients, and which of them share memory."""
    storages: dict[int, int] = {}
    numbers = [storages.setdefault(storage_id(tensor), len(storages)) for tensor in value]
    layouts = [(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in value]
    return *numbers, *layouts, *((tensor.dtype, tensor.requires_grad) for tensor in value)


def _describe_memory(saved: StorageBytes, spans: Sequence[ByteRange | None], given: int) -> SavedMemory:
    """What is `saved`, with the tensors that come in and go out listed apart: `spans` are the memory of these tensors,
    of which the first `given` come in. The span of an absent or new tensor is None."""
    same_memory = [  # per output, the first tensor before it that shares its memory
        next((i for i, other in enumerate(spans[:at]) if span and other and span.overlaps(other)), None)
        for at, span in enumerate(spans[given:], given)
    ]
    new = [*(True for _ in range(given)), *(owner is None for owner in same_memory)]
    across = {i: span for i, span in enumerate(spans) if span and new[i] and saved.overlaps(span)}
    crossing = StorageBytes()
    crossing.add_ranges(across.values())
    return SavedMemory(tuple(across), max(0, saved.bytes - crossing.bytes), same_memory=tuple(same_memory))


def _trace_backward(
    layers: Sequence[_Layer], runs: Sequence[_Run], split_format: torch.memory_format | None
) -> list[_Backward]:
    """The backward of each layer, traced from the last layer to the first; empty if nothing is recorded or trained.

    `split_format`: the format of images between layers with which the two halves are traced, too; None if they are not.
    """
    read = {id(tensor) for run in runs for tensor in run.cross_layer_tensors.values()}
    receives_grad = tuple(output.requires_grad for output in runs[-1].outputs)
    numbers = {layer.module.name: at for at, layer in enumerate(layers) if isinstance(layer.module, Stash)}
    grads_of_skips: dict[str, tuple[bool, ...]] = {}  # whether gradients of a skip's tensors come back from its `Pop`
    backwards = []
    for layer, run in zip(reversed(layers), reversed(runs), strict=True):
        if isinstance(layer.module, Stash):
            receives_grad += grads_of_skips[layer.module.name]
        tied = layer.tied
        if read:
            parameters = enumerate(layer.module.parameters())
            tied = tuple(at for at, parameter in parameters if at in tied or id(parameter) in read)
        if (key := (receives_grad, tied)) not in run.backwards:
            try:
                run.backwards[key] = _backward(run, receives_grad, tied, split_format)
            except RuntimeError as error:
                remedy = "let autograd record all of it; torch.utils.checkpoint does with use_reentrant=False"
                raise InputError(
                    f"layer {layer.name} has a backward that cannot be traced ({describe_error(error)}); {remedy}"
                ) from error
        backward = run.backwards[key]
        backwards.append(backward)
        receives_grad = backward.wanted
        if isinstance(layer.module, Pop):
            skip_count = len(runs[numbers[layer.module.name]].inputs)
            receives_grad, grads_of_skips[layer.module.name] = receives_grad[:-skip_count], receives_grad[-skip_count:]
    return backwards[::-1]


def _backward(
    run: _Run, receives_grad: tuple[bool, ...], tied: Sequence[int], split_format: torch.memory_format | None
) -> _Backward:
    """Count a layer's backward; the graph is retained, for another choice of outputs. `tied` are indices of the
    parameters that other layers have or read, too."""
    gradient_of_output = {
        at: torch.empty_like(output)
        for at, (output, wanted) in enumerate(zip(run.outputs, receives_grad, strict=True))
        if wanted and output.requires_grad
    }
    roots = [run.outputs[at] for at in gradient_of_output]
    gradients = list[torch.Tensor | None](gradient_of_output.values())
    if run.loss is not None and run.loss.requires_grad:
        roots, gradients, gradient_of_output = [run.loss], [None], {}
    inputs = [tensor for tensor in run.inputs if tensor.requires_grad]
    weights = run.trained
    if not roots or not (inputs or weights):
        return _Backward(receives_grad, (False,) * len(run.inputs))
    with OperationCounter() as counter:
        results = torch.autograd.grad(roots, [*inputs, *weights], gradients, retain_graph=True, allow_unused=True)
    with_gradient = {id(tensor) for tensor, result in zip(inputs, results, strict=False) if result is not None}
    returns_grad = tuple(id(tensor) in with_gradient for tensor in run.inputs)
    # accumulation: the gradient and the sum in `.grad` are read, and the new sum is written
    added = counter.by_kind[OperationKind.ELEMENTWISE]
    added.count += len(weights)
    added.bytes += 3 * sum(weight.nbytes for weight in weights)
    split_backward = (
        None if split_format is None else _trace_split(run, roots, gradients, gradient_of_output, tied, split_format)
    )
    return _Backward(receives_grad, returns_grad, OperationCounts(counter.by_kind), split_backward)


def _trace_split(
    run: _Run,
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    gradient_of_output: Mapping[int, torch.Tensor],
    tied: Collection[int],
    memory_format: torch.memory_format,
) -> SplitBackward:
    """Count the two halves of a layer's backward, which starts at `roots`; `gradient_of_output` has the gradients of
    outputs, by position."""
    parameters = list(run.module.parameters())
    other_uses = [
        tensor
        for tensor in (*(parameters[at] for at in tied), *run.cross_layer_tensors.values())
        if tensor.requires_grad
    ]
    input_ranges: dict[int, ByteRange] = {}  # position of an input -> the memory of its gradient
    alive: list[Any] = []

    def returns(position: int, gradient: torch.Tensor) -> None:
        alive.append(gradient.untyped_storage())  # holding the gradient itself would make autograd copy it
        if gradient.stride() == layout_strides(gradient.shape, memory_format):
            input_ranges[position] = byte_range(gradient)  # else the layer before gets a copy of the gradient

    hooks = [tensor.register_hook(partial(returns, at)) for at, tensor in enumerate(run.inputs) if tensor.requires_grad]
    for weight in run.trained:
        weight.grad = torch.empty_like(weight)  # the sum over earlier micro-batches
    with OperationCounter() as input_counter:
        deferred = backward_inputs(list(map(get_gradient_edge, roots)), gradients, tied=other_uses, retain_graph=True)
    for hook in hooks:
        hook.remove()
    gradient_ranges = {at: byte_range(gradient) for at, gradient in gradient_of_output.items()}
    spans = [gradient_ranges.get(at) for at in range(len(run.outputs))]
    spans += [input_ranges.get(at) for at in range(len(run.inputs))]
    weight_storages = {
        storage_id(tensor) for tensor in (*parameters, *run.module.buffers(), *run.cross_layer_tensors.values())
    }
    given = [*run.inputs, *gradient_of_output.values()]
    inputs, output_gradients = StorageBytes(weight_storages, given), StorageBytes(weight_storages, given)
    inputs.add(weight.input for weight in deferred)
    output_gradients.add(weight.gradient for weight in deferred if weight.gradient is not None)
    saved_inputs = _describe_memory(inputs, list(map(byte_range, (*run.inputs, *run.outputs))), len(run.inputs))
    saved_gradients = _describe_memory(output_gradients, spans, len(run.outputs))
    with OperationCounter() as weight_counter:
        backward_weights(deferred)
    for tensor in (*run.inputs, *run.trained):
        tensor.grad = None
    return SplitBackward(
        OperationCounts(input_counter.by_kind), OperationCounts(weight_counter.by_kind), saved_inputs, saved_gradients
    )


def _cost(
    lengths: Sequence[int], backward: _Backward, backward_of_large: _Backward, run: _Run, *others: _Run
) -> LayerCost:
    """A layer's cost, still unnamed, from runs at both sizes, and at the first size with each length less by 1."""
    outputs = [
        _affine_shape(tensor, [other.outputs[position] for other in others], lengths, backward.receives_grad[position])
        for position, tensor in enumerate(run.outputs)
    ]
    parameters = list(run.module.parameters())
    large = others[0]
    return LayerCost(
        "",
        sum(parameter.numel() for parameter in parameters),
        forward=_operations_per_sample(run.operations, large.operations),
        backward=_operations_per_sample(backward.operations, backward_of_large.operations),
        outputs=tuple(replace(described, in_tuple=run.in_tuple) for described in outputs),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        saved=_memory_per_sample(run.saved, large.saved),
        split_backward=_split_per_sample(backward.split_backward, backward_of_large.split_backward),
        cross_layer_tensors=tuple(run.cross_layer_tensors),
    )


def _memory_per_sample(small: SavedMemory, large: SavedMemory) -> SavedMemory:
    first, second = _TRACED_SIZES
    per_sample_bytes = (large.base_bytes - small.base_bytes) // (second - first)
    return replace(small, base_bytes=small.base_bytes - per_sample_bytes * first, per_sample_bytes=per_sample_bytes)


def _split_per_sample(small: SplitBackward | None, large: SplitBackward | None) -> SplitBackward | None:
    if small is None or large is None:
        return None
    return SplitBackward(
        _operations_per_sample(small.inputs, large.inputs),
        _operations_per_sample(small.weights, large.weights),
        _memory_per_sample(small.saved_inputs, large.saved_inputs),
        _memory_per_sample(small.saved_gradients, large.saved_gradients),
    )


def _operations_per_sample(small: OperationCounts, large: OperationCounts) -> OperationCounts:
    """The work per sample, from counts at two sizes; bytes that do not grow with the size are those of weights."""
    first, second = _TRACED_SIZES
    by_kind = {}
    for kind, counted in small.by_kind.items():
        grown = (large.by_kind[kind].bytes - counted.bytes) / (second - first) if kind in large.by_kind else 0.0
        per_sample = min(grown, counted.bytes / first)
        fixed = counted.bytes - per_sample * first
        by_kind[kind] = Operations(counted.count, counted.flops / first, per_sample, fixed)
    return OperationCounts(by_kind)


def _affine_shape(
    small: torch.Tensor, others: Sequence[torch.Tensor], lengths: Sequence[int], has_gradient: bool
) -> BoundaryTensor:
    """A shape as a function of samples and lengths; `others`: at the larger size, then with each length less by 1."""
    first, second = _TRACED_SIZES
    large, *shorter = (tuple(other.shape) for other in others)
    per_sample = tuple((b - a) // (second - first) for a, b in zip(small.shape, large, strict=True))
    per_length = tuple(tuple(a - b for a, b in zip(small.shape, shape, strict=True)) for shape in shorter)
    base = [a - slope * first for a, slope in zip(small.shape, per_sample, strict=True)]
    for length, slopes in zip(lengths, per_length, strict=True):
        base = [a - slope * length for a, slope in zip(base, slopes, strict=True)]
    unused = small.requires_grad and not has_gradient
    return BoundaryTensor(tuple(base), per_sample, small.dtype, has_gradient, per_length, unused=unused)
