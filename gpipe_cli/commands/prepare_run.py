"""What a command decides before anything runs: the `auto` settings, the plan, and the pipeline's spec."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

from gpipe_cli.assembly.build import preprocessing_of
from gpipe_cli.benchmark.machine_timing import step_costs
from gpipe_cli.config.groups import PREPROCESSING_KEYS, ImagesConfig
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.torchrun_env import Torchrun
from gpipe_cli.errors import InvalidSettingError, format_value
from gpipe_cli.models.preprocessing import Preprocessing
from gpipe_cli.planner.auto_settings import choose
from gpipe_cli.planner.data_sheet import computes_on_gpu, number_of_gpus
from gpipe_cli.planner.model_profile import ModelProfile, check_single_samples, number_of_layers, profile_model
from gpipe_cli.planner.pipeline_spec import PipelineSpec, spec_from_plan
from gpipe_cli.planner.plan import Choice, Plan
from gpipe_cli.planner.process_layout import Layout, default_threads, layout_of
from gpipe_cli.schedule.named_schedules import ORDERS
from gpipe_cli.schedule.partitioner import check_balance, check_partitions
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.system.status_line import phase
from gpipe_cli.units import percent, plural

_DOMINANT_FRACTION = 0.9  # share of the work on one of several processes above which a line is printed; our choice
_IMBALANCE_RATIO = 1.1  # ratio of the largest to the mean work of a process above which a line is printed; our choice


@dataclass(frozen=True)
class PreparedRun:
    """A run ready to begin: every setting has its value, also `threads`, on which the last bits of sums depend."""

    plan: Plan
    spec: PipelineSpec
    notes: tuple[tuple[str, str], ...]  # lines of the banner: label, text

    @property
    def config(self) -> TrainConfig:
        return self.plan.config

    @property
    def profile(self) -> ModelProfile:
        return self.plan.profile


def prepare(
    config: TrainConfig,
    auto: Collection[str],
    log: Callable[[str], None],
    torchrun: Torchrun | None = None,
    *,
    other_machine: bool = False,
    saved: TrainConfig | None = None,
) -> PreparedRun:
    """Choose the settings in `auto`, plan the step, and partition the model, after `check_feasible`.

    `log` gets a line before each slow part; `torchrun`: this process, if torchrun started it; `other_machine`: the plan
    is for another machine; `saved`: the configuration of the run that is resumed. Raises InputError for what cannot be
    built, partitioned or placed, or does not fit the memory.
    """
    config = _with_memory_format(config)
    phase("tracing the layers, to know what each computes, keeps and sends")
    profile = profile_model(config)
    phase(f"choosing {', '.join(auto)}, which predicts many steps" if auto else "planning a step")
    costs_of = partial(step_costs, log=log)
    plan = choose(config, auto, profile, costs_of, torchrun, other_machine=other_machine)
    if plan.config.batch_size is not None:
        check_single_samples(plan.config, plan.config.batch_size, profile)
    plan = replace(plan, config=replace(plan.config, threads=plan.layout.threads))
    config, spec = plan.config, spec_from_plan(plan)
    notes = [("layer costs", f"given by {plan.costs.weighted_by}")] if plan.costs.weighted_by else []
    notes += [("chosen", _choice_text(comparison)) for comparison in plan.choices]
    notes += [*_preprocessing_note(config)]
    if config.compile:
        notes.append(("planned", NOT_COMPILED))
    notes += [*_no_effect_notes(config, spec), *_threads_note(config, saved, spec.layout.processes)]
    notes += [*_device_sharing_note(spec.layout), *_imbalance_notes(config, spec)]
    return PreparedRun(plan, spec, tuple(notes))


def _with_memory_format(config: TrainConfig) -> TrainConfig:
    """The settings with `contiguous` for images in float32 on the GPUs of this machine: cuDNN's kernels for channels
    last are made for tensor cores, which do not multiply float32. It decides the last bits of results, as threads do,
    so a run keeps both wherever it goes on."""
    undecided = config.memory_format == "auto" and config.precision == "float32" and not config.text
    on_gpu = config.hardware.is_this_machine and computes_on_gpu(config)
    return replace(config, memory_format="contiguous") if undecided and on_gpu else config


def check_feasible(config: TrainConfig, auto: Collection[str] = (), torchrun: Torchrun | None = None) -> None:
    """Raises InputError, before layers are traced and timed, for missing devices and for a number of stages that the
    devices or the layers do not allow; `auto` and `torchrun`: as of `prepare`."""
    if config.graphs is True and not (computes_on_gpu(config) or number_of_gpus(config)):
        why = "only a GPU replays graphs, and the layers compute on the CPU; use graphs=auto"
        raise InvalidSettingError("graphs", True, why)
    phase("building the model")
    layers, balance = number_of_layers(config), config.partition.balance
    if not {"partitions", "replicas"} & set(auto):
        layout_of(config, torchrun)
    if "partitions" in auto:
        return
    if balance is not None:
        check_balance(balance, layers, config.partitions)
    else:
        check_partitions(layers, config.partitions)


# What a plan with compile=true leaves out.
NOT_COMPILED = "as with compile=false: compiled layers keep other activations, and take other times"


def _threads_note(config: TrainConfig, saved: TrainConfig | None, processes: int) -> Iterator[tuple[str, str]]:
    """A line of the banner if a resumed run's threads differ from before, or from those that its K would get now."""
    if saved is None:
        return
    threads, before = config.threads, saved.threads
    usual = default_threads(processes)
    if before not in (None, threads):
        yield "threads", f"{threads} for each process, {before} before: from here on the last digits are others"
    elif threads != usual:
        yield "threads", f"{threads} for each process, as before: the same bits; threads=null chooses again"


def _preprocessing_note(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """A line of the banner if there are pretrained weights, or images are scaled in another way than usual."""
    dataset = config.dataset
    if not isinstance(dataset, ImagesConfig):
        return
    ours, trained = _preprocessing_text(dataset), None
    if config.init_from is None and config.resume is None:
        trained = preprocessing_of(config)
    if trained is not None:
        theirs = _preprocessing_text(trained)
        was = (
            f"; {trained.weights} was trained with {theirs}"
            if theirs != ours
            else f": as {trained.weights} was trained"
        )
        yield "pixels", ours + was
    elif any(
        getattr(dataset, field.name) != field.default for field in fields(dataset) if field.name in PREPROCESSING_KEYS
    ):
        yield "pixels", ours


def _preprocessing_text(images: ImagesConfig | Preprocessing) -> str:
    """`224 pixels, mean [0.485,0.456,0.406], deviation [0.229,0.224,0.225], bicubic`."""
    mean, std = format_value(images.mean), format_value(images.std)
    return f"{images.image_size} pixels, mean {mean}, deviation {std}, {images.interpolation}"


def _device_sharing_note(layout: Layout) -> Iterator[tuple[str, str]]:
    """A line of the banner if stages share a device, or threads a core: then a speed is not a pipeline's."""
    processes = layout.local_processes
    threads, cores = plural(layout.threads, "thread"), plural(usable_cores(), "core")
    if layout.short_of_cores and processes == 1:
        yield "cores", f"{threads} share {cores}; threads={usable_cores()} is faster"
    elif layout.short_of_cores:
        yield "cores", f"{processes} processes of {threads} share {cores}: not a pipeline's speed"
    elif layout.one_device:
        yield "devices", f"{len(layout.devices)} stages share {layout.devices[0]}: not a pipeline's speed"


def _no_effect_notes(config: TrainConfig, spec: PipelineSpec) -> Iterator[tuple[str, str]]:
    """A line if a schedule or a placement needs more stages to make a difference."""
    looped, one_each = "partitions={} stages_per_process=2", spec.layout.processes_per_pipeline == spec.partitions > 1
    if config.schedule == "interleaved" and one_each:
        use = looped.format(2 * config.partitions)
        yield "schedule", f"interleaved is 1f1b where a process has one stage; {use} interleaves"
    elif config.placement in ("looped", "v") and one_each:
        use = looped.format(max(4, config.partitions))
        yield "placement", f"{config.placement} is neighbours where a process has one stage; {use} gives it two"
    elif config.partitions == 2 and config.schedule in ORDERS and ORDERS[config.schedule].placement:
        yield "schedule", f"{config.schedule} has both stages on one device; partitions=4 has two on each of two"


def _imbalance_notes(config: TrainConfig, spec: PipelineSpec) -> Iterator[tuple[str, str]]:
    """A line if one process has nearly all of the work, as where one layer has; or if processes' numbers of stages make
    their work uneven: the partitioner balances stages only."""
    layout, partitions = spec.layout, spec.partitions
    processes = layout.processes
    of_process = [layout.stages_of(process) for process in range(processes)]
    stages = [len(stages_of_process) for stages_of_process in of_process]
    work = [sum(spec.cost[k] for k in stages_of_process) for stages_of_process in of_process]
    most = max(range(processes), key=work.__getitem__)
    share = f"process {most} has {percent(work[most] / sum(work))} of the work"
    if processes > 1 and work[most] > _DOMINANT_FRACTION * sum(work):
        yield "processes", f"{share}, so that the others wait: hardly a pipeline; partitions=1 sends nothing"
        return
    if stages[most] == min(stages) or work[most] * processes <= _IMBALANCE_RATIO * sum(work):
        return
    each = -(-partitions // processes)  # stages per process, divided as evenly as possible
    use = ""
    if config.stages_per_process not in (None, each):
        use = f"; stages_per_process={each} is more even"
    elif each * processes <= sum(map(len, spec.layer_names)):
        use = f"; partitions={each * processes} is more even"
    yield "processes", f"{' + '.join(map(str, stages))} stages: {share}{use}"


def _choice_text(comparison: Choice) -> str:
    """`micro_batches=8: 0.145 s a step predicted; compared 1: 0.31, 2: 0.20, 4: 0.16, 16: 0.15`"""
    chosen = comparison.chosen
    assert chosen is not None
    assert chosen.plan is not None
    others = [tried for tried in comparison.candidates if tried is not chosen]
    tried = [
        f"{other.value}: {other.reason if other.plan is None else f'{other.plan.step_seconds:.3g} s'}"
        for other in others
    ]
    names, step = comparison.setting.replace(", ", " and "), f"{chosen.plan.step_seconds:.3g} s a step predicted"
    return f"{names} {chosen.value}: {step}; compared {', '.join(tried) or 'with nothing'}"
