"""Counts what layers do while they run on the meta device: operations by kind, their FLOPs and the bytes they move.

FLOPs are by torch's formulas. Shapes alone do not determine which kernels a device chooses: where that changes what is
computed or saved for the backward, the choice here is a CPU's or, for attention, a GPU's.
"""

from collections import defaultdict
from collections.abc import Callable
from math import prod
from typing import Any, TypeAlias

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gpipe_cli.pipeline.profile.layer_cost import OperationKind, Operations
from gpipe_cli.pipeline.profile.tensor_reads import Reads, tensors_in


class OperationCounter(Reads):
    """Counts, for the whole micro-batch: operations, their FLOPs by torch's registry of formulas, and the bytes that
    they read and write, weights included.

    Torch's own `FlopCounterMode` also decomposes every other operation, slowly. Views do not count: they move nothing
    and launch no kernel. What is read is also collected here: a single mode is faster than two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[OperationKind, Operations] = defaultdict(Operations)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.is_view or func in _MOVES_NOTHING:
            return result
        formula = _FORMULAS.get(func) or flop_registry.get(func._overloadpacket)
        counted = self.by_kind[_kind_of(func, args, formula is not None)]
        if formula is not None:
            counted.flops += formula(*args, **(kwargs or {}), out_val=result)
        counted.bytes += _bytes_of(args) + _bytes_of(result)
        counted.count += 1
        return result

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shortcut = _SHORTCUTS.get(func)
        return func(*args, **kwargs) if shortcut is None else shortcut(*args)


def _kind_of(func: Any, args: tuple[Any, ...], has_flops: bool) -> OperationKind:
    packet = func._overloadpacket
    if packet in (_aten.convolution, _aten.convolution_backward):
        weight, groups = (args[2], args[9]) if packet is _aten.convolution_backward else (args[1], args[8])
        if groups > 1 and weight.shape[1] == 1:
            return OperationKind.DEPTHWISE
        return OperationKind.NARROW if min(weight.shape[:2]) < _VECTOR else OperationKind.CONVOLUTION
    if has_flops:
        return OperationKind.PRODUCT
    name = packet.__name__
    if "_norm" in name and "native" in name:
        return OperationKind.NORMALIZATION
    if "_pool" in name:
        return OperationKind.POOLING
    return OperationKind.RANDOM if torch.Tag.nondeterministic_seeded in func.tags else OperationKind.ELEMENTWISE


Fuses: TypeAlias = Callable[[torch.dtype, bool, float], bool]
"""Whether attention is a single kernel, given its type, whether it has a mask, and its dropout probability."""


def cpu_fuses(dtype: torch.dtype, masked: bool, dropout: float) -> bool:
    """Whether torch uses flash attention on a CPU: `use_flash_attention_cpp` in torch's `sdp_utils_cpp.cpp`."""
    return dropout == 0.0


def gpu_fuses(dtype: torch.dtype, masked: bool, dropout: float, *, deterministic: bool) -> bool:
    """A fused kernel for 16-bit types without a mask, and another for all: both sum gradients as threads finish."""
    return not deterministic


class AttentionKernels(TorchFunctionMode):
    """Runs attention as a device would; the meta device always decomposes it.

    Fused attention saves its inputs, its output and a number per row for the backward; decomposed, it also saves the
    attention weights, (heads, T, S). For other dropout a GPU saves a byte per entry instead of four: a Transformer that
    is trained with dropout needs less there than predicted.
    """

    def __init__(self, fuses: Fuses) -> None:
        super().__init__()
        self._fuses = fuses

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(self._fuses, *args, **kwargs)
        return func(*args, **kwargs)


def _attention(
    fuses: Fuses,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    tensors = (query, key, value)
    fused = (
        (query.device.type == "meta" or isinstance(query, FakeTensor))
        and fuses(query.dtype, attn_mask is not None, dropout_p)
        and not enable_gqa
        and not (is_causal and attn_mask is not None)
        and all(tensor.dim() == 4 and tensor.numel() and tensor.stride(-1) == 1 for tensor in tensors)
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and (attn_mask is None or not attn_mask.requires_grad)
        and torch.backends.cuda.flash_sdp_enabled()  # also holds for CPUs
    )
    if not fused:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    mixed: torch.Tensor = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return mixed


def _bytes_of(values: Any) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors_in(values))


def _batch_norm_shapes(x: torch.Tensor, in_training: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What batch norm and its backward return, as shapes; in evaluation a CPU saves no moments."""
    channel = torch.empty(x.shape[1] if in_training else 0, dtype=torch.float32, device=x.device)
    return torch.empty_like(x), channel, torch.empty_like(channel)


def _convolution_shapes(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
    """A convolution returns channels last if its input or weight is so; on the meta device, always contiguous."""
    result: torch.Tensor = _aten.convolution.default(x, weight, *more)
    if torch.channels_last in (suggest_memory_format(x), suggest_memory_format(weight)):
        return torch.empty_like(result, memory_format=torch.channels_last)
    return result


def _convolution_backward_flops(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *more: Any, **_: Any
) -> int:
    """FLOPs of a backward: the forward's once for the input's gradient and once for the weight's, if wanted.

    Torch's formula counts the weight's as if there was a single group: C times too much for C depthwise channels.
    """
    transposed, output_mask = more[4], more[7]
    slides_over = x if transposed else gradient
    return 2 * slides_over.numel() * prod(weight.shape[1:]) * (output_mask[0] + output_mask[1])


_aten = torch.ops.aten
_VECTOR = 16  # float32 numbers in a vector register of 512 bits
# `_unsafe_view` is not marked as a view; linear maps end with it from torch 2.15 on, and with `view` before.
# `prim.device` is here as fake tensors dispatch the question for their device as if it were an operation.
_MOVES_NOTHING = (
    _aten._unsafe_view.default,
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty_strided.default,
    torch.ops.prim.device.default,
)
_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten.convolution_backward.default: _convolution_backward_flops,
    # torch's registry lacked the CPU's attention up to 2.14
    _aten._scaled_dot_product_flash_attention_for_cpu.default: lambda query, key, value, *_, **__: sdpa_flop_count(
        query.shape, key.shape, value.shape
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda *tensors, **_: sdpa_backward_flop_count(
        *(tensor.shape for tensor in tensors[:4])
    ),
}
# Torch computes batch norm's shapes in Python, a millisecond each: most of the time of tracing an AmoebaNet.
_SHORTCUTS: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: _convolution_shapes,
    # (input, weight, bias, running mean, running variance, training, ...)
    _aten.native_batch_norm.default: lambda x, *more: _batch_norm_shapes(x, more[4]),
    _aten.native_batch_norm_backward.default: lambda _, x, *__: _batch_norm_shapes(x),
    # torch 2.9 has no such operation for the meta device
    _aten._weight_norm_interface_backward.default: lambda _, v, g, *__: (torch.empty_like(v), torch.empty_like(g)),
}
