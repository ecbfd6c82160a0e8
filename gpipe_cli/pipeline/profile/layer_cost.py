"""What a layer costs and what crosses its boundary, as values (paper section 2.1: the cost estimate c_i).

They come from shapes alone (`tracing.py`), so that every process arrives at the same figures without a handshake, and
hold for micro-batches of any size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gpipe_cli.pipeline.runtime.boundary import Boundary


@dataclass(frozen=True)
class Saved:
    """The memory that the backward of a layer needs, described so that no tensor counts twice where layers meet.

    `tensors` are positions among the tensors that come in, followed by those that go out; what else is saved is
    `base_bytes + per_sample_bytes * samples`, at the lengths that were traced. `same_memory` says of each output whose
    memory it is, as a position of that kind; None if it is new. Parameters and buffers are not counted.
    """

    tensors: tuple[int, ...] = ()
    base_bytes: int = 0
    per_sample_bytes: int = 0
    same_memory: tuple[int | None, ...] = ()

    def inside_bytes(self, samples: int) -> int:
        return self.base_bytes + self.per_sample_bytes * samples


class OperationKind(StrEnum):
    """Kernels by what their speed depends on: a device has a rate for each."""

    PRODUCT = "product"  # of matrices, attention among them
    CONVOLUTION = "convolution"
    NARROW = "narrow convolution"  # of fewer than 16 channels, which fill no vector register
    DEPTHWISE = "depthwise"  # a convolution of each channel alone
    NORMALIZATION = "normalization"
    POOLING = "pooling"
    RANDOM = "random"  # numbers drawn, as for dropout
    ELEMENTWISE = "elementwise"  # all others


@dataclass(slots=True)
class Operations:
    """Kernels of one kind: `count` for a micro-batch of any size, `flops * n` and `bytes * n + fixed_bytes` for one of
    n samples. A multiplication and an addition count as two; weights are fixed bytes."""

    count: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    fixed_bytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a layer does in one direction."""

    by_kind: Mapping[OperationKind, Operations] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Of one sample."""
        return sum(each.flops for each in self.by_kind.values())


@dataclass(frozen=True)
class LayerCost:
    """One layer. `trained` is how many of the parameters are; `saved` says what autograd keeps between forward and
    backward."""

    name: str
    parameters: int
    forward: Work
    backward: Work
    outputs: Boundary
    trained: int = 0
    saved: Saved = field(default_factory=Saved)

    @property
    def flops(self) -> float:
        """Of one sample, forward and backward."""
        return self.forward.flops + self.backward.flops
