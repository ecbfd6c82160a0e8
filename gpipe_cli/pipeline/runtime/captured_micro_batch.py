"""The captured graphs of a micro-batch in flight, ready to be replayed; `graph_capture.py` captures them."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import compress
from typing import NamedTuple, Protocol

import torch
from torch import nn

from gpipe_cli.pipeline.runtime.boundary import OptionalTensors, Tensors
from gpipe_cli.pipeline.runtime.deferred_batch_norm import BatchMoments
from gpipe_cli.pipeline.runtime.saved_activations import StorageBytes, storage_id
from gpipe_cli.pipeline.runtime.static_memory import Seeds, StaticMemory, copy_into


class CudaGraph(Protocol):
    """The kernels that were launched while the graph was captured."""

    def replay(self) -> None:
        """Launch them again, on the same memory."""


class CaptureKind(Enum):
    """What a micro-batch's graphs are for."""

    FORWARD = "a forward that keeps nothing"
    WHOLE = "a forward that keeps all, and B"
    SPLIT = "a forward that keeps all, I and W"


class CaptureKey(NamedTuple):
    """The micro-batches that the same graphs can serve."""

    kind: CaptureKind
    inputs: tuple[tuple[torch.Size, torch.dtype], ...]
    training: bool


@dataclass(eq=False)
class CapturedMicroBatch:
    """The graphs of a micro-batch in flight, with the tensors that they read and write in `memory`."""

    key: CaptureKey
    index: int  # of its pool
    memory: StaticMemory
    inputs: Tensors  # leaves of the autograd graph in training
    forward: CudaGraph
    outputs: Tensors  # overwritten by the stage's next forward
    requires_grad: Sequence[bool]  # whether each output requires a gradient
    receives_grad: Sequence[bool]  # whether each output gets it: not if nothing uses the output
    moments: BatchMoments  # of batch norms, written by the forward
    saved: StorageBytes  # what the forward keeps for the backward
    gradients: Tensors  # of the outputs that get them, read by `backward`
    input_gradients: OptionalTensors  # overwritten by the stage's next backward
    backward: CudaGraph | None = None  # B or I
    weights: CudaGraph | None = None  # W
    saved_for_w: tuple[StorageBytes, StorageBytes] | None = None  # in I: gradients that it keeps, and what W needs
    trained: Sequence[nn.Parameter] = ()  # parameters that get a gradient

    def replay_forward(self, inputs: Tensors, seeds: Seeds) -> None:
        copy_into(self.inputs, inputs)
        self.memory.seed(seeds)
        self.forward.replay()

    def replay_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Replay B or I, for the gradients of all outputs."""
        assert self.backward is not None
        copy_into(self.gradients, compress(gradients, self.receives_grad))
        self.memory.use_gradients(self.trained)
        self.backward.replay()

    def replay_weights(self) -> None:
        """Replay W."""
        assert self.weights is not None
        self.memory.use_gradients(self.trained)
        self.weights.replay()

    def uses(self, storage: torch.UntypedStorage) -> bool:
        tensors = (*self.inputs, *self.outputs, *self.gradients, *self.input_gradients)
        return any(tensor is not None and storage_id(tensor) == storage._cdata for tensor in tensors)
