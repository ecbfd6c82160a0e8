"""The forward of each layer, traced on tensors without memory: its operations, its outputs and what autograd saves.

Equal layers with equal inputs are traced once. Tracing also finds the weights of other layers that a layer reads
through a function, a hook or an object, without torch's knowledge.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from gpipe_cli.errors import InputError
from gpipe_cli.models.skips import Pop, Stash, find_skips, naming_skip_errors
from gpipe_cli.pipeline.profile.layer_cost import OperationCounts, SavedMemory
from gpipe_cli.pipeline.profile.layer_signature import signature
from gpipe_cli.pipeline.profile.operation_counter import AttentionKernels, Fuses, OperationCounter, cpu_fuses
from gpipe_cli.pipeline.runtime.boundary import Boundary, Tensors, as_tuple, in_layout
from gpipe_cli.pipeline.runtime.frozen import set_training
from gpipe_cli.pipeline.runtime.layer_call import traced_call
from gpipe_cli.pipeline.runtime.precision import autocast
from gpipe_cli.pipeline.runtime.saved_activations import ByteRange, StorageBytes, byte_range, counting_saved, storage_id

Loss: TypeAlias = Callable[[Tensors], torch.Tensor]


class Layer(NamedTuple):
    name: str
    module: nn.Module
    kind: Hashable  # the same for equal layers
    tied: tuple[int, ...]  # indices of its parameters in modules shared with other layers


@dataclass(frozen=True, eq=False)
class Run:
    """A layer's forward on its inputs, with figures of the traced size."""

    module: nn.Module
    cross_layer_tensors: Mapping[str, torch.Tensor]  # what it reads of other layers' weights, by global name
    inputs: Tensors
    outputs: Tensors  # what the layer returns, followed by what a `Stash` saves
    in_tuple: bool  # whether the layer returns a tuple
    loss: torch.Tensor | None
    operations: OperationCounts
    saved: SavedMemory

    @property
    def trained(self) -> list[torch.Tensor]:
        """The trained parameters of the layer, followed by those that it reads of other layers."""
        return [
            tensor for tensor in (*self.module.parameters(), *self.cross_layer_tensors.values()) if tensor.requires_grad
        ]


@contextmanager
def weights_as_on_stage(model: nn.Module, memory_format: torch.memory_format, device: str) -> Iterator[dict[int, str]]:
    """While active, the weights have `memory_format`, as on a stage.

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


_NEITHER = "neither a parameter nor a buffer, so it is not moved or cast; use register_buffer, or precision=float32"


class _StandIns(TorchFunctionMode):
    """Replaces weights that a function or an object refers to by their stand-ins."""

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


@contextmanager
def weights_on(model: nn.Module, device: str) -> Iterator[None]:
    """While active, the weights of a model on the meta device are fake tensors of `device`, which have no memory.

    Raises InputError for a module with a tensor that is neither a parameter nor a buffer.
    """
    if device == "meta":
        yield
        return
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
                yield
        finally:
            for group, tensors in zip(groups, before, strict=True):
                group.update(tensors)


def layer_kinds(model: nn.Sequential) -> tuple[Hashable, ...]:
    """The kind of each layer, the same for equal layers, also in evaluation. Puts `model` in training mode."""
    set_training(model, True)
    return _kinds(model)


def _kinds(model: nn.Sequential) -> tuple[Hashable, ...]:
    numbers: dict[Hashable, int] = {}  # numbers for long signatures, so that these are hashed once
    kind_of = {layer: numbers.setdefault(signature(layer), len(numbers)) for layer in model.children()}
    return tuple(kind_of[layer] for layer in model)


def describe_layers(model: nn.Sequential, kinds: Sequence[Hashable]) -> list[Layer]:
    find_skips(model)  # raises for wrong skips before any layer runs
    uses = Counter(module for layer in model.children() for module in layer.modules())
    shared_modules = {module for module, layers in uses.items() if layers > 1}
    described = []
    for name, layer, kind in zip(model._modules, model, kinds or _kinds(model), strict=True):
        inside = shared_modules and shared_modules.intersection(layer.modules())
        shared = {id(parameter) for module in inside for parameter in module.parameters(recurse=False)}
        tied = tuple(at for at, parameter in enumerate(layer.parameters()) if id(parameter) in shared) if shared else ()
        described.append(Layer(name, layer, kind, tied))
    return described


class _TensorOwners:
    """Finds the owner of memory that a layer reads."""

    def __init__(self, layers: Sequence[Layer], old_owner: Mapping[int, str]) -> None:
        """`old_owner`: storage that a parameter had when the model was built, and has no longer -> its name."""
        self._layers, self._old_owner = layers, old_owner
        self.boundary_storages: set[int] = set()  # storages of the tensors that layers pass to each other

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
        storage; `expected` are the storages of its tensors and inputs.

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
class ForwardTracer:
    """Runs all layers forward, on shapes alone. Fields as in `trace_layers`, and `old_owner` as in `_TensorOwners`."""

    layers: Sequence[Layer]
    inputs: Boundary
    memory_format: torch.memory_format
    autocast_dtype: torch.dtype | None = None
    fuses: Fuses = cpu_fuses
    old_owner: Mapping[int, str] = field(default_factory=dict)

    def trace(
        self, device: str, samples: int, lengths: Sequence[int], *, graph: bool = False, loss: Loss | None = None
    ) -> list[Run]:
        """Run every layer forward, with its graph or without; equal layers share a run that reads no other layer's
        tensors. `loss` counts as part of the last layer."""
        made = (torch.empty(t.shape(samples, lengths), dtype=t.dtype, device=device) for t in self.inputs)
        value = tuple(in_layout(tensor, self.memory_format) for tensor in made)
        in_tuple = False
        stashed: dict[str, tuple[str, Tensors]] = {}  # name of a skip -> the layer that keeps it, and its tensors
        run_of_key: dict[Hashable, Run] = {}
        runs: list[Run] = []
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
        self, layer: Layer, inputs: Tensors, in_tuple: bool, graph: bool, loss: Loss | None, owners: _TensorOwners
    ) -> Run:
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
        return Run(
            layer.module,
            cross_layer_tensors,
            inputs,
            outputs,
            in_tuple=not isinstance(returned, torch.Tensor),
            loss=loss_value,
            operations=OperationCounts(counter.by_kind),
            saved=describe_memory(saved, list(map(byte_range, (*inputs, *outputs))), len(inputs)),
        )


def _describe_inputs(value: Tensors) -> Hashable:
    """Shapes, strides and types of inputs, whether they require gradients, and which of them share memory."""
    storages: dict[int, int] = {}
    numbers = [storages.setdefault(storage_id(tensor), len(storages)) for tensor in value]
    layouts = [(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in value]
    return *numbers, *layouts, *((tensor.dtype, tensor.requires_grad) for tensor in value)


def describe_memory(saved: StorageBytes, spans: Sequence[ByteRange | None], given: int) -> SavedMemory:
    """What is `saved`, with the layer's inputs and outputs listed separately: `spans` are their memory, of
    which the first `given` are inputs. The span of an absent or new tensor is None."""
    same_memory = [  # per output, the first tensor before it that shares its memory
        next((i for i, other in enumerate(spans[:at]) if span and other and span.overlaps(other)), None)
        for at, span in enumerate(spans[given:], given)
    ]
    new = [*(True for _ in range(given)), *(owner is None for owner in same_memory)]
    across = {i: span for i, span in enumerate(spans) if span and new[i] and saved.overlaps(span)}
    crossing = StorageBytes()
    crossing.add_ranges(across.values())
    return SavedMemory(tuple(across), max(0, saved.bytes - crossing.bytes), same_memory=tuple(same_memory))
