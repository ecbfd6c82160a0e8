"""Where the K stages of a run are: devices, processes and threads; and what they may use: cores, and memory.

Decided from the settings, from torchrun's environment and from what this machine has, before anything is allocated.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.schedule.orders import LOOPED
from gpipe_cli.planner.data_sheet import number_of_gpus, resolved
from gpipe_cli.planner.step_schedule import schedule_of_file
from gpipe_cli.system.machine import usable_cores, usable_memory_bytes
from gpipe_cli.units import plural


@dataclass(frozen=True)
class Devices:
    """The devices and the processes of a configuration."""

    replicas: tuple[tuple[str, ...], ...]  # of each pipeline, the device of each stage: `cpu`, `cuda:0`
    process_of_stage: tuple[int, ...]  # process of each stage, among those of its pipeline
    row_of_stage: tuple[int, ...]  # of each stage, in a schedule that has a row for each device
    device_of_stage: tuple[int, ...]  # number of each stage's device, of which stages take turns on one
    threads: int  # of each process: its share of the cores, if they are not given
    at_once: int  # how many devices of all pipelines can compute at the same time, as CPUs share cores

    @property
    def stages(self) -> tuple[str, ...]:
        """The devices of the first pipeline."""
        return self.replicas[0]

    @property
    def distributed(self) -> bool:
        """Whether a pipeline has several processes."""
        return self.of_pipeline > 1

    @property
    def of_pipeline(self) -> int:
        """Processes of each pipeline."""
        return 1 + max(self.process_of_stage)

    @property
    def processes(self) -> int:
        """Of all pipelines."""
        return self.of_pipeline * len(self.replicas)


def place(config: TrainConfig) -> Devices:
    """Raises InputError, one line, for devices that are not there and for processes that do not fit them."""
    replicas, process_of_stage, row_of_stage = _devices(config)
    stages = replicas[0]
    processes = (1 + max(process_of_stage)) * len(replicas)
    threads = config.threads or max(1, usable_cores() // processes)
    device_of_stage = device_numbers(process_of_stage, stages)
    here = config.hardware.name == "auto"
    if not here:  # a machine that is not here has as many devices as are asked for
        device_of_stage = row_of_stage
    at_once = (1 + max(device_of_stage)) * len(replicas)
    if here and processes > 1 and stages[0] == "cpu" and torchrun() is None:
        at_once = min(at_once, max(1, usable_cores() // threads))
    return Devices(replicas, process_of_stage, row_of_stage, device_of_stage, threads, at_once)


def device_numbers(process_of_stage: Sequence[int], devices: Sequence[str]) -> tuple[int, ...]:
    """From 0 on, one for each stage; of its process and the device there. Each process on a CPU is a device."""
    places = list(zip(process_of_stage, devices, strict=True))
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(numbers[place] for place in places)


@dataclass(frozen=True)
class Memory:
    """What the stages of a device may use."""

    device_bytes: int
    stages: int  # that share it

    @property
    def limit_bytes(self) -> int:
        """That each of them must stay below."""
        return self.device_bytes // self.stages


def memory_of(config: TrainConfig, devices: Devices | None = None) -> Memory | None:
    """What the settings give; or for recompute=auto what the device has. None: there is no limit.

    Raises InputError if that has to be known and is not.
    """
    memory_gib, stages = config.hardware.memory_gib, 1
    if memory_gib is not None and config.hardware.name != "auto":  # a device's, and not a stage's
        device_of_stage = (devices or place(config)).device_of_stage
        stages = max(map(device_of_stage.count, device_of_stage))
    if memory_gib is None and config.recompute == "auto":
        devices = devices or place(config)
        memory_gib = resolved(config.hardware, devices.stages).memory_gib
        if memory_gib is None and devices.stages[0] == "cpu":
            memory_gib = usable_memory_bytes() / 2**30
        if memory_gib is None:
            raise InputError("recompute=auto: needs the memory of a device; give hardware.memory_gib=...")
        if config.hardware.name == "auto":
            stages = _stages_of_a_device(devices)
    return None if memory_gib is None else Memory(int(memory_gib * 2**30), stages)


def memory_limit(config: TrainConfig, devices: Devices | None = None) -> int | None:
    """The bytes that a stage must stay below, if there is a limit; raises as `memory_of`."""
    memory = memory_of(config, devices)
    return None if memory is None else memory.limit_bytes


def _stages_of_a_device(devices: Devices) -> int:
    """How many stages share the memory of one: of a GPU, or of this machine."""
    started, stages = torchrun(), [device for replica in devices.replicas for device in replica]
    if started is None:
        return max(stages.count(device) for device in stages)
    of_a_process = max(devices.process_of_stage.count(process) for process in devices.process_of_stage)
    return of_a_process * (started.here if stages[0] == "cpu" else 1)


def _places(config: TrainConfig, places: int | None) -> tuple[int, ...]:
    """The place of each stage, if a pipeline has so many `places`, or as many as `stages_per_process` makes: neighbours
    together; or dealt out, where the schedule wants a device to have stages that are not neighbours; or as the
    schedule's file says.

    Raises InputError for stages that cannot be dealt out.
    """
    partitions, each = config.partitions, config.stages_per_process
    if config.schedule_is_file:
        return schedule_of_file(config).row_of_stage
    if places is None:
        places = -(-partitions // (each or 1))
    if config.schedule in LOOPED:
        if partitions % places:
            why = f"{plural(places, 'device')} would have different numbers of stages; use partitions="
            why += f"{-(-partitions // places) * places}"
            if config.schedule == "interleaved":
                raise RefusedError("partitions", partitions, f"schedule=interleaved: {why}")
        return tuple(stage % places for stage in range(partitions))
    if each is None or places != -(-partitions // each):
        return tuple(stage * places // partitions for stage in range(partitions))
    return tuple(stage // each for stage in range(partitions))


def _devices(config: TrainConfig) -> tuple[tuple[tuple[str, ...], ...], tuple[int, ...], tuple[int, ...]]:
    """Of each pipeline the device of every stage; the process of every stage, the same in each; and its row."""
    partitions, executor, started, replicas = config.partitions, config.executor, torchrun(), config.replicas
    gpus = number_of_gpus(config)
    if config.device == "cuda" and gpus == 0:
        raise InputError("device=cuda: there is no CUDA device on this machine; use device=cpu or device=auto")
    each = config.stages_per_process
    by_file = config.schedule_is_file
    row_of_stage = _places(config, None)
    if each is not None and by_file:
        raise RefusedError("stages_per_process", each, f"schedule={config.schedule} says it; leave it out")
    if each is not None and each > partitions:
        use = f"use stages_per_process={partitions}, or partitions={each} or more"
        raise RefusedError("stages_per_process", each, f"a pipeline has only {plural(partitions, 'stage')}; {use}")
    if each is not None and executor == "in_process" and config.schedule not in LOOPED:
        why = "executor=in_process has all stages in one process; leave one of the two out"
        raise RefusedError("stages_per_process", each, why)
    if started is not None:
        many = f"torchrun started {started.processes} processes"
        if started.processes % replicas:
            raise RefusedError("replicas", replicas, f"{many}, and each replica has as many; use replicas=1")
        if executor == "in_process" and started.processes > replicas:
            raise InputError(f"executor=in_process: {many}; start one for each replica, or leave executor out")
        if started.processes > partitions * replicas:
            raise InputError(
                f"partitions={partitions}: {many}, and each needs a stage; use "
                f"partitions={-(-started.processes // replicas)} or more, or --nproc-per-node={partitions * replicas}"
            )
    if started is not None:
        processes = started.processes // replicas
    elif partitions == 1 or executor == "in_process":
        processes = 1
    elif each is not None or by_file:
        processes = 1 + max(row_of_stage)
    else:
        processes = min(partitions, max(1, gpus // replicas)) if gpus else partitions
    if started is not None and each is not None and processes != 1 + max(row_of_stage):
        raise InputError(f"stages_per_process={each}: {many} for {partitions} stages; leave it out")
    if by_file and 1 < processes != 1 + max(row_of_stage):
        why = f"has {plural(1 + max(row_of_stage), 'row')}, and {many} for each replica; start as many as rows"
        raise RefusedError("schedule", config.schedule, why)
    process_of_stage = (
        row_of_stage
        if processes == 1 + max(row_of_stage)
        else _places(config, processes)
        if processes > 1
        else (0,) * partitions
    )
    if processes > 1:
        row_of_stage = process_of_stage
    if gpus == 0:
        return (("cpu",) * partitions,) * replicas, process_of_stage, row_of_stage
    if processes == 1 and started is None and gpus >= replicas:  # one process drives several GPUs
        own = gpus // replicas
        if each is None and not by_file:
            row_of_stage = _places(config, min(own, partitions))
        used = min(own, 1 + max(row_of_stage))
        stages = [row * used // (1 + max(row_of_stage)) for row in row_of_stage]
        return (
            tuple(tuple(f"cuda:{own * r + gpu}" for gpu in stages) for r in range(replicas)),
            process_of_stage,
            row_of_stage,
        )
    here = processes * replicas if started is None else started.here
    # a launcher may show each process its own GPU only, as SLURM's --gpus-per-task=1 does
    one_each = started is not None and gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if gpus < here and not one_each:
        needs = f"{plural(here, 'process')} need a GPU each and there are {gpus}"
        if replicas > gpus:
            raise RefusedError("replicas", replicas, f"{needs}; use replicas={gpus} or device=cpu")
        fewer = f"stages_per_process={-(-partitions * replicas // gpus)}, executor=in_process"
        raise InputError(
            f"partitions={partitions}: {needs}; use "
            f"{fewer if started is None else f'--nproc-per-node={gpus}'} or device=cpu"
        )
    # under torchrun this process knows its own GPU; each machine, or process that sees one, counts them from 0
    local = {} if started is None else {started.rank: started.local_rank}

    def device(process: int) -> str:
        return f"cuda:{0 if one_each else local.get(process, process % here)}"

    return (
        tuple(tuple(device(processes * r + owner) for owner in process_of_stage) for r in range(replicas)),
        process_of_stage,
        row_of_stage,
    )
