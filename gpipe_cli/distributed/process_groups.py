"""The process groups of a run, and how its processes connect."""

import datetime
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from gpipe_cli.distributed.control_group import Awaited, ControlGroup, Waits
from gpipe_cli.distributed.rendezvous import store
from gpipe_cli.distributed.torchrun import torchrun

# The stages that read data may prepare it for long (a vocabulary is learned, a data set fetched) while those in between
# wait for them. Should one of them die, the parent ends the others.
_PREPARING = datetime.timedelta(days=1)
_LONGER_SECONDS = 10.0


@dataclass(frozen=True)
class ProcessGroups:
    """One process group per direction, and one on the CPU for what is not tensors of the model.

    Inside of `waits` a process waits for another one, for `timeout_seconds` at most.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    control: dist.ProcessGroup
    timeout_seconds: float
    waits: Callable[[], AbstractContextManager[object]] = nullcontext


def connect_processes(
    process: int, processes: int, device: torch.device, rendezvous: str, timeout_seconds: float, waits: Waits
) -> tuple[ControlGroup, ProcessGroups | None]:
    """Connect the processes of the run, this one of which computes on `device`; one on its own needs no connection.

    `rendezvous` is a file where all are on this machine and, under torchrun, the name of this start.
    """
    if processes == 1:
        return ControlGroup(0, 1, waits=waits), None
    # The parent sees all processes of this machine, and which of them is silent. On other machines there may be one
    # that it does not see; that one's own parent is to report first.
    here = torchrun() is None
    timeout = _PREPARING if here else datetime.timedelta(seconds=timeout_seconds + _LONGER_SECONDS)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif here:
        # all on this machine: the loopback device is always there, a host name may resolve to nothing reachable
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    # With keys of this start alone: torchrun's store has the addresses of processes that it has started before, too.
    own_store = dist.FileStore(rendezvous, processes) if here else dist.PrefixStore(rendezvous, store())
    dist.init_process_group("gloo", store=own_store, rank=process, world_size=processes, timeout=_PREPARING)
    backend = "nccl" if device.type == "cuda" else "gloo"
    control = dist.new_group(backend="gloo", timeout=timeout)
    forward, backward = (dist.new_group(backend=backend, timeout=timeout) for _ in range(2))
    assert isinstance(control, dist.ProcessGroup)
    assert isinstance(forward, dist.ProcessGroup)
    assert isinstance(backward, dist.ProcessGroup)
    groups = ProcessGroups(forward, backward, control, timeout.total_seconds(), partial(waits, Awaited.PROCESS))
    return ControlGroup(process, processes, control, waits), groups
