"""Costs for micro-batches of any size, from traces of two sizes: shapes, bytes and FLOPs grow linearly."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from gpipe_cli.pipeline.profile.backward_trace import Backward
from gpipe_cli.pipeline.profile.forward_trace import Run
from gpipe_cli.pipeline.profile.layer_cost import LayerCost, OperationCounts, Operations, SavedMemory, SplitBackward
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor

# Two sizes show which dimensions grow with the micro-batch; not 1, as batch norm refuses a single value per channel.
TRACED_SIZES = (2, 3)


def fit_cost(lengths: Sequence[int], backward: Backward, large_backward: Backward, run: Run, *others: Run) -> LayerCost:
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
        backward=_operations_per_sample(backward.operations, large_backward.operations),
        outputs=tuple(replace(described, in_tuple=run.in_tuple) for described in outputs),
        trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        saved=_memory_per_sample(run.saved, large.saved),
        split_backward=_split_per_sample(backward.split_backward, large_backward.split_backward),
        cross_layer_tensors=tuple(run.cross_layer_tensors),
    )


def _memory_per_sample(small: SavedMemory, large: SavedMemory) -> SavedMemory:
    first, second = TRACED_SIZES
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
    """The operations per sample, from counts at two sizes; bytes that do not grow with the size are weights."""
    first, second = TRACED_SIZES
    counts = OperationCounts()
    for kind, counted in small.items():
        grown = (large[kind].bytes - counted.bytes) / (second - first) if kind in large else 0.0
        per_sample = min(grown, counted.bytes / first)
        fixed = counted.bytes - per_sample * first
        counts[kind] = Operations(counted.count, counted.flops / first, per_sample, fixed)
    return counts


def _affine_shape(
    small: torch.Tensor, others: Sequence[torch.Tensor], lengths: Sequence[int], has_gradient: bool
) -> BoundaryTensor:
    """A shape as a function of samples and lengths; `others`: at the larger size, then with each length less by 1."""
    first, second = TRACED_SIZES
    large, *shorter = (tuple(other.shape) for other in others)
    per_sample = tuple((b - a) // (second - first) for a, b in zip(small.shape, large, strict=True))
    per_length = tuple(tuple(a - b for a, b in zip(small.shape, shape, strict=True)) for shape in shorter)
    base = [a - slope * first for a, slope in zip(small.shape, per_sample, strict=True)]
    for length, slopes in zip(lengths, per_length, strict=True):
        base = [a - slope * length for a, slope in zip(base, slopes, strict=True)]
    unused = small.requires_grad and not has_gradient
    return BoundaryTensor(tuple(base), per_sample, small.dtype, has_gradient, per_length, unused=unused)
