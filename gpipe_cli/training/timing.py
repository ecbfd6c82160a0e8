"""What layers cost on the machine at hand: measured by workers that start like those of a run, and remembered.

A file's name is a digest of all that the seconds depend on, so what was measured for other settings, on another device
or with another version of torch is never taken for it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from math import ceil
from pathlib import Path
from typing import Any

from gpipe_cli.config import TrainConfig
from gpipe_cli.data.cache import cache_folder, digest_of
from gpipe_cli.files import write_whole
from gpipe_cli.interrupts import interruptible
from gpipe_cli.pipeline.activation_memory import ActivationMemory
from gpipe_cli.reporting.measurement import hardware
from gpipe_cli.torchrun import torchrun
from gpipe_cli.training.costs import StepCosts, measured_costs, scaled
from gpipe_cli.training.crew import perform
from gpipe_cli.training.hardware import gpu_model, physical_memory_bytes, resolved
from gpipe_cli.training.layout import Layout, costs_by_figures, make_layout, stages_at_once
from gpipe_cli.training.measuring import segment_layers
from gpipe_cli.training.planning import micro_batches_of
from gpipe_cli.training.shapes import Shapes
from gpipe_cli.training.work import Measuring
from gpipe_cli.typed import one_line

_VERSION = 3  # of what is remembered, and of how it is measured
# The settings that how long a layer takes depends on, but for what the layout says.
_DECISIVE = ("model", "dataset", "optimizer", "label_smoothing", "ema_decay", "freeze")


def step_costs(config: TrainConfig, shapes: Shapes, say: Callable[[str], None] = lambda line: None) -> StepCosts:
    """What the layers cost for the micro-batches of `config`: by figures, or measured if it says so.

    `say` is told before seconds go by. Raises ValueError for what cannot be placed, or measured.
    """
    if config.cost == "figures":
        return costs_by_figures(config, shapes)
    _, mean = micro_batches_of(config, shapes.lengths)
    samples = ceil(mean)
    # any cut serves to start the workers; the layers are timed whole
    layout = make_layout(replace(config, cost="figures", recompute="never", hardware=_unlimited(config)), shapes)
    file = cache_folder(None) / "costs" / f"{_digest(config, layout, shapes, samples)}.json"
    alone = torchrun() is None
    found = _remembered(file) if config.cost == "measured" and alone else None
    if found is None:
        if not alone:
            raise ValueError(
                f"cost={config.cost}: layers are not timed under torchrun, where all processes must come to the "
                "same cut; use cost=figures, or partition.balance=[...] as gpipe plan finds it"
            )
        say(f"timing each of {len(shapes.costs)} layers for micro-batches of {samples} (cost={config.cost}) ...")
        found = _measure(config, shapes, layout, samples)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(found))
        except OSError as error:
            say(f"not remembered for the next time: {one_line(error)}")
    in_process = None if layout.distributed else stages_at_once(config)
    costs = measured_costs(shapes, samples, layout.processes_here, found, in_process=in_process)
    return scaled(costs, mean / samples)


def _measure(config: TrainConfig, shapes: Shapes, layout: Layout, samples: int) -> dict[str, Any]:
    parts = _segments(config, shapes, samples, layout)
    one = replace(
        config,
        partitions=len(parts),
        partition=replace(config.partition, balance=parts),
        executor="in_process",
        recompute="never",
        hardware=_unlimited(config),
    )
    segments = replace(
        make_layout(one, shapes),
        devices=layout.devices[:1] * len(parts),
        threads=layout.threads,
        memory_format=layout.memory_format,
    )
    found: dict[str, Any] = {}

    def hear(kind: str, message: dict[str, Any]) -> None:
        found.update(message)

    with interruptible() as interrupt:
        failure = perform(config, layout, Measuring(segments, samples), hear, interrupt)
    if failure is not None:
        raise ValueError(
            f"cost={config.cost}: the layers cannot be timed: {failure.text}; use cost=figures, or more micro_batches"
        )
    return found


def _segments(config: TrainConfig, shapes: Shapes, samples: int, layout: Layout) -> tuple[int, ...]:
    """Layers that one device can hold at a time: half of it, as more than one process may measure."""
    memory = ActivationMemory(shapes.costs, shapes.inputs, samples, shapes.lengths)
    needed = [
        memory.graph_bytes(at, at + 1) + w.weight_bytes + w.gradient_bytes + w.optimizer_bytes
        for at, w in enumerate(shapes.weights)
    ]
    limit = resolved(config.hardware, layout.devices[0]).memory_gib
    available = int(limit * 2**30) if limit else physical_memory_bytes() // layout.processes_here
    return segment_layers(needed, available // 2)


def _unlimited(config: TrainConfig) -> Any:
    return replace(config.hardware, memory_gib=None)


def _digest(config: TrainConfig, layout: Layout, shapes: Shapes, samples: int) -> str:
    settings = asdict(config)
    facts: dict[str, Any] = {key: settings[key] for key in _DECISIVE}
    machine = hardware((), layout.threads)
    facts |= {
        "version": _VERSION,
        "samples": samples,
        "lengths": shapes.lengths,
        "torch": metadata.version("torch"),
        "machine": [machine["cpu"], machine["cores"]],
        "device": "cpu" if layout.devices[0] == "cpu" else gpu_model(),
        "processes": layout.processes,
        "threads": layout.threads,
        "memory_format": layout.memory_format,
        "layers": [[cost.name, cost.parameters, cost.forward_flops, cost.backward_flops] for cost in shapes.costs],
    }
    return digest_of("layer seconds", facts)


def _remembered(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or damaged: measured again
        return None
    return found
