"""The parent's side of `gpipe check`: runs a real mini-batch in every supported way, and compares the results.

The paper promises that no result differs (sections 1 and 2.2), and gpipe that no bit does. Its tests prove that for the
bundled models; `gpipe check` does so for the user's own model, data and machine. This module decides which variants
there are and which processes run them.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Literal

from rich.console import Console

from gpipe_cli.commands.prepare_run import check_feasible
from gpipe_cli.config.groups import group_choice
from gpipe_cli.config.settings import PartitionConfig, TrainConfig
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import temporary_folder
from gpipe_cli.launch.job import Failure, Reason
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.planner.process_layout import default_threads
from gpipe_cli.reporting.run.lines import print_fields, show_error
from gpipe_cli.reporting.tables.check import CheckReport, show_check
from gpipe_cli.schedule.named_schedules import ORDERS, SCHEDULES, order
from gpipe_cli.schedule.schedule import RecomputeMode
from gpipe_cli.training.data_feed import check_data
from gpipe_cli.training.fine_tuning import find_weights
from gpipe_cli.units import plural
from gpipe_cli.verify import self_check as verify

_BASIC_MODES: tuple[RecomputeMode, ...] = ("never", "always")  # recompute modes to try with further schedules


Specs = dict[verify.Variant, PipelineSpec]


def run_check(config: TrainConfig, folder: Path) -> int:
    """Check the configuration and write check.json into `folder`. Returns the exit code: 0 identical, 1 a variant
    differs or fails. Raises InputError for what the user can fix."""
    # identical bits need the same number of threads in every variant, however many processes share the cores
    threads = config.threads or default_threads(config.partitions)
    # without a memory limit every recompute mode can be planned, and is tried
    hardware = replace(config.hardware, memory_gib=None)
    mode = "except_last" if config.recompute == "auto" else config.recompute
    replicas = config.replicas
    all_micro_batches = replicas * config.micro_batches
    config = replace(
        config, threads=threads, hardware=hardware, recompute=mode, replicas=1, micro_batches=all_micro_batches,
        graphs=False,  # what a layer returns is not seen when its stage is replayed
    )  # fmt: skip
    console = Console()
    check_feasible(config)
    source = None if config.init_from is None else find_weights(config, show_error)
    check_data(config, source=source)
    check = _Check(config, replicas)
    with (
        tempfile.TemporaryDirectory(dir=temporary_folder()) as references,
        console.status("starting ...") as status,  # shown in a terminal only
    ):

        def on_message(message: object) -> None:
            match message:
                case verify.MiniBatchRead():
                    print_fields(console, check.facts(message.sizes))
                case verify.ReferenceDone():
                    check.loss = message.loss
                case verify.Row():
                    check.rows.setdefault(message.variant, message)  # where several stages fail, the first is reported
            status.update(f"{len(check.rows)} of {len(check.variants)} runs")

        for specs in check.groups:
            waiting = check.worth_running(specs)
            if waiting:
                spec = waiting[max(waiting)]
                pipelines = spec.layout.replicas
                variant_config = replace(config, replicas=pipelines, micro_batches=all_micro_batches // pipelines)
                task = verify.Check(variant_config, waiting, folder=Path(references), source=source)
                failure = run_task(task, spec, config.timeout_seconds, on_message)
                if failure is not None:
                    check.record_failure(waiting, failure, single=spec.layout.processes == 1)
    report = CheckReport(tuple(check.rows[variant] for variant in check.variants), check.loss, asdict(config))
    show_check(console, folder, report)
    return 0 if report.identical else 1


class _Check:
    """The variants of a check, and their results so far."""

    def __init__(self, config: TrainConfig, replicas: int = 1) -> None:
        """`config` has a single pipeline; runs of `replicas` pipelines, if that is above 1, are compared with it."""
        self._config = config
        self.rows: dict[verify.Variant, verify.Row] = {}
        self.loss: float | None = None  # the loss of the reference
        # each variant's spec, or why it is left out; the variants run in this order, which is also the report's
        self.variants = dict(_variants(config, replicas))
        # (replicas, *process of each stage) -> the specs that such processes run; the references' group comes first
        groups: dict[tuple[int, ...], Specs] = {}
        for variant, spec in self.variants.items():
            if isinstance(spec, str):
                self._add([variant], "left out", spec)
            else:
                layout = spec.layout
                key = (layout.replicas, *(layout.rank_of_stage if layout.distributed else ()))
                groups.setdefault(key, {})[variant] = spec
        self.groups = list(groups.values())

    def worth_running(self, specs: Specs) -> Specs:
        """The variants to run; those that failed, or were left out, in a single process get the row `left out`."""
        in_process = {variant: self.rows.get(variant._replace(executor="in_process")) for variant in specs}
        without = [variant for variant, row in in_process.items() if row and row.verdict in ("fails", "left out")]
        self._add(without, "left out", "what has no result in one process is not run in several")
        return {variant: spec for variant, spec in specs.items() if variant not in self.rows}

    def record_failure(self, specs: Specs, failure: Failure, *, single: bool) -> None:
        """Record that the workers of these variants have failed; the variants not reached are left out. `single`: a
        single worker ran. Raises InputError for what the user can fix."""
        if failure.reason is Reason.USER and not self.rows:
            raise InputError(failure.text)
        missing = [variant for variant in specs if variant not in self.rows]
        reported = any(self.rows[variant].verdict == "fails" for variant in specs if variant in self.rows)
        if missing and (single or not reported):
            self._add([missing.pop(0)], "fails", failure.text)  # the worker was killed, or could not report the failure
        self._add(missing, "left out", "not run: processes that work together ended with the failure before")

    def _add(self, variants: Sequence[verify.Variant], verdict: verify.Verdict, text: str) -> None:
        self.rows |= {variant: verify.Row(variant, verdict, text=text) for variant in variants}

    def facts(self, sizes: Sequence[int]) -> list[tuple[str, str]]:
        """Labels and texts of the lines that describe what is checked."""
        config = self._config
        layers = len(next(iter(self.groups[0].values())).layer_names[0])
        pieces = plural(len(sizes), "micro-batch")
        return [
            ("model", f"{group_choice(config.model)}: {plural(layers, 'layer')}"),
            ("mini-batch", f"{plural(sum(sizes), 'sample')} of {config.dataset.name} in {pieces}"),
            ("variants", f"{len(self.variants) - 1}, {plural(config.threads or 1, 'thread')} for each process"),
            *([("pytorch", "plain PyTorch is compared with compile=false only")] if config.compile else ()),
        ]


def _variants(config: TrainConfig, replicas: int) -> Iterator[tuple[verify.Variant, PipelineSpec | str]]:
    """All variants, each with its spec, or why it is left out. The order is by schedule, partitions, recompute mode and
    executor; other micro-batches come last."""
    profile = profile_model(config)
    whole = config.micro_batches  # micro-batches of all replicas together
    usual = replace(config, schedule=verify.REFERENCES[0], stages_per_process=None, placement=None)
    specs: dict[tuple[verify.Executor, int], PipelineSpec | str] = {}
    for k in range(config.partitions, 0, -1):  # from K down, so that errors of K itself are raised as bad input
        cut = _with_partitions(usual, k)
        specs["in_process", k] = make_pipeline_spec(replace(cut, executor="in_process"), profile)
        if k > 1 and cut.executor != "in_process":
            distributed = make_pipeline_spec(cut, profile)
            why = f"executor=distributed: {plural(k, 'stage')} would be in one process"
            specs["distributed", k] = distributed if distributed.layout.distributed else why
    counts = range(1, config.partitions + 1)
    for k in counts if replicas > 1 else ():
        replicated = replace(_with_partitions(usual, k), replicas=replicas, micro_batches=whole // replicas)
        specs["replicas", k] = make_pipeline_spec(replicated, profile)
    if not config.compile:  # compiled code differs in the last digits, which batch norm amplifies
        specs["pytorch", 1] = specs["in_process", 1]
    first, *_ = verify.references(whole)
    for schedule, k, mode, executor in product(verify.REFERENCES, counts, verify.MODES, verify.EXECUTORS):
        variant = verify.Variant(k, whole, schedule, mode, executor)
        spec = specs.get((executor, k))
        if spec is None or (executor == "pytorch" and variant != first._replace(executor="pytorch")):
            continue
        if isinstance(spec, PipelineSpec):
            spec = replace(spec, order=order(schedule, k, spec.order.micro_batches), recompute=mode)
        yield variant, spec
    for cut, modes in _more_configs(config, usual, replicas):
        executors: tuple[Literal["in_process", "distributed"], ...] = ("in_process", "distributed")
        for mode, where in product(modes, executors[:1] if config.executor == "in_process" else executors):
            spec = make_pipeline_spec(replace(cut, executor=where), profile)
            if spec.layout.distributed == (where == "distributed"):
                variant = verify.Variant(cut.partitions, whole, cut.schedule, mode, where)
                yield variant, replace(spec, recompute=mode)
    if whole > 1:
        yield first._replace(micro_batches=1), specs["in_process", 1]


def _with_partitions(config: TrainConfig, partitions: int) -> TrainConfig:
    """The configuration with the model cut into `partitions`; a given balance is for the configured K only."""
    if partitions == config.partitions:
        return config
    return replace(config, partitions=partitions, partition=PartitionConfig(None))


def _more_configs(
    config: TrainConfig, usual: TrainConfig, replicas: int
) -> Iterator[tuple[TrainConfig, Sequence[RecomputeMode]]]:
    """Configurations with further schedules, and the recompute modes to try: interleaved with the most partitions that
    stages_per_process divides, zero_bubble, the different schedules on a V, with an even number of partitions on
    several devices, and the given schedule if it has no name."""
    if config.partitions == 1:
        return
    stages = max(2, config.stages_per_process or 2)  # of each process
    if partitions := config.partitions - config.partitions % stages:
        yield (
            replace(_with_partitions(usual, partitions), schedule="interleaved", stages_per_process=stages),
            _BASIC_MODES,
        )
    if not config.compile:
        yield replace(usual, schedule="zero_bubble"), _BASIC_MODES
        even = _with_partitions(usual, config.partitions - config.partitions % 2)
        v_names = [name for name, rule in ORDERS.items() if rule.placement == "v"] if even.partitions > 2 else []
        name_of_order = {order(name, even.partitions, even.micro_batches): name for name in reversed(v_names)}
        for name in reversed(name_of_order.values()):
            yield replace(even, schedule=name), _BASIC_MODES
    if config.schedule not in SCHEDULES and replicas == 1:  # a schedule file has the M of a single pipeline
        yield config, [mode for mode in verify.MODES if mode == config.recompute]
