"""What crosses the boundary between two layers: known from shapes alone, so that no step needs a handshake."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from gpipe_cli.pipeline.runtime.micro_batch import Tensors


@dataclass(frozen=True)
class BoundaryTensor:
    """One tensor that a layer hands to the next one: its shape for any micro-batch, and whether a gradient returns.

    Sentences of a mini-batch are padded to lengths that differ from one mini-batch to the next, so a dimension may grow
    with them too: `per_length[i]` says how each one does with length number i. `in_tuple`: the layer returns it in a
    tuple, and the next one gets it so, even if there is no other.
    """

    base: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool
    per_length: tuple[tuple[int, ...], ...] = ()
    in_tuple: bool = False

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
