"""The process groups of a run, and how its processes connect."""

import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
import torch.distributed as dist

from gpipe_cli.distributed.control_group import BlockedOn, BlockedOnContext, ControlGroup
from gpipe_cli.distributed.rendezvous import store
from gpipe_cli.pipeline.runtime.link import Edge, GlooLink, GroupLink, Links
from gpipe_cli.pipeline.runtime.tied_weights import Group
from gpipe_cli.schedule.schedule import Kind
from gpipe_cli.system.accelerator import is_accelerator

# The processes that read data may prepare it for long (learn a vocabulary, fetch a data set) while the others wait.
# Should a process die meanwhile, the supervisor ends the rest.
_PREPARATION_TIMEOUT = datetime.timedelta(days=1)
_EXTRA_TIMEOUT_SECONDS = 10.0  # added to the timeout under torchrun
# Thread blocks of a GPU that a waiting send or receive occupies at most. Sums over replicas hardly wait, and get as
# many as NCCL chooses: four would use a quarter of NVLink.
_LINK_BLOCKS = 4


@dataclass(frozen=True)
class ProcessGroups:
    """The links of this process to neighbouring stages, each a group of two, and the groups of its replicas. They hold
    nothing of an engine, as a process may build several engines on them."""

    links: Links
    # the processes with the same stages, for each of their devices; empty without replicas
    replicas: Mapping[torch.device, dist.ProcessGroup] = field(default_factory=dict)
    tied: Mapping[Group, dist.ProcessGroup] = field(default_factory=dict)  # the processes with the same tied weights

    def for_cut(
        self,
        rank: int,
        rank_of_stage: Sequence[int],
        device: torch.device,
        stages_of_ties: Sequence[Sequence[int]],
        skips: Sequence[tuple[int, int]],
    ) -> "ProcessGroups":
        """These groups, with what only some cuts need: links for skips, and groups for tied weights. To be called in
        all processes, as all of them must create all groups in the same order.

        `stages_of_ties`: for each tied weight, the stages that have it; `skips`: pairs of stages, not neighbours, of
        which the first sends a skip to the second.
        """
        timeout = datetime.timedelta(seconds=self.links.timeout_seconds)
        first_of_replicas = range(0, dist.get_world_size(), 1 + max(rank_of_stage))
        links = {**self.links.by_edge}
        for first in first_of_replicas:
            links |= edge_links(rank, [first + owner for owner in rank_of_stage], sorted(skips), device, timeout)
        tied: dict[Group, dist.ProcessGroup] = {}
        for members in sorted({tuple(sorted({rank_of_stage[k] for k in stages})) for stages in stages_of_ties}):
            for first in first_of_replicas if len(members) > 1 else ():
                group = new_group(rank, [first + member for member in members], device, timeout, blocks=_LINK_BLOCKS)
                tied |= {} if group is None else {members: group}
        return replace(self, links=replace(self.links, by_edge=links), tied=tied)

    def close(self) -> None:
        """Destroy all groups, in which nothing may be in flight."""
        for link in self.links.by_edge.values():
            link.close()
        for group in (*self.replicas.values(), *self.tied.values()):
            dist.destroy_process_group(group)


def is_connected() -> bool:
    """Whether this process has a process group of all processes: from an earlier call, or made by the program."""
    return dist.is_initialized()


def connect_processes(
    rank: int,
    rank_of_stage: Sequence[int],
    replicas: int,
    devices: Sequence[torch.device],
    rendezvous: str,
    timeout_seconds: float,
    blocked_on: BlockedOnContext,
    *,
    is_local: bool,
) -> tuple[ControlGroup, ProcessGroups | None]:
    """Connect the processes of the run; this process computes on `devices`, of which only the process of a whole
    pipeline may have several. A run of a single process needs no connection.

    `rank_of_stage`: the process of each stage of a pipeline; each of the `replicas` has as many processes. `is_local`:
    this command has started all processes, and `rendezvous` is a file; under torchrun it is the name of this start.
    If the processes are connected already, as in a program that makes several pipelines, only groups are added.
    """
    pipeline_processes = 1 + max(rank_of_stage)
    processes = pipeline_processes * replicas
    if processes == 1:
        return ControlGroup(0, 1, blocked_on=blocked_on), None
    # A supervisor sees which process of this machine is silent, and ends the run. Under torchrun the silent process may
    # be another supervisor's: waiting for longer than its timeout lets that supervisor report first.
    timeout = _PREPARATION_TIMEOUT if is_local else datetime.timedelta(seconds=timeout_seconds + _EXTRA_TIMEOUT_SECONDS)
    device = devices[0]
    if is_local:
        # the loopback device always exists; the host name may resolve to an unreachable address
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    if not is_connected():
        # Keys get the name of this start as a prefix: torchrun's store also holds the addresses of earlier starts.
        run_store = dist.FileStore(rendezvous, processes) if is_local else dist.PrefixStore(rendezvous, store())
        dist.init_process_group("gloo", store=run_store, rank=rank, world_size=processes, timeout=_PREPARATION_TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(control, dist.ProcessGroup)
    links: dict[Edge, GroupLink] = {}
    for replica in range(replicas):
        owners = [replica * pipeline_processes + owner for owner in rank_of_stage]
        neighbours = [(stage, stage + 1) for stage in range(len(owners) - 1)]
        links |= edge_links(rank, owners, neighbours, device, timeout)
    blocked_on_peers = partial(blocked_on, BlockedOn.PROCESS)
    group_of_device: dict[torch.device, dist.ProcessGroup] = {}
    for place, replicated in product(range(pipeline_processes if replicas > 1 else 0), devices):
        group = new_group(rank, range(place, processes, pipeline_processes), replicated, timeout)
        group_of_device |= {} if group is None else {replicated: group}
    groups = ProcessGroups(Links(links, timeout.total_seconds(), timeout_seconds, blocked_on_peers), group_of_device)
    return ControlGroup(rank, processes, control, blocked_on), groups


def edge_links(
    rank: int,
    rank_of_stage: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    device: torch.device,
    timeout: datetime.timedelta,
) -> dict[Edge, GroupLink]:
    """A link in each direction between the two stages of each pair, for pairs with a single stage in this process. To
    be called in all processes, as `for_cut`."""
    forward = [(Kind.F, sender, receiver) for sender, receiver in pairs]
    backward = [(Kind.B, receiver, sender) for _, sender, receiver in forward]
    links: dict[Edge, GroupLink] = {}
    for kind, sender, receiver in forward + backward:
        ends = (rank_of_stage[sender], rank_of_stage[receiver])
        if ends[0] == ends[1]:
            continue
        group = new_group(rank, ends, device, timeout, blocks=_LINK_BLOCKS)
        if group is not None:
            kind_of_link = GroupLink if is_accelerator(device) else GlooLink
            links[kind, sender, receiver] = kind_of_link(group, ends[0] if rank == ends[1] else ends[1])
    return links


def new_group(
    rank: int, members: Sequence[int], device: torch.device, timeout: datetime.timedelta, blocks: int | None = None
) -> dist.ProcessGroup | None:
    """A group for tensors of the model, NCCL's on GPUs; None if this process is not a member. To be called in all
    processes. `blocks`: the most thread blocks of a GPU that an operation may occupy, which limits its channels."""
    backend = dist.get_default_backend_for_device(device)
    options = None
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()  # not shared: each group writes its name into them
        options._timeout = timeout
        if blocks is not None:
            options.config.max_ctas = blocks
    # bind NCCL's group to this device; torch would derive a device from the rank
    bound = device if is_accelerator(device) and rank in members else None
    group = dist.new_group(list(members), timeout, backend, options, device_id=bound)
    return group if isinstance(group, dist.ProcessGroup) and rank in members else None
