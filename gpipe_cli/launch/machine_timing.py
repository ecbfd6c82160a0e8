"""How fast the machine at hand is: its layers timed (`cost=measured`), or the machine itself (`hardware=auto`).

Workers that start like those of a run do the timing, and it is remembered. A file's name is a digest of all that the
seconds depend on, so what was timed for other settings, on another machine or with another version of torch is never
taken for it. The machine is timed with a few layers of each kind (`reference_layers.py`), in a few seconds, and again
when a short probe shows that it has become faster or slower since.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache
from importlib import metadata
from math import ceil
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import torch

from gpipe_cli.assembly.build import memory_format_of
from gpipe_cli.config.dataset import AugmentationConfig, ImagesConfig
from gpipe_cli.config.model import CustomConfig
from gpipe_cli.config.optimizer import ConstantLearningRateConfig, SGDConfig
from gpipe_cli.config.settings import PartitionConfig, TrainConfig, load_hardware
from gpipe_cli.config.typed import one_line
from gpipe_cli.data.cache import cache_folder, digest_of
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.launch import reference_layers
from gpipe_cli.launch.job import Measuring
from gpipe_cli.launch.layer_benchmark import LayerTimes, segment_layers
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.pipeline.profile.activation_memory import ActivationMemory
from gpipe_cli.planner.cost_model import StepCosts, measured_costs, scaled, slowdown_of
from gpipe_cli.planner.data_sheet import gpu_model, resolved
from gpipe_cli.planner.device_rates import Speeds, by_sheet, fitted
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.placement import (
    Placement,
    costs_by_figures,
    make_placement,
    place,
    stages_at_once,
    threads_of,
)
from gpipe_cli.planner.step_schedule import micro_batches_of
from gpipe_cli.reporting.run.measurement import hardware
from gpipe_cli.system.files import read_json, write_whole
from gpipe_cli.system.interrupts import interruptible
from gpipe_cli.system.machine import usable_cores, usable_memory_bytes
from gpipe_cli.units import duration, percent

Say = Callable[[str], None]

_VERSION = 6  # of what is remembered, and of how it is measured
# The settings that how long a layer takes depends on, but for what the layout says.
_DECISIVE = ("model", "dataset", "optimizer", "label_smoothing", "ema_decay", "freeze")
_LAYER_SECONDS, _REFERENCE_SECONDS = 2.5, 0.4  # that passes over the layers are repeated for
_PROBE_SECONDS = 0.02
_DRIFT = 0.2  # of the probe: more says that the machine is not as it was
_PROBES, _PROBES_APART_SECONDS = 3, 0.3  # before it is believed
_MOST_PROCESSES = 16  # that are timed at once
_DAY = 86400
_OWN_SHARE = 0.9  # of a core: with less the machine is busy, and what was timed is not remembered


def step_costs(config: TrainConfig, shapes: ModelProfile, say: Say = lambda line: None) -> StepCosts:
    """What the layers cost for the micro-batches of `config`: by figures, or measured if it says so.

    `say` is told before seconds go by. Raises ValueError for what cannot be placed, or measured.
    """
    if config.cost == "figures":
        return costs_by_figures(config, shapes, None if config.dry_run else speeds_here(config, say))
    _, mean = micro_batches_of(config, shapes.lengths)
    samples = ceil(mean)
    # any cut serves to start the workers; the layers are timed whole
    layout = make_placement(replace(config, cost="figures", recompute="never", hardware=_unlimited(config)), shapes)
    file = _file("costs", _digest(config, layout, shapes, samples))
    alone = torchrun() is None
    found = _remembered(file) if config.cost == "measured" and alone else None
    if found is None:
        if not alone:
            raise ValueError(
                f"cost={config.cost}: layers are not timed under torchrun, where all processes must come to the "
                "same cut; use cost=figures, or partition.balance=[...] as gpipe plan finds it"
            )
        say(f"timing each of {len(shapes.costs)} layers for micro-batches of {samples} (cost={config.cost}) ...")
        try:
            found = _measure(config, shapes, layout, samples, _LAYER_SECONDS)
        except ValueError as error:
            raise ValueError(
                f"cost={config.cost}: the layers cannot be timed: {one_line(error)}; use cost=figures, or more "
                "micro_batches"
            ) from None
        _remember(file, found, layout, say)
    in_process = None if layout.distributed else stages_at_once(config)
    costs = measured_costs(shapes, samples, layout.processes_here, found, in_process=in_process)
    return scaled(costs, mean / samples)


def speeds_here(config: TrainConfig, say: Say = lambda line: None) -> Speeds | None:
    """How fast the processes of `config` compute on this machine; None where figures are given or known otherwise.

    Departs from the paper: its estimate of a layer is FLOPs alone.
    """
    figures, (devices, distributed) = config.hardware, place(config)
    given = {figures.tflops, figures.memory_gb_per_second, figures.operation_microseconds} != {None}
    if figures.name != "auto" or given or devices[0] != "cpu" or torchrun() is not None:
        return None
    speeds = _timed(_reference(config, distributed), say)
    if speeds is None:
        return None
    if figures.link_microseconds is not None:
        speeds = replace(speeds, link_seconds=figures.link_microseconds * 1e-6)
    if figures.link_gb_per_second is not None:
        speeds = replace(speeds, link_byte_seconds=1e-9 / figures.link_gb_per_second)
    return speeds


@lru_cache
def _timed(reference: TrainConfig, say: Say) -> Speeds | None:
    """How fast the processes of `reference` are, if that can be timed; known once for each command."""
    shapes = profile_model(reference)
    layout = make_placement(reference, shapes)
    file = _file("hardware", _digest(reference, layout, shapes, reference_layers.SAMPLES))
    found = _remembered(file)
    if found is None or _drifted(found["probe_seconds"]):
        again = "" if found is None else ": its speed has changed"
        say(f"timing this machine for a few seconds (hardware=auto){again} ...")
        try:
            found = _measure(reference, shapes, layout, reference_layers.SAMPLES, _REFERENCE_SECONDS)
        except (ValueError, OSError) as error:  # what cannot be timed may still be trained
            say(f"this machine cannot be timed ({one_line(error)}); predicting by the figures of hardware=cpu")
            return None
        found |= {"probe_seconds": _probe(), "at": time.time()}
        _remember(file, found, layout, say)
    age = abs(time.time() - found["at"])
    when = "just now" if age < 60 else f"{duration(age)} ago" if age < 2 * _DAY else f"{age / _DAY:.0f} days ago"
    busy = ", while it was busy" if _busy(found, layout) else ""
    forward, graph, backward = (
        fitted(
            [cost.forward if direction < 2 else cost.backward for cost in shapes.costs],
            [layer[direction] for layer in found["alone"]],
            reference_layers.SAMPLES,
        )
        for direction in range(3)
    )
    sheet = by_sheet(load_hardware("cpu"), 1)  # of the link, where one process was timed alone
    latency, bandwidth = found["link"] or (sheet.link_seconds, 1 / sheet.link_byte_seconds)
    return Speeds(
        f"hardware=auto: this machine, timed {when}{busy} (spread {percent(found['spread'])})",
        forward,
        graph,
        backward,
        backward,
        latency,
        1 / bandwidth,
        found["set_up"] / sum(weights.tensors for weights in shapes.weights),
        slowdown_of(found),
        layout.processes,
        timed=True,
    )


def _reference(config: TrainConfig, distributed: bool) -> TrainConfig:
    """As many processes as those of `config` that compute at the same time, of as many threads; all else is the same
    for any configuration. A power of two, at most 16 of them: how much others slow each other down lies between."""
    threads = threads_of(config)
    at_once = min(config.partitions, max(1, usable_cores() // threads), _MOST_PROCESSES)
    layers = CustomConfig("custom", f"{reference_layers.__name__}:layers", None, None)
    augmentation = AugmentationConfig(None, False, 0, 0)
    images = ImagesConfig(
        "synthetic_images", reference_layers.IMAGE_SIZE, reference_layers.CLASSES, augmentation,
        train_samples=reference_layers.SAMPLES, test_samples=1,
    )  # fmt: skip
    return replace(
        config,
        partitions=2 ** (at_once.bit_length() - 1) if distributed else 1,
        micro_batches=1, schedule="gpipe", recompute="never", executor="auto", partition=PartitionConfig(None),
        preset=None, batch_size=reference_layers.SAMPLES, batch_tokens=None, epochs=1, max_steps=None, seed=0,
        gradient_clipping=0.0, label_smoothing=0.0, ema_decay=0.0, init_from=None, init_head="auto", freeze=None,
        evaluate_every_epochs=1, memory_format=memory_format_of(config), threads=threads, data_workers=0, resume=None,
        cost="figures", hardware=load_hardware("cpu"), model=layers, dataset=images,
        optimizer=SGDConfig("sgd", 0.0, False, 0.0), learning_rate=ConstantLearningRateConfig("constant", 1.0, 0.0),
    )  # fmt: skip


def _drifted(before: float) -> bool:
    """Whether the probe differs from what it was, time and again: it may meet a process that is just starting."""
    for _ in range(_PROBES):
        if abs(_probe() / before - 1) <= _DRIFT:
            return False
        time.sleep(_PROBES_APART_SECONDS)
    return True


def _probe() -> float:
    """Seconds of a small product, while as many run as there are cores: larger if other programs take them."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = torch.ones(256, 256)
    seconds: list[float] = []

    def work() -> None:
        taken = []
        began = time.perf_counter()
        while (now := time.perf_counter()) - began < _PROBE_SECONDS:
            torch.mm(matrix, matrix)
            taken.append(time.perf_counter() - now)
        seconds.append(sum(taken) / len(taken))

    threads = [Thread(target=work) for _ in range(min(usable_cores(), _MOST_PROCESSES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(threads_before)
    return median(seconds)


def _measure(
    config: TrainConfig, shapes: ModelProfile, layout: Placement, samples: int, seconds: float
) -> dict[str, Any]:
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
        make_placement(one, shapes),
        devices=layout.devices[:1] * len(parts),
        threads=layout.threads,
        memory_format=layout.memory_format,
    )
    found: dict[str, Any] = {}

    def on_message(message: object) -> None:
        assert isinstance(message, LayerTimes), message
        found.update(asdict(message))

    with interruptible() as interrupt:
        failure = run_task(config, layout, Measuring(segments, samples, seconds), on_message, interrupt)
    if failure is not None:
        raise ValueError(failure.text)
    return found


def _segments(config: TrainConfig, shapes: ModelProfile, samples: int, layout: Placement) -> tuple[int, ...]:
    """Layers that one device can hold at a time: half of it, as more than one process may measure."""
    memory = ActivationMemory(shapes.costs, shapes.inputs, samples, shapes.lengths)
    needed = [
        memory.graph_bytes(at, at + 1) + w.weight_bytes + w.gradient_bytes + w.optimizer_bytes
        for at, w in enumerate(shapes.weights)
    ]
    limit = resolved(config.hardware, layout.devices[0]).memory_gib
    available = int(limit * 2**30) if limit else usable_memory_bytes() // layout.processes_here
    return segment_layers(needed, available // 2)


def _unlimited(config: TrainConfig) -> Any:
    return replace(config.hardware, memory_gib=None)


def _digest(config: TrainConfig, layout: Placement, shapes: ModelProfile, samples: int) -> str:
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
        "layers": [[cost.name, cost.parameters, cost.forward.flops, cost.backward.flops] for cost in shapes.costs],
    }
    return digest_of("layer seconds", facts)


def _file(kind: str, digest: str) -> Path | None:
    """Where it is remembered; None: this user has no folder for it."""
    try:
        return cache_folder(None) / kind / f"{digest}.json"
    except ValueError:
        return None


def _remembered(file: Path | None) -> dict[str, Any] | None:
    try:
        found, digest = read_json(file) if file is not None else (None, None)
    except (OSError, ValueError, TypeError):  # not there, or damaged: measured again
        return None
    return found if digest == digest_of("what was timed", found) else None


def _remember(file: Path | None, found: dict[str, Any], layout: Placement, say: Say) -> None:
    """For the next command; not what was timed on a busy machine."""
    if file is None:
        return
    if _busy(found, layout):
        say("not remembered for the next time: other programs had the cores")
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps([found, digest_of("what was timed", found)]))
    except OSError as error:
        say(f"not remembered for the next time: {one_line(error)}")


def _busy(found: dict[str, Any], layout: Placement) -> bool:
    """Whether others had the cores; processes that take turns on too few of them get their share and no more."""
    fair = min(1.0, usable_cores() / (layout.processes_here * layout.threads))
    return bool(found["share_of_core"] < _OWN_SHARE * fair)
