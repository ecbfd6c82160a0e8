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
BOUNDARY = (BoundaryTensor((0, 2), (1, 0), torch.float32, True),)
SIZES = (3, 2)
TIMEOUT = 120.0  # of the transport; the test waits less long


def neighbour(rank: int, folder: Path, connection: Connection) -> None:
    """Stage `rank` of two: process 1 dies while process 0 waits for it, which reports what each of its waits raised."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    groups = dist.new_group(), dist.new_group()
    try:
        transport = P2PTransport(
            rank, [BOUNDARY], ranks=range(2), forward=groups[0], backward=groups[1], device=CPU,
            memory_format=torch.contiguous_format, timeout_seconds=TIMEOUT,
        )  # fmt: skip
        control = ControlGroup(rank, 2, dist.group.WORLD)
        schedule = build("gpipe", 2, 2, "never")
        if rank == 1:
            connection.recv()  # until the other one waits
            os._exit(9)
        transport.begin_step(schedule, SIZES)
        connection.send("waiting")
        for wait in (
            lambda: transport.receive(Action(Kind.B, 0, 1)),
            lambda: control.gather(torch.zeros(2))(),
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
