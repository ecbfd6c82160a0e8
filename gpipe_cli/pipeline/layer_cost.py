"""What each layer costs and what crosses each boundary, from shapes alone (paper section 2.1: the cost estimate c_i).

The model stands on the meta device: nothing is allocated, nothing is computed, and every process arrives at the same
figures without a handshake. FLOPs are counted by torch's own formulas, forward and backward, as Lingvo's `FPropMeta`
does for the forward (`lingvo/core/gpipe.py`). Shapes are traced at two micro-batch sizes, so that the shape of any
other size follows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gpipe_cli.pipeline.frozen import set_training
from gpipe_cli.pipeline.micro_batch import Tensors, as_tuple, as_value

# FLOP/s over bytes/s of common hardware in float32: 10 for a CPU core, 13 for a P100 (9.3 TFLOP/s, 732 GB/s), 14 for an
# H200 (67 TFLOP/s, 4.8 TB/s). The cut depends little on it.
FLOPS_PER_BYTE = 10.0

# Two sizes show which dimensions grow with the micro-batch; 2 and 3 because batch norm refuses a single value per
# channel.
_TRACED_SIZES = (2, 3)


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor that a layer hands to the next one: its shape for any micro-batch, and whether a gradient returns.

    Sentences of a mini-batch are padded to lengths that differ from one mini-batch to the next, so a dimension may grow
    with them too: `per_length[i]` says how each one does with length number i.
    """

    base: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    per_length: tuple[tuple[int, ...], ...] = ()

    def shape(self, samples: int, lengths: Sequence[int] = ()) -> tuple[int, ...]:
        shape = [base + slope * samples for base, slope in zip(self.base, self.per_sample, strict=True)]
        for length, slopes in zip(lengths, self.per_length, strict=True):
            shape = [size + slope * length for size, slope in zip(shape, slopes, strict=True)]
        return tuple(shape)

    def bytes(self, samples: int, lengths: Sequence[int] = ()) -> int:
        return prod(self.shape(samples, lengths)) * self.dtype.itemsize


Boundary = tuple[BoundaryTensor, ...]


def as_boundary(examples: Tensors) -> Boundary:
    """What a model is given, described by examples (1, ...): only their first dimension varies."""
    return tuple(
        BoundaryTensor((0, *tensor.shape[1:]), (1, *(0 for _ in tensor.shape[1:])), tensor.dtype, False)
        for tensor in examples
    )


@dataclass(frozen=True)
class LayerCost:
    """One layer. FLOPs and bytes moved are those of one sample; a multiplication and an addition count as two."""

    name: str
    parameters: int
    forward_flops: float
    backward_flops: float
    forward_bytes: float
    backward_bytes: float
    outputs: Boundary

    @property
    def flops(self) -> float:
        return self.forward_flops + self.backward_flops

    @property
    def work(self) -> float:
        """What the partitioner balances: FLOPs, plus the FLOPs that could be done while the layer's bytes are moved.

        Departs from the paper, which counts FLOPs alone: an AmoebaNet spends most of its time in batch norms, pools and
        sums that have next to none, and its first cells, at full resolution, would seem cheap.
        """
        return self.flops + FLOPS_PER_BYTE * (self.forward_bytes + self.backward_bytes)


def trace_layers(
    model: nn.Sequential, inputs: Boundary, *, training: bool, lengths: Sequence[int] = ()
) -> tuple[LayerCost, ...]:
    """The cost and the boundary of every layer of a model on the meta device.

    `inputs` describe what the first layer gets; with `training=False` the backward is left out. `lengths` are the
    greatest ones that sentences are padded to: costs are those of such a sample. What is frozen costs no more than is
    done: no gradients of weights, and no backward at all where nothing before it is trained. Raises ValueError if a
    layer does not accept what the one before it returns.
    """
    first, second = _TRACED_SIZES
    small = _trace(model, inputs, first, lengths, training)
    large = _trace(model, inputs, second, lengths, training=False, mode=training)
    shorter = [
        _trace(model, inputs, first, [n - (i == at) for i, n in enumerate(lengths)], training=False, mode=training)
        for at in range(len(lengths))
    ]
    costs = []
    for at, (name, layer) in enumerate(model.named_children()):
        one, others = small[at], [large[at], *(traced[at] for traced in shorter)]
        outputs = tuple(
            _affine(tensor, [other.outputs[position] for other in others], lengths, one.gradients[position])
            for position, tensor in enumerate(one.outputs)
        )
        parameters = sum(parameter.numel() for parameter in layer.parameters())
        costs.append(
            LayerCost(
                name,
                parameters,
                forward_flops=one.forward_flops / first,
                backward_flops=one.backward_flops / first,
                forward_bytes=one.forward_bytes / first,
                backward_bytes=one.backward_bytes / first,
                outputs=outputs,
            )
        )
    return tuple(costs)


def run_shapes(model: nn.Sequential, inputs: Boundary, lengths: Sequence[int] = ()) -> None:
    """One forward in training mode of a micro-batch of a single sample, on the meta device.

    Raises ValueError, naming the layer, if the model refuses: batch norm does where it has one value per channel.
    """
    _trace(model, inputs, 1, lengths, training=False, mode=True)


@dataclass
class _Traced:
    inputs: Tensors
    outputs: Tensors
    forward_flops: float
    forward_bytes: float
    backward_flops: float = 0.0
    backward_bytes: float = 0.0
    gradients: tuple[bool, ...] = ()


class _Counter(TorchDispatchMode):
    """FLOPs by torch's registry of formulas, and the bytes that every operation reads and writes.

    Torch's own `FlopCounterMode` also takes every other operation apart, slowly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.moved_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        shortcut = _SHORTCUTS.get(func)
        result = func(*args, **kwargs) if shortcut is None else shortcut(*args)
        formula = _FORMULAS.get(func) or flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        if not func.is_view and func not in _MOVES_NOTHING:
            self.moved_bytes += _bytes_of(args) + _bytes_of(result)
        return result


def _bytes_of(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel() * values.dtype.itemsize
    return sum(map(_bytes_of, values)) if isinstance(values, (tuple, list)) else 0


def _batch_norm_shapes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What batch norm and its backward return, as shapes."""
    channel = torch.empty(x.shape[1], dtype=torch.float32, device="meta")
    return torch.empty_like(x), channel, torch.empty_like(channel)


def _convolution_backward_flops(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *more: Any, **_: Any
) -> int:
    """As many as the forward's for the inputs' gradient and for the weights', as far as they are wanted.

    Torch's formula counts the weights' as if there was one group: for a depthwise convolution too much by a factor of
    its channels.
    """
    transposed, output_mask = more[4], more[7]
    slides_over = x if transposed else gradient
    return 2 * slides_over.numel() * prod(weight.shape[1:]) * (output_mask[0] + output_mask[1])


# Batch norm's shapes are computed by torch in Python, a millisecond each: most of the time of tracing an AmoebaNet.
_aten = torch.ops.aten
_MOVES_NOTHING = (_aten.empty.memory_format, _aten.empty_like.default)
_FORMULAS: dict[Any, Callable[..., int]] = {_aten.convolution_backward.default: _convolution_backward_flops}
_SHORTCUTS: dict[Any, Callable[..., Any]] = {
    _aten.native_batch_norm.default: lambda x, *_: _batch_norm_shapes(x),
    _aten.native_batch_norm_backward.default: lambda _, x, *__: _batch_norm_shapes(x),
}


def _trace(
    model: nn.Sequential,
    inputs: Boundary,
    samples: int,
    lengths: Sequence[int],
    training: bool,
    mode: bool | None = None,
) -> list[_Traced]:
    """Run forward and, with `training`, backward; `mode` puts the model in training mode without a backward."""
    set_training(model, training if mode is None else mode)
    value: Tensors = tuple(
        torch.empty(tensor.shape(samples, lengths), dtype=tensor.dtype, device="meta") for tensor in inputs
    )
    traced: list[_Traced] = []
    for name, layer in model.named_children():
        if traced:
            value = tuple(_as_leaf(tensor, training) for tensor in value)
        with torch.set_grad_enabled(training), _Counter() as counter:
            try:
                returned = layer(as_value(value))
            except Exception as error:  # somebody's own layer may raise anything
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in value)
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ValueError(f"layer {name} does not accept inputs of shape {shapes}: {reason}") from error
            parts = returned if isinstance(returned, tuple | list) else (returned,)
            if strange := [type(part).__name__ for part in parts if not isinstance(part, torch.Tensor)]:
                where = f"{type(returned).__name__} with a " if parts is returned else ""
                raise ValueError(f"layer {name} returns a {where}{strange[0]}; return a tensor or a tuple of tensors")
            outputs = as_tuple(returned)
        traced.append(_Traced(value, outputs, counter.flops, counter.moved_bytes))
        value = outputs
    gradients: tuple[torch.Tensor | None, ...] = tuple(
        torch.empty_like(output) if output.requires_grad else None for output in traced[-1].outputs
    )
    for layer_trace, layer in zip(reversed(traced), reversed(list(model.children())), strict=True):
        layer_trace.gradients = tuple(gradient is not None for gradient in gradients)
        gradients = _backward(layer_trace, layer, gradients) if training else (None,) * len(layer_trace.inputs)
    return traced


def _backward(
    traced: _Traced, layer: nn.Module, gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """Count one layer's backward; the gradients of its inputs are None where none flows."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(traced.outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    wanted = [tensor for tensor in traced.inputs if tensor.requires_grad]
    weights = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    found: dict[int, torch.Tensor | None] = {}
    if pairs and (wanted or weights):
        with _Counter() as counter:
            results = torch.autograd.grad(
                [output for output, _ in pairs], [*wanted, *weights], [g for _, g in pairs], allow_unused=True
            )
        traced.backward_flops, traced.backward_bytes = counter.flops, counter.moved_bytes
        found = {id(tensor): result for tensor, result in zip(wanted, results, strict=False)}
    return tuple(found.get(id(tensor)) for tensor in traced.inputs)


def _as_leaf(tensor: torch.Tensor, training: bool) -> torch.Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_(training and tensor.requires_grad)


def _affine(
    small: torch.Tensor, others: Sequence[torch.Tensor], lengths: Sequence[int], has_gradient: bool
) -> BoundaryTensor:
    """The shape as a function: `others` have been traced with more samples, then with one of each length less."""
    first, second = _TRACED_SIZES
    large, *shorter = (tuple(other.shape) for other in others)
    per_sample = tuple((b - a) // (second - first) for a, b in zip(small.shape, large, strict=True))
    per_length = tuple(tuple(a - b for a, b in zip(small.shape, shape, strict=True)) for shape in shorter)
    base = [a - slope * first for a, slope in zip(small.shape, per_sample, strict=True)]
    for length, slopes in zip(lengths, per_length, strict=True):
        base = [a - slope * length for a, slope in zip(base, slopes, strict=True)]
    return BoundaryTensor(tuple(base), per_sample, small.dtype, has_gradient, per_length)
