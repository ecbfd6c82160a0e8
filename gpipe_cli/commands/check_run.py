"""The parent's side of `gpipe check`: one real mini-batch, run in every supported way, and whether any result differs.

The paper promises that none does (sections 1 and 2.2), and this program that no bit does. Its tests prove that for the
bundled models; `gpipe check` does so for the user's own model, data and machine. This module decides which variants
there are and which processes run them.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal

from rich.console import Console

from gpipe_cli.config.groups import choice_of
from gpipe_cli.config.settings import PartitionConfig, TrainConfig
from gpipe_cli.distributed.torchrun import refuse_torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import temporary_folder
from gpipe_cli.launch.job import Failure, Reason
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.pipeline.schedule.named_schedules import ORDERS, SCHEDULES, order
from gpipe_cli.pipeline.schedule.schedule import RecomputeMode
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.reporting.run.lines import show_error, show_facts
from gpipe_cli.reporting.tables.check import CheckReport, show_check, write_check
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.training.fine_tuning import find_weights
from gpipe_cli.units import plural
from gpipe_cli.verify import variants as verify

_FEWER: tuple[RecomputeMode, ...] = ("never", "always")  # recompute modes tried with further schedules


def run_check(config: TrainConfig, folder: Path) -> int:
    """Check the configuration and write check.json into `folder`. Returns the exit code: 0 identical, 1 a variant
    differs or fails. Raises InputError for what the user can fix."""
    refuse_torchrun("gpipe check starts its own processes; call it without torchrun")
    # identical bits need the same number of threads in every variant, however many processes share the cores
    threads = config.threads or max(1, usable_cores() // config.partitions)
    # without a memory limit every recompute mode can be planned, and is tried
    hardware = replace(config.hardware, memory_gib=None)
    mode = "except_last" if config.recompute == "auto" else config.recompute
    replicas, all_of_them = config.replicas, config.replicas * config.micro_batches
    config = replace(config, threads=threads, hardware=hardware, recompute=mode, replicas=1, micro_batches=all_of_them)
    console = Console()
    source = None if config.init_from is None else find_weights(config, show_error)
    checked = _Checked(config, replicas)
    with (
        tempfile.TemporaryDirectory(dir=temporary_folder()) as gradients,
        console.status("starting ...") as status,  # shown in a terminal only
    ):

        def on_message(message: object) -> None:
            checked.on_message(message)
            if isinstance(message, verify.MiniBatchRead):
                show_facts(console, checked.facts(message.sizes))
            status.update(f"{len(checked.rows)} of {checked.expected} runs")

        for specs, variants in checked.runs:
            waiting = checked.worth_running(variants)
            if waiting:
                spec = specs[max(specs)]
                there = spec.layout.replicas
                own = replace(config, replicas=there, micro_batches=all_of_them // there)
                task = partial(verify.check, own, specs, variants=waiting, earlier=checked.references,
                               folder=Path(gradients), source=source)  # fmt: skip
                failure = run_task(task, spec, config.timeout_seconds, on_message)
                checked.end(waiting, failure, alone=spec.layout.processes == 1)
    report = checked.report()
    try:
        write_check(folder, report)
    finally:  # show the verdict even if it cannot be written
        show_check(console, folder, report)
    return 0 if report.identical else 1


def _cut(config: TrainConfig, partitions: int) -> TrainConfig:
    """The configuration with the model cut into `partitions`; a given balance is for the configured K only."""
    if partitions == config.partitions:
        return config
    return replace(config, partitions=partitions, partition=PartitionConfig(None))


def _of_schedules(specs: Iterable[PipelineSpec]) -> dict[tuple[int, str], PipelineSpec]:
    """For each spec and each of the two reference schedules, the spec with that schedule's order."""
    return {
        (one.partitions, name): replace(one, order=order(name, one.partitions, one.order.micro_batches))
        for one, name in product(specs, verify.REFERENCES)
    }


class _Checked:
    """The variants of a check, and their results so far."""

    def __init__(self, config: TrainConfig, replicas: int = 1) -> None:
        """`config` has a single pipeline; runs of `replicas` pipelines, if that is above 1, are compared with it."""
        self._config, self._replicas = config, replicas
        self.rows: dict[verify.Variant, verify.Row] = {}
        self.references: dict[str, verify.ReferenceDone] = {}  # schedule -> its reference
        # (replicas, *process of each stage) -> the specs and variants that such processes run one after another; the
        # group with the references comes first.
        self._groups: dict[tuple[int, ...], tuple[dict[tuple[int, str], PipelineSpec], list[verify.Variant]]] = {}
        self._together: dict[int, PipelineSpec] = {}  # partitions -> the spec with all stages in one process
        self._place(profile_model(config))
        self.runs = list(self._groups.values())
        self.expected = len(self.rows) + sum(len(variants) for _, variants in self.runs)

    def _place(self, profile: ModelProfile) -> None:
        """Place every number of partitions from K down, so that what is wrong with K itself is raised as bad input."""
        apart: dict[int, PipelineSpec] = {}  # partitions -> the spec with a process per stage
        usual = replace(self._config, schedule=verify.REFERENCES[0], stages_per_process=None, placement=None)
        for partitions in range(usual.partitions, 0, -1):
            config = _cut(usual, partitions)
            self._together[partitions] = make_pipeline_spec(replace(config, executor="in_process"), profile)
            if partitions > 1 and config.executor != "in_process":
                spec = make_pipeline_spec(config, profile)
                if spec.layout.distributed:
                    apart[partitions] = spec
                else:
                    text = f"executor=distributed: {plural(partitions, 'stage')} would be in one process"
                    self._add(self._ways(partitions, "distributed"), "left out", text)
        whole = usual.micro_batches
        together = [
            verify.Variant(partitions, whole, schedule, mode, "in_process")
            for schedule, mode in product(verify.REFERENCES, verify.MODES)
            for partitions in sorted(self._together)
        ]
        if not usual.compile:  # compiled code differs in the last digits, which batch norm amplifies
            together.insert(1, together[0]._replace(executor="pytorch"))
        if whole > 1:
            together.append(together[0]._replace(micro_batches=1))
        self._run(_of_schedules(self._together.values()), together)
        for k in sorted(apart):
            self._run(_of_schedules([apart[k]]), self._ways(k, "distributed"))
        for config, modes in self._further(usual):
            self._place_further(config, modes, profile)
        for k in sorted(self._together) if self._replicas > 1 else ():
            several = replace(_cut(usual, k), replicas=self._replicas, micro_batches=whole // self._replicas)
            self._run(_of_schedules([make_pipeline_spec(several, profile)]), self._ways(k, "replicas"))

    def _further(self, usual: TrainConfig) -> Iterator[tuple[TrainConfig, tuple[RecomputeMode, ...]]]:
        """Configurations with further schedules, and the recompute modes to try: zero_bubble, those on a V that differ,
        with an even number of partitions that has several devices, interleaved with the most partitions that
        stages_per_process divides, and the given schedule if it is not a named one."""
        config = self._config
        if config.partitions == 1:
            return
        if not config.compile:
            yield replace(usual, schedule="zero_bubble"), _FEWER
            even = _cut(usual, config.partitions - config.partitions % 2)
            on_v = [name for name, one in ORDERS.items() if one.placement == "v"] if even.partitions > 2 else []
            different = {order(name, even.partitions, even.micro_batches): name for name in reversed(on_v)}
            for name in different.values():
                yield replace(even, schedule=name), _FEWER
        each = max(2, config.stages_per_process or 2)
        if partitions := config.partitions - config.partitions % each:
            interleaved = replace(_cut(usual, partitions), schedule="interleaved", stages_per_process=each)
            yield interleaved, _FEWER
        if config.schedule not in SCHEDULES and self._replicas == 1:  # a schedule file has the M of a single pipeline
            mode = next(mode for mode in verify.MODES if mode == config.recompute)
            yield config, (mode,)

    def _place_further(self, config: TrainConfig, modes: Sequence[RecomputeMode], profile: ModelProfile) -> None:
        """Add these variants in one process and, if the layout can be distributed, in several."""
        k, name = config.partitions, config.schedule
        executors: tuple[Literal["in_process", "distributed"], ...] = ("in_process", "distributed")
        for executor in executors[:1] if config.executor == "in_process" else executors:
            spec = make_pipeline_spec(replace(config, executor=executor), profile)
            if spec.layout.distributed == (executor == "distributed"):
                variants = [verify.Variant(k, config.micro_batches, name, mode, executor) for mode in modes]
                self._run({(k, name): spec}, variants)

    def _run(self, specs: dict[tuple[int, str], PipelineSpec], variants: Sequence[verify.Variant]) -> None:
        """Add variants to the group whose processes have the same stages."""
        layout = next(iter(specs.values())).layout
        key = (layout.replicas, *(layout.process_of_stage if layout.distributed else ()))
        known, there = self._groups.setdefault(key, ({}, []))
        known |= specs
        there += variants

    def _ways(self, partitions: int, executor: verify.Executor) -> list[verify.Variant]:
        """A variant for each recompute mode and each order of summation (`REFERENCES`)."""
        whole = self._config.micro_batches
        return [verify.Variant(partitions, whole, *way, executor) for way in product(verify.REFERENCES, verify.MODES)]

    def on_message(self, message: object) -> None:
        """Handle a worker's message."""
        match message:
            case verify.ReferenceDone():
                self.references[message.schedule] = message
            case verify.Row():
                self.rows.setdefault(message.variant, message)  # where several stages fail, the first one is reported

    def worth_running(self, variants: Sequence[verify.Variant]) -> list[verify.Variant]:
        """The variants to run. Those that failed, or were left out, in one process get the row `left out` instead."""
        in_process = {variant: self.rows.get(variant._replace(executor="in_process")) for variant in variants}
        without = [v for v, alone in in_process.items() if alone is not None and alone.verdict in ("fails", "left out")]
        self._add(without, "left out", "what has no result in one process is not run in several")
        return [variant for variant in variants if variant not in self.rows]

    def end(self, variants: Sequence[verify.Variant], failure: Failure | None, *, alone: bool) -> None:
        """Record that the workers of these variants have ended; after a failure the variants not reached are left out.
        `alone`: there was one worker. Raises InputError for what the user can fix."""
        if failure is None:
            return
        if failure.reason is Reason.USER and not self.rows:
            raise InputError(failure.text)
        missing = [variant for variant in variants if variant not in self.rows]
        told = any(self.rows[variant].verdict == "fails" for variant in variants if variant in self.rows)
        if missing and (alone or not told):
            self._add([missing.pop(0)], "fails", failure.text)  # the worker was killed, or could not report the failure
        self._add(missing, "left out", "not run: processes that work together ended with the failure before")

    def _add(self, variants: Sequence[verify.Variant], verdict: verify.Verdict, text: str) -> None:
        self.rows |= {variant: verify.Row(*variant, verdict, text=text) for variant in variants}

    def facts(self, sizes: Sequence[int]) -> list[tuple[str, str]]:
        """What is checked, as lines (label, text)."""
        config = self._config
        layers, pieces = len(self._together[1].layer_names[0]), plural(len(sizes), "micro-batch")
        return [
            ("model", f"{choice_of(config.model)}: {plural(layers, 'layer')}"),
            ("mini-batch", f"{plural(sum(sizes), 'sample')} of {config.dataset.name} in {pieces}"),
            ("variants", f"{self.expected - 1}, {plural(config.threads or 1, 'thread')} for each process"),
            *([("pytorch", "plain PyTorch is compared with compile=false only")] if config.compile else ()),
        ]

    def report(self) -> CheckReport:
        first = self.references.get(verify.REFERENCES[0])
        return CheckReport(
            rows=tuple(sorted(self.rows.values(), key=_order)),
            loss=None if first is None else first.loss,
            config=asdict(self._config),
        )


def _order(row: verify.Row) -> tuple[int, ...]:
    """Sort key of the rows: schedule, partitions, recompute mode, executor; other micro-batches come last."""
    return (
        -row.micro_batches,
        (*SCHEDULES, row.schedule).index(row.schedule),
        row.partitions,
        verify.MODES.index(row.recompute),
        verify.EXECUTORS.index(row.executor),
    )
