"""What a `Pipeline` is put together from: its arguments, where its stages live, how they are cut, and the executor."""

import copy
import datetime
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import nn

from gpipe_cli.config.settings import load_hardware
from gpipe_cli.config.typed import Count, RefusedError, Within, with_type
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups, connect_processes, groups_of_cut, is_connected
from gpipe_cli.distributed.rendezvous import Decision, agree
from gpipe_cli.distributed.torchrun import Torchrun
from gpipe_cli.models.custom import fault_of
from gpipe_cli.pipeline.profile.layer_cost import LayerCost
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor, Tensors
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.routes import Boundaries, inputs_of
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.tied_weights import Tie, TiedWeights, here, share_memory
from gpipe_cli.pipeline.runtime.transport import LocalTransport, Transport
from gpipe_cli.pipeline.schedule.named_schedules import ORDERS, SCHEDULES
from gpipe_cli.pipeline.schedule.partitioner import NoCutFitsError, partition
from gpipe_cli.pipeline.schedule.placement import place as schedule_placement
from gpipe_cli.pipeline.schedule.schedule import RecomputeMode
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.device_rates import rates_of_sheet
from gpipe_cli.planner.shared_layers import Shared, find_read, keeping_together
from gpipe_cli.system.accelerator import TYPE, number_of_devices
from gpipe_cli.units import plural

_TIMEOUT_SECONDS = 600.0  # for a message of another process


@dataclass(frozen=True)
class Arguments:
    """The arguments of `Pipeline` that are plain values."""

    partitions: Count
    micro_batches: Count
    schedule: Literal[SCHEDULES]  # type: ignore[valid-type]
    recompute: RecomputeMode
    balance: tuple[Count, ...] | None
    devices: tuple[str, ...] | None
    seed: Annotated[int, Within(0, 2**32 - 1)]


@dataclass(frozen=True)
class Placement:
    """Where the K stages live: each at one of P places, which are processes of torchrun, or devices of this one."""

    started: Torchrun | None  # this process, if torchrun started it
    place_of_stage: tuple[int, ...]
    device_of_stage: tuple[torch.device, ...]  # under torchrun, known for the stages of this process only

    @property
    def places(self) -> int:
        return 1 + max(self.place_of_stage)

    @property
    def process(self) -> int:
        return 0 if self.started is None else self.started.rank

    @property
    def process_of_stage(self) -> tuple[int, ...]:
        return self.place_of_stage if self.started is not None else (0,) * len(self.place_of_stage)

    @property
    def here(self) -> tuple[int, ...]:
        """The stages of this process."""
        return tuple(stage for stage, process in enumerate(self.process_of_stage) if process == self.process)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices of this process, each once."""
        return tuple(dict.fromkeys(self.device_of_stage[stage] for stage in self.here))


def place(arguments: Arguments, started: Torchrun | None) -> Placement:
    """Neighbouring stages share a place, or take turns for a looped schedule. Raises RefusedError for devices that are
    not here, and for partitions that cannot be placed."""
    partitions, gpus = arguments.partitions, number_of_devices()
    if arguments.devices is None:
        devices = [f"{TYPE}:{number}" for number in range(gpus)] or ["cpu"]
        if gpus and started is not None:
            # a launcher may show each process its own GPU only
            if gpus < started.here and not (gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ):
                why = f"{plural(started.here, 'process')} need a GPU each, and there are {gpus}"
                raise RefusedError("devices", None, f"{why}; start fewer, or give devices=['cpu']")
            devices = [devices[started.local_rank % gpus]]
    else:
        devices = [_known_device(name, gpus) for name in arguments.devices]
        if "cpu" in devices and {*devices} != {"cpu"}:
            raise RefusedError("devices", devices, "has the CPU beside GPUs; give one kind")
    places, what = len(devices), "device"
    if started is not None:
        places, what = started.processes, "process"
        if len(devices) != 1:
            raise RefusedError("devices", devices, "under torchrun a process has one device; give this process's own")
    if places > partitions and (started is not None or arguments.devices is not None):
        why = f"there are {plural(places, what)}, and each needs a stage"
        raise RefusedError("partitions", partitions, f"{why}; use partitions={places} or more")
    order = ORDERS[arguments.schedule]
    placement, in_v = order.placement or "neighbours", order.devices(partitions)
    places = min(places, partitions)
    if placement == "v" and started is None and arguments.devices is None:
        places = min(places, in_v)
    if placement == "v" and places not in (1, in_v):
        why = f"schedule={arguments.schedule}: there are {plural(places, what)}, and each has two stages"
        raise RefusedError("partitions", partitions, f"{why}; use partitions={2 * places}")
    if placement == "looped" and partitions % places:
        why = f"schedule={arguments.schedule}: {plural(places, what)} would have different numbers of stages"
        raise RefusedError("partitions", partitions, f"{why}; use partitions={-(-partitions // places) * places}")
    place_of_stage = schedule_placement(placement, partitions, places)
    return Placement(started, place_of_stage, tuple(torch.device(devices[at % len(devices)]) for at in place_of_stage))


def _known_device(name: str, gpus: int) -> str:
    here = ["cpu", *(f"{TYPE}:{number}" for number in range(gpus))]
    name = f"{TYPE}:0" if name == TYPE else name
    if name not in here:
        raise RefusedError("devices", [name], f"there is no such device here; there are {', '.join(here)}")
    return name


def connect(placement: Placement) -> tuple[ControlGroup, ProcessGroups | None]:
    """Connect the processes that torchrun has started. A process group that the program has made itself is used."""
    if placement.started is None:
        return ControlGroup(0, 1), None
    start = "" if is_connected() else agree(lambda: Decision(Path.cwd(), None, None)).start
    return connect_processes(
        placement.process, placement.process_of_stage, 1, placement.devices, start, _TIMEOUT_SECONDS, nullcontext,
        here=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Ties:
    """The tied weights of the whole model, and for each the stages of its uses."""

    of: Sequence[Tie]
    stages: Sequence[Sequence[int]]


def connect_cut(
    placement: Placement, groups: ProcessGroups | None, ties: Ties, skips: Sequence[tuple[int, int]]
) -> ProcessGroups | None:
    """Add to the groups what a cut needs for tied weights and skips, as in `groups_of_cut`."""
    if groups is None:
        return None
    timeout = datetime.timedelta(seconds=groups.links.timeout_seconds)
    far, tied = groups_of_cut(
        placement.process, placement.process_of_stage, placement.devices[0], timeout, ties.stages, skips
    )
    return replace(groups, links=replace(groups.links, of_edge={**groups.links.of_edge, **far}), tied=tied)


def move(module: nn.Sequential, devices: Mapping[str, torch.device], ties: Sequence[Tie]) -> None:
    """Move layers to their devices, by name. Where several have the same weight, the first one keeps the parameter; the
    others get parameters of their own, in the same memory on the same device."""
    share_memory(module, ties)
    for name, layer in module.named_children():
        layer.to(devices[name])
    for used in (here(tie, module) for tie in ties):
        first: dict[torch.device, nn.Parameter] = {}
        for names in used:  # a move has separated those that went to another device
            own = module.get_parameter(names[0])
            own.data = first.setdefault(own.device, own).data


def as_sequential(layers: nn.Sequential | Iterable[nn.Module]) -> nn.Sequential:
    """The layers as an nn.Sequential. Raises InputError if they cannot be a pipeline, or have no values."""
    if not isinstance(layers, nn.Module):
        layers = list(layers) if isinstance(layers, Iterable) else [layers]
        if strange := [type(one).__name__ for one in layers if not isinstance(one, nn.Module)]:
            raise RefusedError("layers", strange[0], "is no module; give an nn.Sequential, or a list of modules")
        layers = nn.Sequential(*layers)
    if fault := fault_of(layers):
        raise RefusedError("layers", type(layers).__name__, fault)
    assert isinstance(layers, nn.Sequential)
    for name, tensor in (*layers.named_parameters(), *layers.named_buffers()):
        if tensor.is_meta:
            raise RefusedError("layers", name, "has no values; build the layers on the CPU")
    return layers


def copied(layers: nn.Sequential, tensor: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    """The same modules as objects of their own, with `tensor(each)` in the place of each parameter and buffer. Raises
    RefusedError for modules that cannot be copied."""
    replaced = {id(own): tensor(own) for own in (*layers.parameters(), *layers.buffers())}
    try:
        return copy.deepcopy(layers, replaced)
    except (RuntimeError, TypeError) as error:  # of a tensor with a graph, and of what cannot be pickled
        why = f"cannot be copied ({with_type(error)}); keep such objects out of the layers"
        raise RefusedError("layers", type(layers).__name__, why) from error


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer on the meta device."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def described(inputs: Tensors) -> Boundary:
    """What the first layer gets: tensors (N, ...) of any N."""
    return tuple(BoundaryTensor((0, *t.shape[1:]), (1, *(0 for _ in t.shape[1:])), t.dtype, False) for t in inputs)


@dataclass(frozen=True)
class Traced:
    """The costs and the boundary of every layer in training and in evaluation, for inputs of certain shapes."""

    training: tuple[LayerCost, ...]
    evaluation: tuple[LayerCost, ...]

    @classmethod
    def of(cls, model: nn.Sequential, inputs: Boundary) -> "Traced":
        """`model` is on the meta device. Raises InputError as `trace_layers`."""
        return cls(trace_layers(model, inputs, training=True), trace_layers(model, inputs, training=False))

    @property
    def shared(self) -> tuple[Shared, ...]:
        """The layers of which one reads a tensor of the other."""
        return tuple(find_read(self.training, self.evaluation))

    def boundaries(self, balance: Sequence[int]) -> Boundaries:
        ends = list(accumulate(balance))[:-1]
        training, evaluation = ([costs[end - 1].outputs for end in ends] for costs in (self.training, self.evaluation))
        return Boundaries(training, evaluation)


def choose_balance(
    shared: Sequence[Shared], traced: Traced, partitions: int, devices: Sequence[torch.device], samples: float
) -> tuple[int, ...]:
    """The number of layers of each partition, by what the layers cost for micro-batches of `samples` on such devices,
    according to their data sheet. Raises InputError for more partitions than layers."""
    rates = rates_of_sheet(resolved(load_hardware("auto"), [*map(str, devices)]), torch.get_num_threads())
    work = [rates.seconds(cost.forward, samples) + rates.seconds(cost.backward, samples) for cost in traced.training]
    shared = (*shared, *traced.shared)
    try:
        return partition(work, partitions, furthest=keeping_together(shared, len(work), partitions, None))
    except NoCutFitsError:
        return partition(work, partitions)  # splits shared layers: refused by `check_cut`


@dataclass(frozen=True)
class Parts:
    """This process's stages, by index, and what runs schedules on them."""

    stages: dict[int, Stage]
    executor: Executor
    boundaries: Boundaries  # what the transport reads at every step: changed where inputs have other shapes
    tied: TiedWeights


def build_parts(
    module: nn.Sequential,
    balance: Sequence[int],
    boundaries: Boundaries,
    placement: Placement,
    groups: ProcessGroups | None,
    ties: Ties,
    seed: int,
) -> Parts:
    """Put together the engine of this process, in training mode, as `training/engine.py` does from settings; `module`
    has the layers of its stages, on their devices."""
    starts = [0, *accumulate(balance)]
    layers = iter(module.named_children())
    stages = {}
    for k in placement.here:
        own = nn.Sequential()
        for name, layer in islice(layers, balance[k]):
            own.add_module(name, layer)
        stages[k] = Stage(
            k,
            own,
            first_layer=starts[k],
            inputs=inputs_of(boundaries.training, k),
            evaluation_inputs=inputs_of(boundaries.evaluation, k),
            device=placement.device_of_stage[k],
            run_seed=seed,
        )
        stages[k].set_training(True)
    transport: Transport
    if groups is None:
        transport = LocalTransport(placement.device_of_stage, boundaries)
    else:
        transport = P2PTransport(
            placement.process,
            placement.process_of_stage,
            groups.links,
            boundaries,
            placement.devices[0],
        )
    tied = TiedWeights(ties.of, ties.stages, stages, placement.process, placement.process_of_stage)
    if groups is not None and groups.tied:
        tied = replace(tied, groups=groups.tied, links=groups.links)
        tied.connect(placement.devices[0], groups.links.connect_seconds)
    return Parts(stages, Executor(stages, placement.place_of_stage, transport), boundaries, tied)
