"""Times the layers of a model on the machine at hand (`cost=measured`), or the machine itself (`hardware=auto`).

Workers that start like those of a run do the timing. The result is cached in a file, named by a digest of everything
that the seconds depend on, such as settings, machine and version of torch. The machine is timed for a few seconds, with
a few layers of each kind (`reference_layers.py`). A CPU is timed again when a short probe shows that its speed has
changed; the result for a GPU is not cached if another program was using it.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache, partial
from importlib import metadata
from math import ceil
from pathlib import Path
from shutil import rmtree
from statistics import median
from threading import Thread
from typing import Any

import torch

from gpipe_cli.assembly.build import memory_format_of
from gpipe_cli.benchmark import reference_layers
from gpipe_cli.benchmark.layer_benchmark import Timing, measure
from gpipe_cli.config.groups import AugmentationConfig, CustomConfig, ImagesConfig, SGDConfig
from gpipe_cli.config.settings import MemoryFormat, PartitionConfig, TrainConfig, load_hardware
from gpipe_cli.config.typed import one_line
from gpipe_cli.data.cache import cache_folder, digest_of, locked
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import temporary_folder
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory
from gpipe_cli.pipeline.schedule.named_schedules import AUTO_SCHEDULE
from gpipe_cli.planner.cost_model import LayerTimes, StepCosts, measured_costs, predicted_costs
from gpipe_cli.planner.data_sheet import gpu_of, resolved
from gpipe_cli.planner.device_rates import DeviceRates, Figures, Rates, fit_rates, rates_of_sheet
from gpipe_cli.planner.layout import Layout, layout_of
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.step_schedule import mean_micro_batch
from gpipe_cli.system.files import read_json, write_whole
from gpipe_cli.system.gpus import Gpu, busy_share, driver_version
from gpipe_cli.system.machine import cpu_model, usable_cores, usable_memory_bytes
from gpipe_cli.system.phase import phase
from gpipe_cli.units import duration, percent, plural

Log = Callable[[str], None]

_VERSION = 11  # raise this whenever the cached values, or how they are measured, change
# The settings that a layer's seconds depend on, beside `compile` and those in `_machine_facts`.
_DECISIVE = ("model", "dataset", "optimizer", "label_smoothing", "ema_decay", "freeze")
_LAYER_SECONDS, _REFERENCE_SECONDS = 2.5, 0.4  # how long passes over each segment are repeated
_PROBE_SECONDS = 0.02
_DRIFT = 0.2  # relative change of the probe beyond which the machine is timed again
_PROBES, _PROBES_APART_SECONDS = 3, 0.3  # readings that must all have changed
_CALIBRATION = "calibration"  # the folder with the factors of earlier runs
_RUNS = 9  # number of the latest runs that calibrate a prediction
_BUSY_SHARE = 0.1  # a GPU that is busy for a larger share of the time serves another program, and not only a screen
_FORGOTTEN_SECONDS = 1.5  # after which `busy_share` shows nothing of what this command did before
_MOST_PROCESSES = 16  # the most processes that are timed at once
_DAY = 86400


def step_costs(config: TrainConfig, profile: ModelProfile, layout: Layout, log: Log) -> StepCosts:
    """The costs of all layers for a mean micro-batch of `config`, predicted or measured as `cost` says. Costs timed on
    this machine are calibrated by earlier runs of the same model, except with `cost=measured_anew`.

    `log` gets a line before anything is timed, unless a terminal shows it as a phase. Raises InputError if the stages
    cannot be placed, or the layers not timed.
    """
    if config.cost == "figures":
        costs = predicted_costs(config, profile, layout, machine_rates(config, layout, log))
        return _calibrated(config, layout, costs) if costs.basis == "timed_machine" else costs
    if layout.started is not None:
        raise InputError(
            f"cost={config.cost}: layers are not timed under torchrun, where all processes must come to the same cut; "
            "use cost=figures, or partition.balance=[...] as gpipe plan finds it"
        )
    mean = mean_micro_batch(config, profile.lengths)
    samples = ceil(mean)
    # any cut of a single pipeline will do to start the workers: each of them times all layers
    order = "1f1b" if config.schedule == AUTO_SCHEDULE else config.schedule  # what a search finds does not matter here
    one = replace(_without_limit(config), schedule=order, replicas=1, threads=layout.threads)
    spec = make_pipeline_spec(one, profile)

    def work() -> dict[str, Any]:
        return asdict(_measure(config, profile, spec, samples, _LAYER_SECONDS, apart=False))

    line = f"timing {len(profile.costs)} layers on micro-batches of {samples}, to cut evenly (cost={config.cost})"
    facts = _layer_facts(config, profile, layout, samples)
    try:
        found, _ = _timed("costs", facts, line, log, work, anew=config.cost == "measured_anew")
    except InputError as error:
        raise InputError(
            f"cost={config.cost}: the layers cannot be timed: {one_line(error)}; use cost=figures, or more "
            "micro_batches"
        ) from None
    times = LayerTimes(**_read(found))
    at_once = spec.layout.processes if spec.layout.distributed and config.replicas == 1 else layout.at_once
    sheet = rates_of_sheet(resolved(config.hardware, layout.devices), 1)  # for the link, if one process was timed alone
    per_byte = sheet.link_byte_seconds if times.link is None else 1 / times.link[1]
    costs = measured_costs(profile, mean, at_once, times, config.replicas, per_byte)
    return costs if config.cost == "measured_anew" else _calibrated(config, layout, costs)


def remember_run(config: TrainConfig, plan: Plan, step_seconds: float) -> None:
    """Remember the ratio of a run's step time to its prediction, to calibrate later plans of the same model.

    On shared CPUs a step took a fifth to a third longer than a timing of a few seconds had predicted. All K, M and
    schedules share one factor, the median of the last runs, so that it changes no choice between them. Runs on GPUs are
    not remembered: predictions for GPUs have not been compared with runs yet.
    """
    if plan.costs.basis not in ("timed_machine", "timed_layers") or _gpus(plan.layout):
        return
    factor, file = step_seconds / plan.step_seconds * plan.costs.calibration, _calibration_file(config, plan.layout)
    with suppress(OSError), locked(file.with_suffix(".lock")):  # without the file predictions stay as they are
        known = [*(_remembered(file) or [])[1 - _RUNS :], factor]
        write_whole(file, json.dumps([known, digest_of("what was timed", known)]))


def _calibrated(config: TrainConfig, layout: Layout, costs: StepCosts) -> StepCosts:
    factors = _remembered(_calibration_file(config, layout))
    if not factors:
        return costs
    middle = median(factors)
    source = f"{costs.source}, calibrated by {plural(len(factors), 'run')} of this model"
    spread = costs.spread if len(factors) == 1 else (min(factors) / middle, max(factors) / middle)
    return replace(costs.calibrated(middle), source=source, spread=spread)


def _calibration_file(config: TrainConfig, layout: Layout) -> Path:
    settings = asdict(config)
    decisive = (*_DECISIVE, "hardware", "compile", "replicas")
    facts = (
        {key: settings[key] for key in decisive} | _machine_facts(config, layout) | {"timed": config.cost != "figures"}
    )
    for key in ("processes", "threads"):  # a factor for some K alone would tip every comparison with other K
        del facts[key]
    return _folder() / _CALIBRATION / f"{digest_of('steps of runs', facts)}.json"


def machine_rates(config: TrainConfig, layout: Layout, log: Log) -> DeviceRates | None:
    """The rates of this machine for the processes of `config`, timed as `_reference` says; None where `hardware` or a
    data sheet gives them. With different GPUs or links the slowest counts.

    Departs from the paper, which estimates a layer by its FLOPs alone.
    """
    hardware = config.hardware
    if not times_machine(config, layout) or (rates := _timed_machine(_reference(config, layout), log)) is None:
        return None
    if hardware.link_microseconds is not None:
        rates = replace(rates, link_seconds=hardware.link_microseconds * 1e-6)
    if hardware.link_gb_per_second is not None:
        rates = replace(rates, link_byte_seconds=1e-9 / hardware.link_gb_per_second)
    return rates


def memory_format_seconds(config: TrainConfig, profile: ModelProfile, log: Log) -> dict[MemoryFormat, float]:
    """The predicted seconds of a model's layers in each memory format, by rates of one GPU that is timed in both; {}
    where `memory_format` is given, or where nothing has to be timed or can be.

    Only of convolutions in float32 on a GPU it is not known which is faster: cuDNN's kernels for channels last are made
    for tensor cores, which do not multiply float32. One GPU is timed whatever K is, so that K decides no bit.
    """
    if config.memory_format != "auto" or config.precision != "float32" or config.text:
        return {}
    one = replace(
        _without_limit(config), partitions=1, replicas=1, executor="in_process", stages_per_process=None,
        placement=None, schedule="gpipe", partition=PartitionConfig(None),
    )  # fmt: skip
    layout = layout_of(one)
    found: dict[MemoryFormat, float] = {}
    for memory_format in () if layout.on_cpu else ("channels_last", "contiguous"):
        rates = machine_rates(replace(one, memory_format=memory_format), layout, log)
        if rates is None:
            return {}
        layers = predicted_costs(one, profile, layout, rates).layers
        found[memory_format] = sum(layer.forward + layer.backward for layer in layers)
    return found


def times_machine(config: TrainConfig, layout: Layout) -> bool:
    """Whether a plan of `config` with `cost=figures` uses rates timed on this machine."""
    hardware = config.hardware
    given = {hardware.tflops, hardware.memory_gb_per_second, hardware.operation_microseconds} != {None}
    return layout.here and not given and layout.started is None and not config.dry_run


@lru_cache
def _timed_machine(reference: TrainConfig, log: Log) -> DeviceRates | None:
    """The timed rates of `reference`, looked up once for each command; None if this machine cannot be timed."""
    facts = _machine_facts(reference, layout_of(reference))
    line = "timing this machine briefly, to cut the model evenly (hardware=auto)"
    try:
        found, at = _timed("hardware", facts, line, log, partial(_time_machine, reference))
    except (InputError, OSError) as error:  # a machine that cannot be timed may still train
        log(f"this machine cannot be timed ({one_line(error)}); predicting by a data sheet")
        return None
    age = abs(time.time() - at)
    when = "just now" if age < 60 else f"{duration(age)} ago" if age < 2 * _DAY else f"{age / _DAY:.0f} days ago"
    names = list(dict.fromkeys(gpu["name"] for gpu in facts["gpus"]))
    what = f"the slowest of {', '.join(names)}" if names[1:] else "".join(names) or "this machine"
    parts: dict[str, Any] = {name: Rates(**found[name]) for name in ("forward", "graph", "backward")}
    return DeviceRates(**_read(found) | parts | {"source": f"hardware=auto: {what}, timed {when}"})


def _read(found: dict[str, Any]) -> dict[str, Any]:
    """The fields of LayerTimes or DeviceRates, with those restored that JSON holds in another form."""
    return found | {"figures": Figures(**found["figures"]), "spread": tuple(found["spread"])}


def _time_machine(reference: TrainConfig) -> dict[str, Any]:
    """Time the reference layers and fit rates to them; returns the fields of DeviceRates as JSON can hold them."""
    samples = reference.batch_size
    assert samples is not None
    profile = profile_model(reference)
    spec = make_pipeline_spec(reference, profile)
    times = _measure(reference, profile, spec, samples, _REFERENCE_SECONDS, apart=True)
    works = ([cost.forward for cost in profile.costs],) * 2 + ([cost.backward for cost in profile.costs],)
    figures = None if spec.layout.on_cpu else times.figures
    forward, graph, backward = (
        fit_rates(work, [layer[direction] for layer in times.alone], samples, figures)
        for direction, work in enumerate(works)
    )
    sheet = rates_of_sheet(load_hardware("cpu"), 1)  # for the link, if one process was timed alone
    latency, bandwidth = times.link or (sheet.link_seconds, 1 / sheet.link_byte_seconds)
    rates = DeviceRates(
        source="",  # filled in by `_timed_machine`: it says how long ago this was
        basis="timed_machine",
        forward=forward,
        graph=graph,
        backward=backward,
        link_seconds=latency,
        link_byte_seconds=1 / bandwidth,
        tensor_seconds=times.set_up / sum(weights.tensors for weights in profile.weights),
        slowdown=times.slowdown,
        together=spec.layout.processes,
        figures=times.figures,
        spread=times.spread,
    )
    return asdict(rates)


def _reference(config: TrainConfig, layout: Layout) -> TrainConfig:
    """The settings that time the machine for `config`: as many processes and threads as compute at the same time, or
    one process with as many GPUs. Model and data do not depend on `config`. There are at most 16 processes, and on a
    CPU a power of two; between these the slowdown is interpolated."""
    processes = min(layout.processes, _MOST_PROCESSES)
    if gpus := _gpus(layout):
        partitions, made = processes if layout.processes > 1 else len(gpus), reference_layers.layers_for_gpu
    else:
        at_once = min(processes, max(1, usable_cores() // layout.threads))
        partitions, made = 2 ** (at_once.bit_length() - 1), reference_layers.layers
    layers = CustomConfig("custom", f"{reference_layers.__name__}:{made.__name__}", None, None)
    samples = reference_layers.samples_for(min((gpu.memory_bytes for gpu in gpus.values()), default=None))
    augmentation = AugmentationConfig(None, False, 0, 0)
    images = ImagesConfig(
        "synthetic_images", reference_layers.IMAGE_SIZE, reference_layers.CLASSES, augmentation,
        train_samples=samples, test_samples=1,
    )  # fmt: skip
    return replace(
        config,
        partitions=partitions, replicas=1, executor="auto" if layout.processes > 1 else "in_process",
        stages_per_process=None, placement=None, micro_batches=1, schedule="gpipe", recompute="never",
        partition=PartitionConfig(None), batch_size=samples, batch_tokens=None, seed=0, label_smoothing=0.0,
        ema_decay=0.0, init_from=None, init_head="auto", freeze=None, memory_format=memory_format_of(config),
        threads=layout.threads, compile=False, cost="figures", hardware=load_hardware("auto"), model=layers,
        dataset=images, optimizer=SGDConfig("sgd", 0.0, False, 0.0),
    )  # fmt: skip


def _drifted(before: float) -> bool:
    """Whether the probe differs from `before` every time: a single one may meet a process that is just starting."""
    for _ in range(_PROBES):
        if abs(_probe() / before - 1) <= _DRIFT:
            return False
        time.sleep(_PROBES_APART_SECONDS)
    return True


def _probe() -> float:
    """Seconds of a small matrix product while every core computes one: longer if other programs take cores."""
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
    config: TrainConfig, profile: ModelProfile, spec: PipelineSpec, samples: int, seconds: float, *, apart: bool
) -> LayerTimes:
    """The times that the workers of `spec` report (`layer_benchmark.measure`), for the slowest kind of GPU, as a step
    waits for all GPUs. Raises InputError if a worker fails."""
    parts = _segments(config, profile, samples, spec)
    partition = config.partition.by_hand(parts)
    one = replace(_without_limit(config), partitions=len(parts), partition=partition, executor="in_process")
    segments = make_pipeline_spec(one, profile)
    timing = Timing(config, segments, samples, seconds, apart, profile.splits)
    found: list[object] = []
    for placed in _each_kind_first(spec):
        failure = run_task(partial(measure, timing, placed), placed, config.timeout_seconds, found.append)
        if failure is not None:
            raise InputError(failure.text)
    times = [one for one in found if isinstance(one, LayerTimes)]
    return max(times, key=lambda one: sum(map(sum, one.alone)))


def _each_kind_first(spec: PipelineSpec) -> Iterator[PipelineSpec]:
    """`spec` once for each kind of GPU, with one of that kind first: the times of the first device are reported."""
    devices = spec.layout.devices
    first, kinds = devices[0], {gpu_of(device): device for device in reversed(devices)}
    for device in reversed(kinds.values()):
        swapped = {first: device, device: first}
        yield spec.on((tuple(swapped.get(one, one) for one in devices),))


def _segments(config: TrainConfig, profile: ModelProfile, samples: int, spec: PipelineSpec) -> tuple[int, ...]:
    """The number of consecutive layers in each segment, at least one: as many as fit in half of a device's memory, as
    several processes may measure at once."""
    memory = ActivationMemory(profile.costs, profile.inputs, samples, profile.lengths)
    limit = resolved(config.hardware, spec.layout.devices).memory_gib
    available = int(limit * 2**30) if limit else usable_memory_bytes() // spec.layout.processes_here
    segments, held = [0], 0
    for at, w in enumerate(profile.weights):
        needed = memory.held(at, at + 1).graph + w.weight_bytes + w.gradient_bytes + w.optimizer_bytes
        if segments[-1] and held + needed > available // 2:
            segments.append(0)
            held = 0
        segments[-1] += 1
        held += needed
    return tuple(segments)


def _without_limit(config: TrainConfig) -> TrainConfig:
    """The settings without recomputation and without a memory limit."""
    return replace(config, recompute="never", hardware=replace(config.hardware, memory_gib=None))


def _machine_facts(config: TrainConfig, layout: Layout) -> dict[str, Any]:
    """What the speed of processes on this machine depends on."""
    gpus = _gpus(layout)
    return {
        "version": _VERSION,
        "torch": metadata.version("torch"),
        "machine": [cpu_model(), usable_cores()],
        "gpus": [asdict(gpu) for gpu in gpus.values()],
        "driver": driver_version() if gpus else None,
        "deterministic": config.deterministic if gpus else None,  # decides which algorithms GPUs use
        "processes": layout.processes,
        "threads": layout.threads,
        "memory_format": memory_format_of(config),
        "precision": config.precision,
    }


def _gpus(layout: Layout) -> dict[str, Gpu]:
    """The GPU behind each device; {} for CPUs."""
    return {device: gpu for device in sum(layout.replica_devices, ()) if (gpu := gpu_of(device)) is not None}


def _layer_facts(config: TrainConfig, profile: ModelProfile, layout: Layout, samples: int) -> dict[str, Any]:
    """What the seconds of the layers of a model depend on."""
    settings = asdict(config)
    return {
        **{key: settings[key] for key in _DECISIVE},
        **_machine_facts(config, layout),
        "compile": config.compile,
        "samples": samples,
        "lengths": profile.lengths,
        "layers": [[cost.name, cost.parameters, cost.forward.flops, cost.backward.flops] for cost in profile.costs],
        **({"splits": True} if profile.splits else {}),
    }


def _timed(
    kind: str, facts: Mapping[str, Any], line: str, log: Log, work: Callable[[], dict[str, Any]], *, anew: bool = False
) -> tuple[dict[str, Any], float]:
    """The result of `work` and the time.time() of it. A cached result is used: of layers always, so that a plan and the
    training after it have the same cut; of a CPU if its speed has not changed. Rates of busy GPUs are not cached.

    The file's name is a digest of `facts`; `log` gets `line` before anything is timed. Raises what `work` raises.
    """
    file = _folder() / kind / f"{digest_of('layer seconds', facts)}.json"
    remembered = None if anew else _remembered(file)
    machine, gpus = kind == "hardware", len(facts["gpus"])
    if remembered is None or (machine and not gpus and _drifted(remembered["probe_seconds"])):
        doing = line if remembered is None else "timing this machine again, as its speed has changed (hardware=auto)"
        if not phase(doing):
            log(f"{doing} ...")
        busy = _busy(gpus) if machine else 0.0
        remembered = {"found": work(), "probe_seconds": _probe(), "at": time.time()}
        if busy > _BUSY_SHARE:
            log(f"not remembered for the next time: another program kept a GPU busy ({percent(busy)} of the time)")
            return remembered["found"], remembered["at"]
        try:
            if file.exists():  # the factors of earlier runs refer to the timing that is replaced
                rmtree(_folder() / _CALIBRATION, ignore_errors=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps([remembered, digest_of("what was timed", remembered)]))
        except OSError as error:
            log(f"not remembered for the next time: {one_line(error)}")
    return remembered["found"], remembered["at"]


def _busy(gpus: int) -> float:
    """The greatest share of the time in which another program keeps one of `gpus` GPUs busy, 0 to 1."""
    busy = max(map(busy_share, range(gpus)), default=0.0)
    if busy > _BUSY_SHARE:  # perhaps by an earlier timing, or a run, of this command
        time.sleep(_FORGOTTEN_SECONDS)
        busy = max(map(busy_share, range(gpus)))
    return busy


def _folder() -> Path:
    try:
        return cache_folder(None)
    except InputError:  # this user has none, as in a container: results are cached until this command ends
        return temporary_folder()


def _remembered(file: Path) -> Any:
    """The content of a cache file; None if it is missing or damaged."""
    try:
        remembered, digest = read_json(file)
    except (OSError, ValueError, TypeError):
        return None
    return remembered if digest == digest_of("what was timed", remembered) else None
