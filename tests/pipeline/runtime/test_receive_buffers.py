"""A buffer is not received into before what was handed on out of it has left."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch

from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor, in_layout
from gpipe_cli.pipeline.runtime.link import Links
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.routes import Boundaries
from gpipe_cli.pipeline.schedule.named_schedules import forward_only
from gpipe_cli.pipeline.schedule.schedule import Action, Kind


@dataclass
class Message:
    """One that leaves when it is waited for."""

    tensors: Sequence[torch.Tensor]
    left: bool = False

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        self.left = True

    def is_completed(self) -> bool:
        return self.left


@dataclass
class SlowLink:
    peer: int
    sent: list[Message] = field(default_factory=list)
    received: int = 0

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Message]:
        self.sent.append(Message(tensors))
        return self.sent[-1:]

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Message]:
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for message in self.sent:
            assert message.left or memory.isdisjoint(t.untyped_storage().data_ptr() for t in message.tensors)
        self.received += 1
        for tensor in tensors:
            tensor.fill_(self.received)
        return [Message(tensors, left=True)]


def test_a_part_of_the_input_that_is_handed_on_has_left_before_the_next_input_comes() -> None:
    """Only a tensor that begins where the buffer does was waited for: the second half of the channels was received
    over while it was being sent, in evaluation, where nothing else holds the sender back."""
    before, after = SlowLink(0), SlowLink(2)
    before.sent = after.sent  # so that receives look at what is sent on

    def boundary(channels: int) -> tuple[BoundaryTensor, ...]:
        return (BoundaryTensor((0, channels, 8, 8), (1, 0, 0, 0), torch.float32, True),)

    boundaries = [boundary(4), boundary(2)]
    transport = P2PTransport(
        1, (0, 1, 2), Links({(Kind.F, 0, 1): before, (Kind.F, 1, 2): after}, 1, 1), Boundaries(boundaries, boundaries),
        torch.device("cpu"), early=False,
    )  # fmt: skip
    transport.begin_step(forward_only(3, 4), [1] * 4)
    for m in range(4):
        action = Action(Kind.F, 1, m)
        (received,) = transport.receive(action)
        assert received is not None
        assert received.storage_offset() == 0, "as aligned as a tensor that a layer made"
        transport.send(action, (in_layout(received.chunk(2, dim=1)[1], torch.contiguous_format),))
        transport.launched()
    assert [message.left for message in after.sent[1:]] == [True, True, False, False]
