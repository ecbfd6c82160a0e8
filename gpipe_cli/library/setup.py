"""The arguments of a `Pipeline`, the layout of its stages, and the preparation of its layers."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from gpipe_cli.config.pipeline_settings import PipelineSettings
from gpipe_cli.config.schema import Count
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.process_groups import ProcessGroups, connect_processes, is_connected
from gpipe_cli.distributed.rendezvous import Decision, broadcast_decision
from gpipe_cli.distributed.torchrun_env import Torchrun, limit_waits
from gpipe_cli.errors import InputError, InvalidSettingError, describe_error
from gpipe_cli.models.custom import why_not_sequential
from gpipe_cli.pipeline.runtime.tied_weights import Tie, share_memory, uses_in
from gpipe_cli.planner.cut import balance_layers
from gpipe_cli.planner.data_sheet import sheet_of_devices
from gpipe_cli.planner.device_rates import rates_of_data_sheet
from gpipe_cli.planner.model_profile import TracedModel
from gpipe_cli.planner.process_layout import Layout, place_stages
from gpipe_cli.schedule.named_schedules import SCHEDULES
from gpipe_cli.schedule.schedule import RecomputeMode
from gpipe_cli.system.accelerator import DEVICE_TYPE, number_of_devices, use_device

_TIMEOUT_SECONDS = 600.0  # longest wait for a message of another process


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments(PipelineSettings):
    """The arguments of `Pipeline` that are plain values."""

    ON_CPU = "devices=['cpu']"

    schedule: Literal[SCHEDULES]  # type: ignore[valid-type]  # a Literal of a tuple
    recompute: RecomputeMode
    precision: Literal["float32", "bfloat16"]
    graphs: bool
    balance: tuple[Count, ...] | None
    devices: tuple[str, ...] | None


def place_on_devices(arguments: Arguments, torchrun: Torchrun | None) -> Layout:
    """The layout of a pipeline over the processes of torchrun, or the devices of this process, with the program's
    number of threads. Under torchrun only this process's device is known, and is entered for all.

    Raises InputError for missing devices, processes that do not fit the arguments, and replicas without torchrun.
    """
    if arguments.replicas > 1 and torchrun is None:
        why = "each replica has its own processes; start them with torchrun"
        raise InvalidSettingError("replicas", arguments.replicas, why)
    gpus = number_of_devices()
    threads = torch.get_num_threads()
    if arguments.devices is None:
        return place_stages(arguments, gpus, threads, torchrun)
    if not arguments.devices:
        raise InvalidSettingError("devices", [], "is empty; give at least one, such as devices=['cpu'], or remove it")
    devices = [_known_device(name, gpus) for name in arguments.devices]
    if "cpu" in devices and {*devices} != {"cpu"}:
        raise InvalidSettingError("devices", devices, "has the CPU and GPUs; give one kind")
    if torchrun is not None and len(devices) != 1:
        raise InvalidSettingError("devices", devices, "under torchrun a process has one device; give its own")
    if len(devices) > arguments.partitions:
        why = f"there are {len(devices)} devices, and each needs a stage"
        raise InvalidSettingError("partitions", arguments.partitions, f"{why}; use partitions={len(devices)} or more")
    if devices[0] == "cpu":
        return place_stages(arguments, 0, threads, torchrun)
    layout = place_stages(arguments, len(devices) if torchrun is None else torchrun.local_world_size, threads, torchrun)
    names = tuple(devices[0 if torchrun is not None else int(name.partition(":")[2])] for name in layout.devices)
    return replace(layout, replica_devices=(names,) * layout.replicas)


def _known_device(name: str, gpus: int) -> str:
    device_names = ["cpu", *(f"{DEVICE_TYPE}:{number}" for number in range(gpus))]
    name = {DEVICE_TYPE: f"{DEVICE_TYPE}:0", "cpu:0": "cpu"}.get(name, name)
    if name not in device_names:
        raise InvalidSettingError("devices", [name], f"is not a device here; use one of {', '.join(device_names)}")
    return name


def connect(layout: Layout) -> tuple[ControlGroup, ProcessGroups | None]:
    """Connect the processes that torchrun has started. A process group that the program has already made is used."""
    rank = 0 if layout.torchrun is None else layout.torchrun.rank
    connected = layout.torchrun is None or is_connected()
    with limit_waits(_TIMEOUT_SECONDS):
        start = "" if connected else broadcast_decision(lambda: Decision(Path.cwd(), None, None)).start
    devices = [*map(torch.device, layout.devices_of(rank))]
    if layout.torchrun is not None:
        use_device(devices[0])
    return connect_processes(
        rank, layout.rank_of_stage, layout.replicas, devices, start, _TIMEOUT_SECONDS, nullcontext, is_local=False
    )


def move(module: nn.Sequential, devices: Mapping[str, torch.device], ties: Sequence[Tie]) -> None:
    """Move layers to their devices, by name. Where several layers have the same weight, the first of them keeps the
    parameter; the others get their own parameters, which share its memory on the same device."""
    share_memory(module, ties)
    for name, layer in module.named_children():
        layer.to(devices[name])
    for uses in (uses_in(tie, module) for tie in ties):
        first_on_device: dict[torch.device, nn.Parameter] = {}
        for names in uses:  # the move has separated parameters that shared memory
            parameter = module.get_parameter(names[0])
            parameter.data = first_on_device.setdefault(parameter.device, parameter).data


def as_sequential(layers: nn.Sequential | Iterable[nn.Module]) -> nn.Sequential:
    """The layers as an nn.Sequential. Raises InputError if they cannot be a pipeline, or have no values."""
    if not isinstance(layers, nn.Module):
        layers = list(layers) if isinstance(layers, Iterable) else [layers]
        if strange := [type(layer).__name__ for layer in layers if not isinstance(layer, nn.Module)]:
            raise InvalidSettingError("layers", strange[0], "is not a module; give modules, or an nn.Sequential")
        layers = nn.Sequential(*layers)
    if fault := why_not_sequential(layers):
        raise InvalidSettingError("layers", type(layers).__name__, fault)
    assert isinstance(layers, nn.Sequential)
    for name, tensor in (*layers.named_parameters(), *layers.named_buffers()):
        if tensor.is_meta:
            raise InvalidSettingError("layers", name, "has no values; build the layers on the CPU")
    return layers


def copy_modules(layers: nn.Sequential, convert: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    """Copies of the modules, in which `convert(tensor)` replaces each parameter or buffer `tensor`. Raises
    InvalidSettingError for modules that cannot be copied."""
    replacements = {id(tensor): convert(tensor) for tensor in (*layers.parameters(), *layers.buffers())}
    try:
        return copy.deepcopy(layers, replacements)
    except (RuntimeError, TypeError) as error:  # for a tensor with a graph, or an object that cannot be pickled
        why = f"cannot be copied ({describe_error(error)}); keep such objects out of the layers"
        raise InvalidSettingError("layers", type(layers).__name__, why) from error


def check_not_inference(call: str) -> None:
    """Raises InputError inside torch.inference_mode, whose tensors no backward can use."""
    if torch.is_inference_mode_enabled():
        raise InputError(f"{call}: called inside torch.inference_mode, in which nothing is trained; call it outside")


@contextmanager
def disable_modes() -> Iterator[None]:
    """While active, modes that the program has set are off. Layers are traced on the meta device: detection of
    anomalies would ask for values there, and a dispatch mode would count what is never computed."""
    without_anomalies = torch.autograd.set_detect_anomaly(False)
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), without_anomalies:
        yield


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer on the meta device."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def choose_balance(traced: TracedModel, layout: Layout, rank: int, samples: float) -> tuple[int, ...]:
    """The number of layers of each partition, by the costs of the layers for micro-batches of `samples` samples on the
    devices of this process, according to their data sheet. Raises InputError for more partitions than layers."""
    rates = rates_of_data_sheet(sheet_of_devices(layout.devices_of(rank)), layout.threads)
    work = [rates.seconds(cost.forward, samples) + rates.seconds(cost.backward, samples) for cost in traced.costs]
    return balance_layers(work, len(layout.devices), traced.shared)
