"""How tensors get from stage to stage: what a transport does, and the one inside a process.

The one between processes is `p2p_transport.py`.

Communication is never written down (paper section 2.2: primitives are inserted at the boundaries): an F on a later
stage receives what the F before it returned, a B the other way round.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from gpipe_cli.pipeline.runtime.micro_batch import Tensors
from gpipe_cli.pipeline.schedule.schedules import Kind, Schedule

Gradients = tuple[torch.Tensor | None, ...]


class PeerLostError(RuntimeError):
    """The process at the other end is gone or silent: a consequence of a failure somewhere else, rarely its cause."""


class Transport(Protocol):
    """Moves the outputs and gradients of micro-batch m over the boundaries of the stages of this process."""

    def begin_step(self, schedule: Schedule, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        """Before the first action; `sizes` are the samples of each micro-batch, `lengths` those of sentences."""

    def send_forward(self, stage: int, micro_batch: int, outputs: Tensors) -> None: ...

    def receive_forward(self, stage: int, micro_batch: int) -> Tensors: ...

    def send_backward(self, stage: int, micro_batch: int, gradients: Gradients) -> None: ...

    def receive_backward(self, stage: int, micro_batch: int) -> Gradients: ...

    def release(self, stage: int, micro_batch: int) -> None:
        """Stage `stage` will not look at the inputs of micro-batch m again."""

    def finish_step(self) -> None:
        """After the last action: everything has been received. What was sent may still be on its way."""

    def settle(self) -> None:
        """Wait until everything that was sent has left: before the transport is given up."""


class LocalTransport:
    """All stages in one process: one device, or several driven by asynchronous launches."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._waiting: dict[tuple[Kind, int, int], Gradients] = {}

    def begin_step(self, schedule: Schedule, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        self._waiting.clear()  # whatever a failed step left

    def send_forward(self, stage: int, micro_batch: int, outputs: Tensors) -> None:
        self._waiting[Kind.F, stage + 1, micro_batch] = self._moved(outputs, stage + 1)

    def receive_forward(self, stage: int, micro_batch: int) -> Tensors:
        received = self._waiting.pop((Kind.F, stage, micro_batch))
        return tuple(tensor for tensor in received if tensor is not None)

    def send_backward(self, stage: int, micro_batch: int, gradients: Gradients) -> None:
        self._waiting[Kind.B, stage - 1, micro_batch] = self._moved(gradients, stage - 1)

    def receive_backward(self, stage: int, micro_batch: int) -> Gradients:
        return self._waiting.pop((Kind.B, stage, micro_batch))

    def release(self, stage: int, micro_batch: int) -> None:
        pass

    def finish_step(self) -> None:
        assert not self._waiting, f"never received: {sorted(self._waiting)}"

    def settle(self) -> None:
        pass

    def _moved(self, tensors: Gradients, stage: int) -> Gradients:
        device = self._devices[stage]
        return tuple(None if t is None else t.detach().to(device, non_blocking=True) for t in tensors)
