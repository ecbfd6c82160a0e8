"""Where the K stages of a run are: devices, processes and threads; and what they may use: cores, and memory.

Decided from the settings, from torchrun's environment and from what this machine has, before anything is allocated.
"""

from dataclasses import dataclass

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.planner.data_sheet import number_of_gpus, resolved
from gpipe_cli.system.machine import usable_cores, usable_memory_bytes


@dataclass(frozen=True)
class Devices:
    """The devices and the processes of a configuration."""

    stages: tuple[str, ...]  # device of each stage: `cpu`, `cuda:0`
    distributed: bool  # each stage has a process of its own
    threads: int  # of each process: its share of the cores, if they are not given
    at_once: int  # how many stages can compute at the same time; the others take turns with them


def place(config: TrainConfig) -> Devices:
    """Raises ValueError, one line, for devices that are not there and for processes that do not fit them."""
    stages, distributed = _devices(config)
    threads = config.threads or max(1, usable_cores() // (config.partitions if distributed else 1))
    if config.hardware.name != "auto":  # a machine that is not here has a device for each
        at_once = config.partitions
    elif not distributed:
        at_once = len(set(stages))
    elif stages[0] == "cpu" and torchrun() is None:
        at_once = max(1, usable_cores() // threads)
    else:
        at_once = config.partitions
    return Devices(stages, distributed, threads, at_once)


def memory_limit(config: TrainConfig, devices: Devices | None = None) -> int | None:
    """The bytes that a stage must stay below: what the settings give; or for recompute=auto what the device has.

    Raises ValueError if that has to be known and is not.
    """
    limit = config.hardware.memory_gib
    if limit is None and config.recompute == "auto":
        stages = (devices or place(config)).stages
        limit = resolved(config.hardware, stages[0]).memory_gib
        if limit is None and stages[0] == "cpu":
            limit = usable_memory_bytes() / 2**30
        if limit is None:
            raise ValueError(
                "recompute=auto: needs the memory of this GPU, which has no file in conf/hardware; give "
                "hardware.memory_gib=..."
            )
        if config.hardware.name == "auto":  # stages share the memory of a GPU, or of this machine
            started = torchrun() if stages[0] == "cpu" else None
            limit /= max(map(stages.count, stages)) if started is None else started.here
    return None if limit is None else int(limit * 2**30)


def _devices(config: TrainConfig) -> tuple[tuple[str, ...], bool]:
    """The device of every stage, and whether each gets a process of its own."""
    partitions, executor, started = config.partitions, config.executor, torchrun()
    gpus = number_of_gpus(config)
    if config.device == "cuda" and gpus == 0:
        raise ValueError("device=cuda: there is no CUDA device on this machine; use device=cpu or device=auto")
    if started is not None:
        many = f"torchrun started {started.processes} processes"
        if executor == "in_process":
            raise ValueError(f"executor=in_process: {many}; start one, or leave executor out")
        if started.processes != partitions:
            raise ValueError(
                f"partitions={partitions}: {many}, one per partition is needed; use partitions={started.processes} or "
                f"--nproc-per-node={partitions}"
            )
    if gpus == 0:
        return ("cpu",) * partitions, partitions > 1 and executor != "in_process"
    here = partitions if started is None else started.here
    enough = gpus >= here
    if executor == "distributed" and not enough:
        raise ValueError(
            f"executor=distributed: {here} processes need a GPU each and there are {gpus}; "
            "use executor=in_process, fewer partitions, or device=cpu"
        )
    if partitions > 1 and enough and executor != "in_process":
        return tuple(f"cuda:{stage % here}" for stage in range(partitions)), True
    return tuple(
        f"cuda:{stage * gpus // partitions if gpus < partitions else stage}" for stage in range(partitions)
    ), False
