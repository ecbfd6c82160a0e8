"""Which layers go where: the cut, the devices and the processes of a run, decided once, before anything is allocated.

The layout is made by the parent from shapes alone and handed to every worker, so that none of them traces the model
again and all of them agree.
"""

import os
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from gpipe_cli.config import TrainConfig
from gpipe_cli.pipeline.frozen import Frozen, freeze
from gpipe_cli.pipeline.layer_cost import Boundary, trace_layers
from gpipe_cli.pipeline.partition import check_balance, partition
from gpipe_cli.training.build import build_model, greatest_lengths, model_inputs, outputs_of
from gpipe_cli.training.freezing import find_frozen


@dataclass(frozen=True)
class Layout:
    """The cut and its placement. Lists have one entry per partition, `boundaries` one per edge between partitions."""

    layer_names: tuple[tuple[str, ...], ...]
    parameters: tuple[int, ...]
    trained: tuple[int, ...]  # as many of these parameters are not frozen
    frozen: Frozen
    cost: tuple[float, ...]  # of one sample, forward and backward: LayerCost.work
    inputs: Boundary  # of the first stage
    lengths: tuple[int, ...]  # the greatest that sentences are padded to
    training_boundaries: tuple[Boundary, ...]
    evaluation_boundaries: tuple[Boundary, ...]
    parameter_tensors: tuple[int, ...]
    devices: tuple[str, ...]
    distributed: bool
    threads: int
    memory_format: str

    @property
    def partitions(self) -> int:
        return len(self.layer_names)

    @property
    def processes(self) -> int:
        return self.partitions if self.distributed else 1

    @property
    def first_layers(self) -> tuple[int, ...]:
        return tuple(accumulate((len(names) for names in self.layer_names[:-1]), initial=0))

    @property
    def one_device(self) -> bool:
        """True if several stages take turns on one device or on too few cores: what is measured then is not a
        pipeline's speed."""
        if self.distributed:
            return set(self.devices) == {"cpu"} and self.processes_here > usable_cores()
        return self.partitions > 1 and len(set(self.devices)) == 1

    @property
    def processes_here(self) -> int:
        """The processes on this machine; torchrun may have started others elsewhere."""
        alone = torchrun_world() in (None, 1)
        return self.processes if alone else int(os.environ.get("LOCAL_WORLD_SIZE", self.processes))

    @property
    def most_parameter_tensors(self) -> int:
        """Of any process: the room that a vector with a number per parameter tensor needs."""
        return max(self.parameter_tensors) if self.distributed else sum(self.parameter_tensors)

    def stages_of(self, process: int) -> range:
        return range(process, process + 1) if self.distributed else range(self.partitions)


def make_layout(config: TrainConfig, model: nn.Sequential | None = None) -> Layout:
    """Cut the model and place the parts. Raises ValueError, one line, for what cannot be cut or placed."""
    model = build_model(config) if model is None else model
    inputs = model_inputs(config)
    lengths = greatest_lengths(config)
    frozen = find_frozen(config, model)
    freeze(model, frozen)
    costs = trace_layers(model, inputs, training=True, lengths=lengths)
    shapes = trace_layers(model, inputs, training=False, lengths=lengths)
    _check_outputs(config, shapes[-1].outputs)
    balance = config.partition.balance
    if balance is None:
        balance = partition([cost.work for cost in costs], config.partitions)
    check_balance(balance, len(costs), config.partitions)
    ends = list(accumulate(balance))
    parts = [costs[end - size : end] for size, end in zip(balance, ends, strict=True)]
    tensors = [sum(1 for _ in layer.parameters()) for layer in model.children()]
    trained = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in model.children()]
    devices, distributed = _place(config)
    processes = config.partitions if distributed else 1
    return Layout(
        layer_names=tuple(tuple(cost.name for cost in part) for part in parts),
        parameters=tuple(sum(cost.parameters for cost in part) for part in parts),
        trained=tuple(sum(trained[end - size : end]) for size, end in zip(balance, ends, strict=True)),
        frozen=frozen,
        cost=tuple(sum(cost.work for cost in part) for part in parts),
        inputs=inputs,
        lengths=lengths,
        training_boundaries=tuple(costs[end - 1].outputs for end in ends[:-1]),
        evaluation_boundaries=tuple(shapes[end - 1].outputs for end in ends[:-1]),
        parameter_tensors=tuple(sum(tensors[end - size : end]) for size, end in zip(balance, ends, strict=True)),
        devices=devices,
        distributed=distributed,
        threads=config.threads or max(1, usable_cores() // processes),
        memory_format=_memory_format(config, devices[0]),
    )


def _check_outputs(config: TrainConfig, outputs: Boundary) -> None:
    """Raises ValueError if the last layer of somebody's own model does not return logits for this data set."""
    samples, classes = 2, outputs_of(config)
    wanted = (samples, *greatest_lengths(config)[-1:], classes)
    found = outputs[0].shape(samples, greatest_lengths(config))
    if found != wanted:
        what = "classes" if config.task == "classification" else "tokens in its vocabulary"
        target = getattr(config.model, "target", config.model.name)
        raise ValueError(
            f"model.target={target}: returns {found} for {samples} samples, and dataset={config.dataset.name} has "
            f"{classes} {what}: {wanted} is needed; mend the model's last layer"
        )


def usable_cores() -> int:
    """The cores this process may run on, which in a container or under SLURM is fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torchrun_world() -> int | None:
    """The number of processes that torchrun (or SLURM through it) started, or None if the command starts its own."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else None


def _place(config: TrainConfig) -> tuple[tuple[str, ...], bool]:
    """The device of every stage, and whether each gets a process of its own."""
    partitions, executor, world = config.partitions, config.executor, torchrun_world()
    # counted through the driver's management library: asking CUDA itself would open a context in this process
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    if config.device == "cuda" and gpus == 0:
        raise ValueError("device=cuda: torch finds no CUDA device on this machine; use device=cpu or device=auto")
    if world is not None:
        if executor == "in_process" and world > 1:
            raise ValueError(
                f"executor=in_process: torchrun started {world} processes; start one, or leave executor out"
            )
        if world != partitions and world > 1:
            raise ValueError(
                f"partitions={partitions}: torchrun started {world} processes, one per partition is needed; "
                f"use partitions={world} or --nproc-per-node={partitions}"
            )
    if gpus == 0:
        return ("cpu",) * partitions, partitions > 1 and executor != "in_process"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", partitions)) if world is not None and world > 1 else partitions
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


def _memory_format(config: TrainConfig, device: str) -> str:
    if config.memory_format != "auto":
        return config.memory_format
    # convolutions are faster channels last, on GPUs as on CPUs (there by half: recipes/side_by_side.py)
    return "channels_last" if config.task == "classification" else "contiguous"
