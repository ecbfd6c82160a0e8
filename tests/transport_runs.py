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
TIMEOUT = 120.0  # of the transport; the tests below wait less long


def activation(m: int) -> tuple[torch.Tensor, ...]:
    image = torch.arange(SIZES[m] * 18.0).reshape(SIZES[m], 2, 3, 3).to(memory_format=torch.channels_last)
    return image + 100 * m, torch.arange(SIZES[m]) + 10 * m


def neighbour(rank: int, how: str, folder: Path, connection: Connection) -> None:
    """Stage `rank` of two. Process 1 dies where `how` says; process 0 tells what it met."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    groups = dist.new_group(), dist.new_group()
    try:
        links = P2PTransport(
            rank, [BOUNDARY], ranks=range(2), forward=groups[0], backward=groups[1], device=CPU,
            memory_format=torch.channels_last, timeout_seconds=TIMEOUT,
        )  # fmt: skip
        links.begin_step(build("gpipe", 2, 2, "never"), SIZES)
        team = ControlGroup(rank, 2, dist.group.WORLD)
        if rank == 1 and how != "well":
            connection.recv()  # until the other one waits
            os._exit(9)
        if how in ("gather", "barrier", "collect"):
            connection.send("waiting")
            _ = {"gather": lambda: team.gather(torch.zeros(2)).wait(), "barrier": team.barrier,
                 "collect": lambda: team.collect(1)}[how]()  # fmt: skip
        elif rank == 0:
            for m in range(2):
                links.send(Action(Kind.F, 0, m), activation(m))
            connection.send("waiting")
            received = [links.receive(Action(Kind.B, 0, m)) for m in (1, 0)]
            links.finish_step()
            links.settle()
            assert [gradients[1] for gradients in received] == [None, None]
            values = [gradients[0].clone(memory_format=torch.contiguous_format).numpy() for gradients in received]
            assert all(g[0].is_contiguous(memory_format=torch.channels_last) for g in received)
            connection.send(values)
        else:
            for m in range(2):
                for one, other in zip(links.receive(Action(Kind.F, 1, m)), activation(m), strict=True):
                    assert one.dtype == other.dtype
                    assert torch.equal(one, other)
            for m in (1, 0):
                links.send(Action(Kind.B, 1, m), (-activation(m)[0], None))
                links.release(1, m)
            links.finish_step()
            links.settle()
    except Exception as error:
        connection.send(error if isinstance(error, PeerLostError) else repr(error))
        os._exit(0)
    if how == "well":
        dist.barrier()
    os._exit(0)
