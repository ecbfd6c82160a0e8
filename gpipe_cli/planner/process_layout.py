"""The layout of a run: on which devices, in which processes and with how many threads its K stages compute, and how
much memory each of them may use.

It is resolved once per configuration, before anything is allocated, from the settings, torchrun's environment variables
and this machine's devices. Plans, workers and reports only read the `Layout`.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from gpipe_cli.config.pipeline_settings import PipelineSettings
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.torchrun_env import Torchrun
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.planner.data_sheet import number_of_gpus, with_data_sheet
from gpipe_cli.planner.step_schedule import schedule_of_file
from gpipe_cli.schedule.named_schedules import AUTO_SCHEDULE, ORDERS, Order
from gpipe_cli.schedule.placement import PlacementName, place
from gpipe_cli.system.accelerator import DEVICE_TYPE
from gpipe_cli.system.machine import usable_cores, usable_memory_bytes
from gpipe_cli.units import plural

# NCCL's buffers by its defaults: 10 MiB at the receiver of a connection, for its three protocols, and 2 MiB at the
# sender (transport/p2p.cc of NCCL 2.28). A boundary between processes has a link in each direction, of 4 connections
# (`distributed/process_groups.py`). Sums over replicas have 16 in a ring and 32 between all pairs, by our estimate.
_BOUNDARY_BYTES = 4 * (12 << 20)
_SUMS_BYTES = (16 + 32) * (12 << 20)


@dataclass(frozen=True)
class Memory:
    """The memory that the stages of a device may use."""

    device_bytes: int
    stages: int  # number of stages that share these bytes

    @property
    def limit_bytes(self) -> int:
        """The bytes that each of the stages must stay below."""
        return self.device_bytes // self.stages


class TooLargeError(InputError):
    """No cut fits the memory. In the best cut made without a limit, a device with `stages` stages, the fullest of which
    is number `stage`, exceeds its memory by `missing_bytes`."""

    def __init__(self, stage: int, missing_bytes: int, memory: Memory, stages: int = 1) -> None:
        super().__init__(f"stage {stage} is {missing_bytes} bytes over the limit of {memory.limit_bytes}")
        self.stage, self.missing_bytes, self.memory, self.stages = stage, missing_bytes, memory, stages

    @property
    def enough_bytes(self) -> int:
        """A memory limit per stage with which the cut would fit the device."""
        return self.memory.limit_bytes - (-self.missing_bytes // self.stages)


@dataclass(frozen=True)
class Layout:
    """Where the stages of all R pipelines run. Process p of pipeline r has rank r P + p, so that a pipeline stays on a
    machine; every pipeline distributes its stages over its P processes in the same way."""

    replica_devices: tuple[tuple[str, ...], ...]  # per pipeline, the device of each stage: `cpu`, `cuda:0`
    rank_of_stage: tuple[int, ...]  # the process of each stage, among the P processes of its pipeline
    row_of_stage: tuple[int, ...]  # the row of each stage, in a schedule that has a row for each device
    threads: int  # threads of each process; by default its share of the cores
    concurrent_devices: int  # how many devices of all pipelines compute at the same time: CPU processes share cores
    is_local: bool  # whether the plan is for this machine; others have as many devices as needed
    torchrun: Torchrun | None  # this process, if torchrun started it
    memory: Memory | None = None  # the memory limit of the stages; None if there is none
    replica: int = 0  # index of the pipeline whose view this is

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each stage of this pipeline."""
        return self.replica_devices[self.replica]

    @property
    def on_cpu(self) -> bool:
        return self.devices[0] == "cpu"

    @property
    def device_of_stage(self) -> tuple[int, ...]:
        """The number of each stage's device, from 0 on; each process on a CPU is a separate device."""
        if not self.is_local:
            return self.row_of_stage
        places = list(zip(self.rank_of_stage, self.devices, strict=True))
        numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
        return tuple(numbers[place] for place in places)

    @property
    def limit_bytes(self) -> int | None:
        """The bytes that each stage must stay below, if there is a limit."""
        return None if self.memory is None else self.memory.limit_bytes

    @property
    def replicas(self) -> int:
        """R, the number of pipelines."""
        return len(self.replica_devices)

    @cached_property
    def processes_per_pipeline(self) -> int:
        """P, the number of processes of each pipeline."""
        return 1 + max(self.rank_of_stage)

    @property
    def processes(self) -> int:
        """The number of processes of all pipelines."""
        return self.processes_per_pipeline * self.replicas

    @property
    def local_processes(self) -> int:
        """The number of processes on this machine; torchrun may have started others elsewhere."""
        return self.processes if self.torchrun is None else self.torchrun.local_world_size

    @property
    def local_first_stages(self) -> int:
        """The number of pipelines whose first stage, which reads the data, is on this machine."""
        if self.torchrun is None:
            return self.replicas
        first_rank = self.torchrun.rank - self.torchrun.local_rank
        ranks = (self.processes_per_pipeline * replica + self.rank_of_stage[0] for replica in range(self.replicas))
        return sum(first_rank <= rank < first_rank + self.torchrun.local_world_size for rank in ranks)

    @property
    def distributed(self) -> bool:
        """Whether a pipeline has several processes."""
        return self.processes_per_pipeline > 1

    @property
    def shares_cores(self) -> bool:
        """Whether the devices are processes on the cores of this machine."""
        return self.is_local and self.on_cpu and self.torchrun is None

    @property
    def short_of_cores(self) -> bool:
        """Whether the processes that compute here have more threads than there are cores."""
        return set(self.devices) == {"cpu"} and self.local_processes * self.threads > usable_cores()

    @property
    def one_device(self) -> bool:
        """Whether all stages share a single device, or there are too few cores for the threads, so that a measurement
        does not show a pipeline's speed."""
        in_turns = not self.distributed and len(self.devices) > 1 and len(set(self.devices)) == 1
        return in_turns or self.short_of_cores

    def device_of(self, rank: int) -> str:
        """The device of a process, given by its rank in the run."""
        return self.replica_devices[self.replica_of(rank)][self.stages_of(rank)[0]]

    def devices_of(self, rank: int) -> tuple[str, ...]:
        """The devices of a process, given by its rank in the run, each once."""
        devices = self.replica_devices[self.replica_of(rank)]
        return tuple(dict.fromkeys(devices[stage] for stage in self.stages_of(rank)))

    def for_rank(self, rank: int) -> "Layout":
        """This layout, for the pipeline of a process given by its rank in the run."""
        return replace(self, replica=self.replica_of(rank))

    def replica_of(self, rank: int) -> int:
        """The pipeline that a process belongs to, given by its rank in the run."""
        return rank // self.processes_per_pipeline

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a process, given by its rank in the run or its number in the pipeline."""
        return tuple(k for k, owner in enumerate(self.rank_of_stage) if owner == rank % self.processes_per_pipeline)


def layout_of(config: TrainConfig, torchrun: Torchrun | None = None) -> Layout:
    """The layout of a configuration; `torchrun`: this process, if torchrun started it.

    Raises InputError for missing devices, a number of processes that does not fit the settings, and `recompute=auto`
    without a known device memory.
    """
    layout = place_stages(
        config, number_of_gpus(config), config.threads, torchrun, is_local=config.hardware.is_this_machine
    )
    return replace(layout, memory=_memory(config, layout))


def place_stages(
    settings: PipelineSettings, gpus: int, threads: int | None, torchrun: Torchrun | None, *, is_local: bool = True
) -> Layout:
    """The layout, without memory limits, of a run that may use `gpus` GPUs of this machine, in processes of `threads`
    threads (None: their share of the cores); `is_local`: the plan is for this machine.

    Each pipeline has P processes and the stages in rows, as many as n devices, the number that the settings ask for,
    or fewer. G is the number of GPUs for each of the R pipelines.

        started by   stages              P                rows         devices
        torchrun     on CPUs             world size / R   P, n if P=1  the CPU
        torchrun     on GPUs             world size / R   P, n if P=1  the GPU of each process
        gpipe        on a CPU, together  1                n            the CPU
        gpipe        on GPUs, together   1                min(n, G) *  the GPUs of the pipeline
        gpipe        on CPUs             n                n            the CPU
        gpipe        on GPUs             min(n, G) *      P            the GPU of each process

    Together are all stages with executor=in_process, or a single stage. *: n where a setting fixes the rows.

    Raises InputError for missing devices, and for a number of processes that does not fit the settings.
    """
    partitions, replicas = settings.partitions, settings.replicas
    rows = _rows(settings, None)
    number_of_rows = 1 + max(rows)
    _check_stages_per_process(settings)
    if torchrun is None:
        processes = _processes_without_torchrun(settings, number_of_rows, gpus)
    else:
        processes = _processes_under_torchrun(settings, number_of_rows, torchrun)

    drives_gpus = processes == 1 and torchrun is None and gpus >= replicas  # the process, all GPUs of its pipeline
    if processes > 1:
        number_of_rows = processes
    elif drives_gpus and not _fixed_by(settings):
        number_of_rows = min(number_of_rows, gpus // replicas)
    if number_of_rows != 1 + max(rows):
        rows = _rows(settings, number_of_rows)
    rank_of_stage = rows if processes > 1 else (0,) * partitions

    if gpus == 0:
        devices = (("cpu",) * partitions,) * replicas
    elif drives_gpus:
        devices = _gpus_of_one_process(rows, replicas, gpus // replicas)
    else:
        devices = _gpu_of_each_process(settings, rank_of_stage, gpus, torchrun)

    threads = threads or default_threads(processes * replicas)
    layout = Layout(devices, rank_of_stage, rows, threads, 0, is_local, torchrun)
    concurrent_devices = (1 + max(layout.device_of_stage)) * replicas
    if layout.shares_cores and layout.processes > 1:
        concurrent_devices = min(concurrent_devices, max(1, usable_cores() // threads))
    return replace(layout, concurrent_devices=concurrent_devices)


def default_threads(processes: int) -> int:
    """The threads of each process if `processes` share the cores of this machine."""
    return max(1, usable_cores() // processes)


def _memory(config: TrainConfig, layout: Layout) -> Memory | None:
    """The memory that the settings give or, for recompute=auto, the memory of the device."""
    memory_gib = config.hardware.memory_gib
    stages = 1
    context_bytes = 0
    if memory_gib is not None and not layout.is_local:  # for other machines the setting is per device, not per stage
        stages = max(map(layout.row_of_stage.count, layout.row_of_stage))
    if memory_gib is None and config.recompute == "auto":
        memory_gib = with_data_sheet(config.hardware, layout.devices).memory_gib
        if memory_gib is None and layout.on_cpu:
            memory_gib = usable_memory_bytes() / 2**30
        if memory_gib is None:
            raise InputError("recompute=auto: needs the memory of a device; give hardware.memory_gib=...")
        if layout.is_local:
            stages = _stages_of_a_device(layout)
            context_bytes = nccl_bytes(layout)
    return None if memory_gib is None else Memory(int(memory_gib * 2**30) - context_bytes, stages)


def nccl_bytes(layout: Layout) -> int:
    """The bytes that NCCL's buffers take of a GPU of this machine, in the process with the most neighbours."""
    if layout.on_cpu:
        return 0
    ends = [rank for pair in pairwise(layout.rank_of_stage) if len(set(pair)) == 2 for rank in pair]
    return max(map(ends.count, ends), default=0) * _BOUNDARY_BYTES + (_SUMS_BYTES if layout.replicas > 1 else 0)


def _stages_of_a_device(layout: Layout) -> int:
    """How many stages share the memory of a GPU, or of this machine."""
    if layout.torchrun is None:
        stage_devices = [device for devices in layout.replica_devices for device in devices]
        return max(map(stage_devices.count, stage_devices))
    per_process = max(map(layout.rank_of_stage.count, layout.rank_of_stage))
    return per_process * (layout.torchrun.local_world_size if layout.on_cpu else 1)


def _rows(settings: PipelineSettings, places: int | None) -> tuple[int, ...]:
    """The row of each stage, in a pipeline of `places` rows (None: as many as `stages_per_process` gives), by the
    placement or as in the schedule's file.

    Raises InvalidSettingError if `interleaved` cannot give all rows equally many stages.
    """
    partitions, per_process = settings.partitions, settings.stages_per_process
    if settings.schedule_is_file:
        return schedule_of_file(settings).row_of_stage
    if places is None:
        places = _order(settings).devices(partitions, per_process)
    if settings.schedule == "interleaved" and partitions % places:
        why = f"{plural(places, 'device')} would have different numbers of stages; use partitions="
        raise InvalidSettingError(
            "partitions", partitions, f"schedule=interleaved: {why}{-(-partitions // places) * places}"
        )
    placement = placement_of(settings)
    if placement == "neighbours" and per_process is not None and places == -(-partitions // per_process):
        return tuple(stage // per_process for stage in range(partitions))
    return place(placement, partitions, places)


def _order(settings: PipelineSettings) -> Order:
    return ORDERS.get(settings.schedule, Order())


def placement_of(settings: PipelineSettings) -> PlacementName:
    """The placement that the settings name, or that matches the schedule."""
    given = settings.placement or _order(settings).placement
    default = "looped" if settings.schedule == AUTO_SCHEDULE else "neighbours"
    return given or default  # type: ignore[return-value]  # the settings were checked


def _fixed_by(settings: PipelineSettings) -> str | None:
    """The setting that fixes the number of rows, if any does: a file, a schedule on a V, or `stages_per_process`."""
    if settings.schedule_is_file or _order(settings).placement == "v":
        return "schedule"
    return None if settings.stages_per_process is None else "stages_per_process"


def _check_stages_per_process(settings: PipelineSettings) -> None:
    """Raises InvalidSettingError if the other settings leave no room for `stages_per_process`."""
    partitions, per_process = settings.partitions, settings.stages_per_process
    if per_process is None:
        return
    if settings.schedule_is_file:
        given = f"schedule={settings.schedule}"
        raise InvalidSettingError("stages_per_process", per_process, f"{given} already gives it; remove it")
    if _order(settings).placement == "v" and per_process != 2:
        raise InvalidSettingError("stages_per_process", per_process, f"schedule={settings.schedule} has two; remove it")
    if per_process > partitions:
        use = f"use stages_per_process={partitions}, or partitions={per_process} or more"
        raise InvalidSettingError(
            "stages_per_process", per_process, f"a pipeline has only {plural(partitions, 'stage')}; {use}"
        )
    if settings.executor == "in_process" and placement_of(settings) == "neighbours":
        why = "executor=in_process has all stages in one process; remove one of the two"
        raise InvalidSettingError("stages_per_process", per_process, why)


def _processes_without_torchrun(settings: PipelineSettings, rows: int, gpus: int) -> int:
    """The number of processes that the command starts for each pipeline."""
    if settings.partitions == 1 or settings.executor == "in_process":
        return 1
    if _fixed_by(settings):
        return rows
    return min(rows, max(1, gpus // settings.replicas)) if gpus else rows


def _processes_under_torchrun(settings: PipelineSettings, rows: int, torchrun: Torchrun) -> int:
    """The number of processes that each pipeline gets from torchrun. Raises InputError if they do not fit."""
    partitions, replicas, per_process = settings.partitions, settings.replicas, settings.stages_per_process
    cause = f"torchrun started {torchrun.world_size} processes"
    if torchrun.world_size % replicas:
        raise InvalidSettingError("replicas", replicas, f"{cause}, and each replica has as many; use replicas=1")
    if settings.executor == "in_process" and torchrun.world_size > replicas:
        raise InputError(f"executor=in_process: {cause}; start one for each replica, or remove executor")
    if torchrun.world_size > partitions * replicas:
        raise InputError(
            f"partitions={partitions}: {cause}, and each needs a stage; use "
            f"partitions={-(-torchrun.world_size // replicas)} or more, or --nproc-per-node={partitions * replicas}; "
            "where another program has left RANK and WORLD_SIZE, unset them"
        )
    processes = torchrun.world_size // replicas
    if per_process is not None and processes != rows:
        raise InputError(f"stages_per_process={per_process}: {cause} for {partitions} stages; remove it")
    if _fixed_by(settings) and 1 < processes != rows:
        why = f"is for {plural(rows, 'device')}, and {cause} for each replica; start as many"
        raise InvalidSettingError("schedule", settings.schedule, why)
    return processes


_Devices = tuple[tuple[str, ...], ...]  # per pipeline, the device of each stage


def _gpus_of_one_process(rows: Sequence[int], replicas: int, gpu_count: int) -> _Devices:
    """The devices of each stage, if each pipeline is a process, which drives `gpu_count` GPUs; rows share GPUs where
    there are too few."""
    number_of_rows = 1 + max(rows)
    gpus = [row * min(gpu_count, number_of_rows) // number_of_rows for row in rows]
    return tuple(tuple(f"{DEVICE_TYPE}:{gpu_count * r + gpu}" for gpu in gpus) for r in range(replicas))


def _gpu_of_each_process(
    settings: PipelineSettings, rank_of_stage: Sequence[int], gpus: int, torchrun: Torchrun | None
) -> _Devices:
    """The devices of each stage, if every process has its own GPU. Raises InputError if there are too few."""
    partitions, replicas = settings.partitions, settings.replicas
    processes = 1 + max(rank_of_stage)
    local_processes = processes * replicas if torchrun is None else torchrun.local_world_size
    # a launcher may show each process its own GPU only, as SLURM's --gpus-per-task=1 does
    sees_own_gpu_only = torchrun is not None and gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ
    if gpus < local_processes and not sees_own_gpu_only:
        needs = f"{plural(local_processes, 'process')} need a GPU each and there are {gpus}"
        if replicas > gpus:
            raise InvalidSettingError("replicas", replicas, f"{needs}; use replicas={gpus} or {settings.ON_CPU}")
        fewer = f"stages_per_process={-(-partitions * replicas // gpus)}, executor=in_process"
        raise InputError(
            f"partitions={partitions}: {needs}; use "
            f"{fewer if torchrun is None else f'--nproc-per-node={gpus}'} or {settings.ON_CPU}"
        )
    # under torchrun a process knows only its own GPU, numbered from 0 per machine, or per process if it sees no other
    local_ranks = {} if torchrun is None else {torchrun.rank: torchrun.local_rank}

    def device(rank: int) -> str:
        return f"{DEVICE_TYPE}:{0 if sees_own_gpu_only else local_ranks.get(rank, rank % local_processes)}"

    return tuple(tuple(device(processes * r + owner) for owner in rank_of_stage) for r in range(replicas))
