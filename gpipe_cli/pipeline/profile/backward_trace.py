"""The backward of each layer, traced from its forward's graph: operations, whole and in halves, and inputs'
gradients."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gpipe_cli.errors import InputError, describe_error
from gpipe_cli.models.skips import Pop, Stash
from gpipe_cli.pipeline.profile.forward_trace import Layer, Run, describe_memory
from gpipe_cli.pipeline.profile.layer_cost import OperationCounts, OperationKind, SplitBackward
from gpipe_cli.pipeline.profile.operation_counter import OperationCounter
from gpipe_cli.pipeline.runtime.boundary import layout_strides
from gpipe_cli.pipeline.runtime.deferred_weights import backward_inputs, backward_weights
from gpipe_cli.pipeline.runtime.saved_activations import ByteRange, StorageBytes, byte_range, storage_id


@dataclass(frozen=True, eq=False)
class Backward:
    """A layer's backward, for a choice of outputs that have gradients, with figures of the traced size."""

    receives_grad: tuple[bool, ...]  # for each output, whether it has a gradient
    returns_grad: tuple[bool, ...]  # for each input, whether it gets a gradient
    operations: OperationCounts = field(default_factory=OperationCounts)
    split_backward: SplitBackward | None = None


def trace_backward(
    layers: Sequence[Layer], runs: Sequence[Run], split_format: torch.memory_format | None
) -> list[Backward]:
    """The backward of each layer, traced from the last layer to the first; without operations if nothing is trained.

    `split_format`: the format of images between layers with which the two halves are also traced; None if they are not.
    """
    cached_backward = cache(partial(_backward, split_format=split_format))
    read = {id(tensor) for run in runs for tensor in run.cross_layer_tensors.values()}
    receives_grad = tuple(output.requires_grad for output in runs[-1].outputs)
    numbers = {layer.module.name: at for at, layer in enumerate(layers) if isinstance(layer.module, Stash)}
    grads_of_skips: dict[str, tuple[bool, ...]] = {}  # whether its `Pop` returns gradients of a skip's tensors
    backwards = []
    for layer, run in zip(reversed(layers), reversed(runs), strict=True):
        if isinstance(layer.module, Stash):
            receives_grad += grads_of_skips[layer.module.name]
        tied = layer.tied
        if read:
            parameters = enumerate(layer.module.parameters())
            tied = tuple(at for at, parameter in parameters if at in tied or id(parameter) in read)
        try:
            backward = cached_backward(run, receives_grad, tied)
        except RuntimeError as error:
            remedy = "let autograd record all of it; torch.utils.checkpoint does with use_reentrant=False"
            raise InputError(
                f"layer {layer.name} has a backward that cannot be traced ({describe_error(error)}); {remedy}"
            ) from error
        backwards.append(backward)
        receives_grad = backward.returns_grad
        if isinstance(layer.module, Pop):
            skip_count = len(runs[numbers[layer.module.name]].inputs)
            receives_grad, grads_of_skips[layer.module.name] = receives_grad[:-skip_count], receives_grad[-skip_count:]
    return backwards[::-1]


def _backward(
    run: Run, receives_grad: tuple[bool, ...], tied: Sequence[int], split_format: torch.memory_format | None
) -> Backward:
    """Count a layer's backward; the graph is retained, for another choice of outputs. `tied` are indices of the
    parameters that other layers also have or read."""
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
        return Backward(receives_grad, (False,) * len(run.inputs))
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
    return Backward(receives_grad, returns_grad, OperationCounts(counter.by_kind), split_backward)


def _trace_split(
    run: Run,
    roots: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
    gradient_of_output: Mapping[int, torch.Tensor],
    tied: Collection[int],
    memory_format: torch.memory_format,
) -> SplitBackward:
    """Count the halves of a layer's backward from `roots`; `gradient_of_output`: gradients of outputs, by position."""
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
    weight_storages = set(map(storage_id, (*parameters, *run.module.buffers(), *run.cross_layer_tensors.values())))
    given = [*run.inputs, *gradient_of_output.values()]
    inputs, output_gradients = StorageBytes(weight_storages, given), StorageBytes(weight_storages, given)
    inputs.add(weight.input for weight in deferred)
    output_gradients.add(weight.gradient for weight in deferred if weight.gradient is not None)
    saved_inputs = describe_memory(inputs, list(map(byte_range, (*run.inputs, *run.outputs))), len(run.inputs))
    saved_gradients = describe_memory(output_gradients, spans, len(run.outputs))
    with OperationCounter() as weight_counter:
        backward_weights(deferred)
    for tensor in (*run.inputs, *run.trained):
        tensor.grad = None
    return SplitBackward(
        OperationCounts(input_counter.by_kind), OperationCounts(weight_counter.by_kind), saved_inputs, saved_gradients
    )
