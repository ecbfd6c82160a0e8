"""A transport moves tensors between stages: inside one process here, between processes in `p2p_transport.py`.

Schedules do not list communication (paper section 2.2: primitives are inserted at the boundaries): an F receives
what the F on the previous stage returned, a B what the B on the next stage returned.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

import torch

from gpipe_cli.pipeline.runtime.boundary import OptionalTensors
from gpipe_cli.pipeline.runtime.routes import Boundaries, Routes
from gpipe_cli.schedule.schedule import Action, Schedule
from gpipe_cli.system.accelerator import current_stream, is_accelerator, new_stream, on_stream, record_use


class PeerLostError(RuntimeError):
    """The process at the other end has died or does not answer; the cause is there."""


@contextmanager
def waiting_for_peers(waits: AbstractContextManager[object], failure: str, hint: str = "") -> Iterator[None]:
    """Around code that waits for other processes; enters `waits`. A RuntimeError of torch there is a consequence of
    another process's failure: it becomes a PeerLostError that begins with `failure` and ends with `hint`."""
    try:
        with waits:
            yield
    except RuntimeError as error:
        raise PeerLostError(f"{failure}: {error}{hint}") from error


class Transport(Protocol):
    """Moves the results of actions between the stages of this process and their neighbours."""

    def begin_step(self, schedule: Schedule, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        """Called before the first action; `sizes`: samples per micro-batch, `lengths`: what sentences are padded to."""

    def send(self, action: Action, tensors: OptionalTensors) -> None:
        """Send a stage's outputs after an F, or the gradients of its inputs after a B or I, each to its stage."""

    def receive(self, action: Action) -> OptionalTensors:
        """What `action` needs: for an F the stage's inputs, for a B or I the gradients of its outputs."""

    def after_action(self) -> None:
        """Called after each action of this process is launched; on a GPU it may still be running."""

    def finish_step(self) -> None:
        """Called after the last action: everything has been received; sends may still be in flight."""

    def drain_sends(self) -> None:
        """Wait until everything sent has left this process; called before the transport is discarded."""


class LocalTransport:
    """Moves tensors inside a process, on a single device or between several GPUs with asynchronous launches.

    Copies between GPUs run on separate streams at both ends: on the compute streams they would wait for kernels that
    the sender has launched since, and block the receiver before it needs the tensors.
    """

    def __init__(self, devices: Sequence[torch.device], boundaries: Boundaries) -> None:
        self._devices, self._boundaries = devices, boundaries
        self._routes = Routes()
        several = set(filter(is_accelerator, devices)) if len(set(devices)) > 1 else set()
        self._copying = {device: new_stream(device) for device in several}
        # by the receiving F or B (B also stands for I), and the stage that sends
        self._sent: dict[tuple[Action, int], OptionalTensors] = {}
        self._copied: dict[tuple[Action, int], torch.Event] = {}

    def begin_step(self, schedule: Schedule, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        self._sent.clear()  # a failed step may have left tensors, and events
        self._copied.clear()
        self._routes = self._boundaries.routes(schedule)

    def send(self, action: Action, tensors: OptionalTensors) -> None:
        for receiver, routed in self._routes.outgoing(action, tensors):
            self.send_to(receiver, action, routed)

    def send_to(self, receiver: int, action: Action, tensors: OptionalTensors) -> None:
        """Send results of an action to stage `receiver`."""
        awaiting = Action(action.kind.direction, receiver, action.micro_batch), action.stage
        from_device, to_device = self._devices[action.stage], self._devices[receiver]
        if from_device == to_device:
            self._sent[awaiting] = tuple(None if t is None else t.detach() for t in tensors)
            return
        source, target = self._copying[from_device], self._copying[to_device]
        source.wait_stream(current_stream(from_device))
        with on_stream(source), on_stream(target):
            moved = tuple(None if t is None else t.detach().to(to_device, non_blocking=True) for t in tensors)
        for tensor, copy in zip(tensors, moved, strict=True):
            if tensor is not None and copy is not None:  # do not reuse either's memory before the other stream is done
                record_use(tensor, source)
                record_use(copy, current_stream(to_device))
        self._sent[awaiting] = moved
        self._copied[awaiting] = target.record_event()

    def receive(self, action: Action) -> OptionalTensors:
        return self._routes.incoming(action, partial(self.receive_from, action))

    def receive_from(self, action: Action, sender: int) -> OptionalTensors:
        """What stage `sender` has sent for an action."""
        awaited = Action(action.kind.direction, action.stage, action.micro_batch), sender
        if (copied := self._copied.pop(awaited, None)) is not None:
            current_stream(self._devices[action.stage]).wait_event(copied)
        return self._sent.pop(awaited)

    def after_action(self) -> None:
        pass

    def finish_step(self) -> None:
        assert not self._sent, f"never received: {[str(action) for action, _ in self._sent]}"

    def drain_sends(self) -> None:
        pass
