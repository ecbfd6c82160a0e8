"""Times the layers of a model on the machine at hand, unless a data sheet gives their costs.

Workers that start like a run's do the timing, a second or two for two sizes of micro-batch, which predict all others.
The result is remembered in a file, named by a digest of everything that the seconds depend on, such as settings,
machine and version of torch. Under torchrun process 0 does it for all, so that all make the same cut.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from gpipe_cli.assembly.build import memory_format_of
from gpipe_cli.benchmark.layer_benchmark import TimingJob, TimingResult, measure
from gpipe_cli.config.pipeline_settings import Affects
from gpipe_cli.config.settings import PartitionConfig, TrainConfig, settings_affecting
from gpipe_cli.data.cache import cache_folder, compute_digest
from gpipe_cli.distributed.rendezvous import broadcast_text
from gpipe_cli.errors import InputError, error_text
from gpipe_cli.launch.fork_server import temporary_folder
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory
from gpipe_cli.planner.cost_model import MeasuredCosts, StepCosts, predicted_costs
from gpipe_cli.planner.data_sheet import gpu_of, replays_graphs, with_data_sheet
from gpipe_cli.planner.device_rates import rates_of_data_sheet
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.planner.process_layout import Layout
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.system.files import read_json, write_atomic
from gpipe_cli.system.gpus import Gpu, driver_version
from gpipe_cli.system.machine import cpu_model, usable_cores, usable_memory_bytes
from gpipe_cli.system.status_line import phase
from gpipe_cli.units import duration, plural, size

Log = Callable[[str], None]

_VERSION = 20  # raise this whenever the remembered values, or how they are measured, change
_SECONDS = 1.0  # how long passes over the model, of both sizes, are repeated by all processes
_PASS_SECONDS, _MAX_PASS_SECONDS = 0.1, 10.0  # of a pass, by the data sheet: aimed at, and beyond which none is timed
_MIN_SAMPLES = 4  # of the larger micro-batch
_MAX_PROCESSES = 16  # the most processes that are timed at the same time

_costs_of_command: dict[str, MeasuredCosts | None] = {}  # what this command has timed, or has found that it cannot time


def step_costs(config: TrainConfig, profile: ModelProfile, layout: Layout, log: Log) -> StepCosts:
    """The costs of all layers for a mean micro-batch of `config`, timed or by a data sheet.

    `log` is called before anything is timed, unless a terminal shows it as a phase.
    """
    times = _layer_times(config, profile, layout, log) if uses_measured_costs(config, layout) else None
    return predicted_costs(config, profile, layout, times)


def uses_measured_costs(config: TrainConfig, layout: Layout) -> bool:
    """Whether a plan of `config` uses layers timed on this machine."""
    hardware = config.hardware
    given = {hardware.tflops, hardware.memory_gb_per_second, hardware.operation_microseconds} != {None}
    return config.cost != "datasheet" and layout.is_local and not given and not config.dry_run


def _layer_times(config: TrainConfig, profile: ModelProfile, layout: Layout, log: Log) -> MeasuredCosts | None:
    """The times of the layers of `config`, looked up once for each command; None if they cannot be timed here."""
    settings = asdict(config)
    facts = {
        **{key: settings[key] for key in settings_affecting(Affects.SECONDS)},
        "graphs": _replays(config, profile, layout),
        "memory_format": memory_format_of(config),
        "processes": _processes(profile, layout),
        "threads": layout.threads,
        "lengths": profile.lengths,
        "layers": [[cost.name, cost.parameters, cost.forward.flops, cost.backward.flops] for cost in profile.costs],
        "splits": profile.splits,
    }
    key = compute_digest("layers of a model", [facts, settings["hardware"], _samples(config, profile)])
    if key not in _costs_of_command:

        def decide() -> str:
            times = _times_of_machine(config, profile, layout, facts, log)
            return json.dumps(times and asdict(times))

        text = decide() if layout.torchrun is None else broadcast_text(key, decide)
        decided = json.loads(text)
        pairs = {name: tuple(decided[name]) for name in ("samples", "all_threads", "scatter")} if decided else {}
        _costs_of_command[key] = decided and MeasuredCosts(**decided | pairs)
    times = _costs_of_command[key]
    if times is None:
        return None
    hardware = config.hardware
    if hardware.link_microseconds is not None:
        times = replace(times, link_seconds=hardware.link_microseconds * 1e-6)
    if hardware.link_gb_per_second is not None:
        times = replace(times, link_byte_seconds=1e-9 / hardware.link_gb_per_second)
    return times


def _times_of_machine(
    config: TrainConfig, profile: ModelProfile, layout: Layout, facts: dict[str, Any], log: Log
) -> MeasuredCosts | None:
    """The remembered times of the layers, or what a timing finds; None, after a message, if they cannot be timed."""
    devices = layout.devices
    if isinstance(samples := _sizes(config, profile, layout), str):
        log(f"the layers are not timed, as {samples}; predicting by a data sheet")
        return None
    facts = facts | _machine_facts(layout) | {"version": _VERSION, "samples": samples}
    file = _folder() / "costs" / f"{compute_digest('layer seconds', facts)}.json"
    timed = None if config.cost == "reprofile" else _read_cache(file)
    if timed is None:
        line = f"timing {plural(len(profile.costs), 'layer')} on this machine, to cut them evenly"
        if not phase(line):
            log(f"{line} ...")
        try:
            timed = asdict(_time(config, profile, layout, samples))
        except (InputError, OSError) as error:  # a machine that cannot be timed may still train
            log(f"the layers cannot be timed ({error_text(error)}); predicting by a data sheet")
            return None
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, json.dumps([timed, compute_digest("what was timed", timed)]))
        except OSError as error:
            log(f"not remembered for the next time: {error_text(error)}")
    data_sheet = rates_of_data_sheet(with_data_sheet(config.hardware, devices), 1)  # for a link that was not timed
    latency, per_byte = data_sheet.link_seconds, data_sheet.link_byte_seconds
    if timed["link"] is not None and layout.processes == layout.local_processes:
        latency, per_byte = timed["link"][0], 1 / timed["link"][1]
    smaller, larger = samples
    return MeasuredCosts(
        samples,
        timed["seconds"],
        timed["updates"],
        timed["set_up"],
        timed["slowdown"],
        facts["processes"],
        (usable_cores(), timed["faster"]) if layout.on_cpu else (layout.threads, 1.0),
        latency,
        per_byte,
        scatter=tuple(timed["scatter"]),
        source=f"layers timed on this machine, {smaller} and {plural(larger, 'sample')} at a time",
    )


def _samples(config: TrainConfig, profile: ModelProfile) -> int:
    """The samples of a pipeline's share of a mini-batch."""
    return mini_batch_samples(config, profile.lengths) // config.replicas


def _processes(profile: ModelProfile, layout: Layout) -> int:
    """How many processes, or GPUs of one process, are timed at the same time: as many as compute at the same time here,
    but on a CPU a power of two; between these the slowdown is interpolated."""
    processes = min(layout.local_processes, _MAX_PROCESSES, len(profile.costs))
    if gpus := _gpus(layout):
        return processes if layout.processes > 1 else len(gpus)
    concurrent_processes = min(processes, max(1, usable_cores() // layout.threads))
    return 2 ** (concurrent_processes.bit_length() - 1)


def _replays(config: TrainConfig, profile: ModelProfile, layout: Layout) -> bool:
    """Whether layers are timed as CUDA graphs. Layers that share something must be in one stage, where they are not."""
    return replays_graphs(config) and not layout.on_cpu and not profile.shared


def _sizes(config: TrainConfig, profile: ModelProfile, layout: Layout) -> tuple[int, int] | str:
    """The samples of the two micro-batches that are timed, whatever M is: a quarter of a pipeline's samples, and a
    quarter of that. They are halved while a pass takes long by the data sheet, or a layer does not fit the memory; the
    reason if even the smallest take too long or too much."""
    by_sheet = partial(predicted_costs, replace(config, partition=PartitionConfig(None)), profile, layout)

    def too_large(samples: int, max_seconds: float) -> str:
        seconds = sum(sum(layer[:3]) for layer in by_sheet(samples=samples).layers)
        if seconds > max_seconds:
            return f"a pass of {plural(samples, 'sample')} would take {duration(seconds)}"
        fullest, available = max(_bytes_of_layers(profile, samples)), _bytes_for_layers(config, layout)
        return f"a layer needs {size(fullest)}, and half the memory is {size(available)}" if fullest > available else ""

    samples = max(_MIN_SAMPLES, _samples(config, profile) // 4)
    while samples >= 2 * _MIN_SAMPLES and too_large(samples, _PASS_SECONDS):
        samples //= 2
    if why := too_large(samples, _MAX_PASS_SECONDS):
        return why
    return max(2, samples // 4), samples


def _time(config: TrainConfig, profile: ModelProfile, layout: Layout, samples: tuple[int, int]) -> TimingResult:
    """What the workers report (`layer_benchmark.measure`), for the slowest kind of GPU, as a step waits for all GPUs.
    Raises InputError if a worker fails."""
    single_run = replace(
        config,
        partitions=_processes(profile, layout), replicas=1, executor="auto" if layout.processes > 1 else "in_process",
        stages_per_process=None, placement=None, micro_batches=1, schedule="gpipe", recompute="never",
        partition=PartitionConfig(None), threads=layout.threads, compile=False,
        hardware=replace(config.hardware, memory_gib=None),
    )  # fmt: skip
    spec = make_pipeline_spec(single_run, profile)

    def cut(balance: tuple[int, ...]) -> PipelineSpec:
        partition = single_run.partition.with_balance(balance)
        return make_pipeline_spec(
            replace(single_run, partitions=len(balance), partition=partition, executor="in_process"), profile
        )

    segments = cut(_segments(profile, samples[1], _bytes_for_layers(config, layout)))
    layers = cut((1,) * len(profile.costs)) if _replays(config, profile, layout) else None
    max_threads = usable_cores() if layout.on_cpu else layout.threads
    timing = TimingJob(single_run, segments, layers, samples, _SECONDS, profile.splits, max_threads)
    messages: list[object] = []
    for on_kind in _each_kind_first(spec):
        failure = run_task(partial(measure, timing, on_kind), on_kind, config.timeout_seconds, messages.append)
        if failure is not None:
            raise InputError(failure.text)
    timed = [message for message in messages if isinstance(message, TimingResult)]
    return max(timed, key=lambda times: sum(map(sum, times.seconds[1])))


def _each_kind_first(spec: PipelineSpec) -> Iterator[PipelineSpec]:
    """`spec` once for each kind of GPU, with one of that kind first: the times of the first device are reported."""
    devices = spec.layout.devices
    first, kinds = devices[0], {gpu_of(device): device for device in reversed(devices)}
    for device in reversed(kinds.values()):
        swapped = {first: device, device: first}
        yield spec.on((tuple(swapped.get(device_name, device_name) for device_name in devices),))


def _segments(profile: ModelProfile, samples: int, available: int) -> tuple[int, ...]:
    """The number of consecutive layers in each segment, at least one: as many as fit in the `available` bytes."""
    segments, used = [0], 0
    for needed in _bytes_of_layers(profile, samples):
        if segments[-1] and used + needed > available:
            segments.append(0)
            used = 0
        segments[-1] += 1
        used += needed
    return tuple(segments)


def _bytes_of_layers(profile: ModelProfile, samples: int) -> Sequence[int]:
    memory = ActivationMemory(profile.costs, profile.inputs, samples, profile.lengths)
    return [
        memory.saved_amounts(at, at + 1).graph + w.weight_bytes + w.gradient_bytes + w.optimizer_bytes
        for at, w in enumerate(profile.weights)
    ]


def _bytes_for_layers(config: TrainConfig, layout: Layout) -> int:
    """Half of a device's memory, as several processes may measure at the same time."""
    limit = with_data_sheet(config.hardware, layout.devices).memory_gib
    available = int(limit * 2**30) if limit else usable_memory_bytes() // layout.local_processes
    return available // 2


def _machine_facts(layout: Layout) -> dict[str, Any]:
    """What the speed of layers depends on, apart from the settings."""
    gpus = _gpus(layout)
    return {
        "torch": metadata.version("torch"),
        "machine": [cpu_model(), usable_cores()],
        "gpus": [gpu._asdict() for gpu in gpus.values()],
        "driver": driver_version() if gpus else None,
    }


def _gpus(layout: Layout) -> dict[str, Gpu]:
    """The GPU behind each device; {} for CPUs."""
    return {device: gpu for device in sum(layout.replica_devices, ()) if (gpu := gpu_of(device)) is not None}


def _folder() -> Path:
    try:
        return cache_folder(None)
    except InputError:  # this user has none, as in a container: results are remembered until this command ends
        return temporary_folder()


def _read_cache(file: Path) -> Any:
    """The content of a remembered file; None if it is missing or damaged."""
    try:
        remembered, digest = read_json(file)
    except (OSError, ValueError, TypeError):
        return None
    return remembered if digest == compute_digest("what was timed", remembered) else None
