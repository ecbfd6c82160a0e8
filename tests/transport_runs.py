"""Two neighbouring processes for the tests of the transport, in a module that the children can import by name."""

import os
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.transport import PeerLostError
from gpipe_cli.pipeline.schedule.schedules import Action, Kind, build

CPU = torch.device("cpu")
BOUNDARY = (
    BoundaryTensor((0, 2, 3, 3), (1, 0, 0, 0), torch.float32, True),
    BoundaryTensor((0,), (1,), torch.int64, False),
)
SIZES = (3, 2)
TIMEOUT = 120.0  # of the transport; the test waits less long


def activation(m: int) -> tuple[torch.Tensor, ...]:
    image = torch.arange(SIZES[m] * 18.0).reshape(SIZES[m], 2, 3, 3).to(memory_format=torch.channels_last)
    return image + 100 * m, torch.arange(SIZES[m]) + 10 * m


def neighbour(rank: int, folder: Path, connection: Connection) -> None:
    """Stage `rank` of two: a step that goes well, then one in which process 1 dies; process 0 reports both."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    groups = dist.new_group(), dist.new_group()
    try:
        transport = P2PTransport(
            rank, [BOUNDARY], ranks=range(2), forward=groups[0], backward=groups[1], device=CPU,
            memory_format=torch.channels_last, timeout_seconds=TIMEOUT,
        )  # fmt: skip
        control = ControlGroup(rank, 2, dist.group.WORLD)
        schedule = build("gpipe", 2, 2, "never")
        transport.begin_step(schedule, SIZES)
        if rank == 0:
            for m in range(2):
                transport.send(Action(Kind.F, 0, m), activation(m))
            received = [transport.receive(Action(Kind.B, 0, m)) for m in (1, 0)]
            assert [gradients[1] for gradients in received] == [None, None]
            images = [gradients[0] for gradients in received if gradients[0] is not None]
            assert all(image.is_contiguous(memory_format=torch.channels_last) for image in images)
            connection.send([image.clone(memory_format=torch.contiguous_format).numpy() for image in images])
        else:
            for m in range(2):
                for one, other in zip(transport.receive(Action(Kind.F, 1, m)), activation(m), strict=True):
                    assert one is not None
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other)
            for m in (1, 0):
                transport.send(Action(Kind.B, 1, m), (-activation(m)[0], None))
                transport.release(1, m)
        transport.finish_step()
        transport.settle()

        if rank == 1:
            connection.recv()  # until the other one waits
            os._exit(9)
        transport.begin_step(schedule, SIZES)
        connection.send("waiting")
        for wait in (
            lambda: transport.receive(Action(Kind.B, 0, 1)),
            lambda: control.gather(torch.zeros(2)).wait(),
            control.barrier,
            lambda: control.collect(1),
        ):
            try:
                wait()
            except PeerLostError as error:
                connection.send(error)
    except Exception as error:
        connection.send(repr(error))
    os._exit(0)
