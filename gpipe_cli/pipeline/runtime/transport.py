"""How tensors get from stage to stage: what a transport does, and the one inside a process (`p2p_transport.py` has the
one between processes).

Schedules do not write communication down (paper section 2.2: primitives are inserted at the boundaries): an F receives
what the F on the stage before returned, a B what the B on the next stage returned.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import torch

from gpipe_cli.pipeline.schedule.schedules import Action, Kind, Schedule

OptionalTensors: TypeAlias = tuple[torch.Tensor | None, ...]
"""What travels: outputs of a stage, all of them tensors, or gradients, None for a tensor that needs none."""


class PeerLostError(RuntimeError):
    """The process at the other end has died or does not answer: the cause is to be looked for there."""


class Transport(Protocol):
    """Moves the results of actions between the stages of this process and their neighbours."""

    def begin_step(self, schedule: Schedule, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        """Before the first action; `sizes` are the samples of each micro-batch, `lengths` those of sentences."""

    def send(self, action: Action, tensors: OptionalTensors) -> None:
        """Outputs of an F to the next stage, gradients of a B to the stage before."""

    def receive(self, action: Action) -> OptionalTensors:
        """What `action` needs from a neighbour: an F the outputs of the stage before, a B gradients from the next."""

    def release(self, stage: int, micro_batch: int) -> None:
        """Stage `stage` will not look at the inputs of this micro-batch again."""

    def finish_step(self) -> None:
        """After the last action: everything has been received. What was sent may still be on its way."""

    def settle(self) -> None:
        """Wait until everything that was sent has left: before the transport is given up."""


class LocalTransport:
    """All stages in one process: one device, or several driven by asynchronous launches."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._sent: dict[Action, OptionalTensors] = {}  # by the action that will receive it

    def begin_step(self, schedule: Schedule, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        self._sent.clear()  # whatever a failed step left

    def send(self, action: Action, tensors: OptionalTensors) -> None:
        receiver = action.stage + 1 if action.kind is Kind.F else action.stage - 1
        device = self._devices[receiver]
        moved = tuple(None if t is None else t.detach().to(device, non_blocking=True) for t in tensors)
        self._sent[Action(action.kind, receiver, action.micro_batch)] = moved

    def receive(self, action: Action) -> OptionalTensors:
        return self._sent.pop(action)

    def release(self, stage: int, micro_batch: int) -> None:
        pass

    def finish_step(self) -> None:
        assert not self._sent, f"never received: {[str(action) for action in self._sent]}"

    def settle(self) -> None:
        pass
