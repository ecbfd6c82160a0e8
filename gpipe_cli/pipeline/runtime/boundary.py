"""The tensors that cross the boundary between two layers, whose shapes and strides are known beforehand.

Shapes are traced on the meta device, so no step needs a handshake. Strides are the same for every cut, as kernels are
chosen by strides; images are channels last where the run uses that format.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TypeAlias

import torch

Tensors: TypeAlias = tuple[torch.Tensor, ...]
OptionalTensors: TypeAlias = tuple[torch.Tensor | None, ...]
"""Outputs of a stage, none of them None; or gradients, with None for a tensor that needs no gradient."""
_HASHED = 1 << 17  # elements of a tensor that are hashed together
ALIGNED_BYTES = 256  # the largest alignment that torch reports to cuBLASLt, which chooses kernels by it


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that a layer passes to the next layer: its shape for any micro-batch, and whether a gradient returns.

    Sentences are padded to other lengths in each mini-batch: `per_length[i]` is each dimension's growth with length
    number i. `in_tuple`: the layer returns a tuple, and the next layer gets a tuple, even of a single tensor. `skip`:
    the name of the `Stash` that keeps the tensor for a later layer; "" if the next layer gets it. `unused`: the tensor
    requires a gradient but gets none, as no later layer uses it.
    """

    base: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    per_length: tuple[tuple[int, ...], ...] = ()
    in_tuple: bool = False
    skip: str = ""
    unused: bool = False

    @property
    def requires_grad(self) -> bool:
        return self.has_gradient or self.unused

    def shape(self, samples: int, lengths: Sequence[int] = ()) -> tuple[int, ...]:
        shape = [base + slope * samples for base, slope in zip(self.base, self.per_sample, strict=True)]
        for length, slopes in zip(lengths, self.per_length, strict=True):
            shape = [size + slope * length for size, slope in zip(shape, slopes, strict=True)]
        return tuple(shape)

    def bytes(self, samples: int, lengths: Sequence[int] = ()) -> int:
        return prod(self.shape(samples, lengths)) * self.dtype.itemsize


Boundary = tuple[BoundaryTensor, ...]


def as_boundary(examples: Tensors) -> Boundary:
    """The boundary that describes a model's inputs, tensors (N, ...) of any N, by examples of them."""
    return tuple(BoundaryTensor((0, *t.shape[1:]), (1, *(0 for _ in t.shape[1:])), t.dtype, False) for t in examples)


def as_tuple(value: torch.Tensor | Sequence[torch.Tensor]) -> Tensors:
    """A layer's input or output, which may be a single tensor, as the tuple that the engine always uses."""
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def as_value(tensors: Tensors, in_tuple: bool = False) -> torch.Tensor | Tensors:
    """What the next layer is called with: a single tensor as it is, unless it came `in_tuple`; several as a tuple."""
    return tensors[0] if len(tensors) == 1 and not in_tuple else tensors


def without_graph(tensors: Tensors) -> Tensors:
    """Leaves of autograd that share the memory and `requires_grad` of `tensors`."""
    return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)


def in_layout(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """`tensor` with the strides that tensors have between layers: images (N, C, H, W) have `memory_format`; and at an
    aligned address, like a receive buffer: kernels are also chosen by alignment, which a slice may lack."""
    strides = layout_strides(tensor.shape, memory_format)
    if tensor.stride() != strides:
        if tensor.dim() == 4 and memory_format is torch.channels_last:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        else:
            tensor = tensor.contiguous()
        # for a dimension of size 1 several strides mean the same memory, and kernels are chosen by strides
        tensor = tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)
    return _align(tensor)


def _align(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it if it begins at an address that a new allocation would not have."""
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % ALIGNED_BYTES else tensor


@lru_cache(maxsize=4096)
def layout_strides(shape: tuple[int, ...], memory_format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape; only a 4-D tensor can be channels last."""
    if len(shape) != 4:
        memory_format = torch.contiguous_format
    return torch.empty(shape, device="meta", memory_format=memory_format).stride()


def as_sent(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """A contiguous view of a tensor in `memory_format` (else a copy): strides are not sent, the receiver knows them."""
    if tensor.dim() == 4 and memory_format is torch.channels_last:
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def digest(tensors: Tensors) -> str:
    """A hash of the shapes, types and bits of tensors, whatever their device and layout, for comparing runs in
    different processes (law 1)."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        hasher.update(_bits(tensor).cpu().numpy().data)
    return hasher.hexdigest()


def same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on the same device have the same digest."""
    return tensor.dtype is other.dtype and tensor.shape == other.shape and torch.equal(_bits(tensor), _bits(other))


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A hash, int64 (), of a tensor's bits and their places, computed on its device without waiting for it, and with
    memory for `_HASHED` elements at most; -0.0 counts as 0.0."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(tensor.detach().contiguous().flatten().split(_HASHED)):
        words = (part + 0.0).view(torch.int16).to(torch.int64)
        places = torch.arange(len(words), device=tensor.device).add_(number << 20)
        words.add_(places.mul_(-0x61C8864680B583EB))  # odd constants of splitmix64 (Steele et al., 2014)
        for constant in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
            words.bitwise_xor_(words >> 29).mul_(constant)
        total += words.bitwise_xor_(words >> 32).sum()
    return total


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def split_all(batch: Tensors, sizes: Sequence[int]) -> tuple[Tensors, ...]:
    """Split a mini-batch of tensors, (N, ...) each, into micro-batches of `sizes` samples. Each is aligned, so that a
    layer that passes it on does not copy it, which would count it twice."""
    return tuple(zip(*(map(_align, tensor.split(list(sizes))) for tensor in batch), strict=True))
