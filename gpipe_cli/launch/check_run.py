"""`gpipe check`: one real mini-batch in every way that there is to run it, and whether that changes anything.

The paper promises that it does not (sections 1 and 2.2), and the laws of this program that no bit changes. Tests prove
that for the models that come with it; here the user's own model, data and machine are proven. This is the parent's
side: which variants there are, who runs them, and what their rows mean together with what the probes found.
"""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Literal

from rich.console import Console

from gpipe_cli.config.model import choice_of
from gpipe_cli.config.settings import PartitionConfig, TrainConfig
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.launch.fork_server import temporary_folder
from gpipe_cli.launch.job import Checking, Reason
from gpipe_cli.launch.supervisor import OnMessage, run_task
from gpipe_cli.pipeline.profile.layer_probes import Finding
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.placement import Placement, make_placement
from gpipe_cli.planner.shared_layers import SeparatedError
from gpipe_cli.reporting.run.lines import show_error, show_facts
from gpipe_cli.reporting.tables.check import CheckReport, show_check, write_check
from gpipe_cli.system.interrupts import Interrupt, interruptible
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.training.fine_tuning import find_weights
from gpipe_cli.units import plural
from gpipe_cli.verify.differences import Digests, Key, LayersWatched, ReferenceDone, Row, Variant, Verdict

Schedule = Literal["gpipe", "1f1b"]
Mode = Literal["never", "except_last", "always"]
Way = Literal["in_process", "distributed", "pytorch"]

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
MODES: tuple[Mode, ...] = ("never", "except_last", "always")


def run_check(config: TrainConfig, folder: Path) -> int:
    """Check the configuration; leaves check.json in `folder`. Returns the exit code: 0 identical, 1 it differs or
    failed, 130 interrupted.

    Raises ValueError, one line, for what the user can mend.
    """
    if torchrun() is not None:
        raise ValueError("torchrun: gpipe check starts its own processes; call it without torchrun")
    # the same bits need the same number of threads, however many processes share the cores
    threads = config.threads or max(1, usable_cores() // config.partitions)
    # every mode is tried, whatever there is memory for
    hardware = replace(config.hardware, memory_gib=None)
    mode = "except_last" if config.recompute == "auto" else config.recompute
    config = replace(config, threads=threads, hardware=hardware, recompute=mode)
    console = Console()
    source = None if config.init_from is None else find_weights(config, show_error)
    checked = _Checked(config)
    with (
        interruptible() as interrupt,
        tempfile.TemporaryDirectory(dir=temporary_folder()) as gradients,
        console.status("starting ...") if console.is_terminal else nullcontext() as status,
    ):

        def on_message(message: object) -> None:
            checked.on_message(message)
            if isinstance(message, LayersWatched):
                show_facts(console, checked.facts(message))
            if status is not None:
                status.update(f"{len(checked.rows)} of {checked.expected} runs")

        for variants in checked.runs():
            _run(config, checked, variants, source, on_message, Path(gradients), interrupt)
    report = checked.report()
    try:
        write_check(folder, report)
    finally:  # a verdict that cannot be written is shown all the same
        show_check(console, folder, report)
    return 0 if report.identical else 1


def _run(
    config: TrainConfig,
    checked: "_Checked",
    variants: Sequence[Variant],
    source: Path | None,
    on_message: OnMessage,
    folder: Path,
    interrupt: Interrupt,
) -> None:
    """Have workers run variants, in order; what they do not come to is left out."""
    waiting = checked.worth_running(variants)
    if not waiting:
        return
    placement = max((variant.placement for variant in waiting), key=lambda placement: placement.partitions)
    task = Checking(tuple(waiting), checked.references, folder, source)
    failure = run_task(config, placement, task, on_message, interrupt)
    if failure is None:
        return
    if failure.reason is Reason.USER and not checked.rows:
        raise ValueError(failure.text)
    missing = checked.missing(waiting)
    if missing and not any(checked.failed(variant) for variant in waiting if variant.executor == "distributed"):
        checked.add(missing.pop(0), "fails", failure.text)  # it was killed, or could not report it itself
    for variant in missing:
        checked.add(variant, "left out", "not run: processes that work together ended with the failure before")


class _Checked:
    """The variants, and what is known of them so far."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._done: dict[Key, Row] = {}
        self.references: dict[str, Digests] = {}
        self._findings: list[Finding] = []
        self._watched: LayersWatched | None = None
        self._together: dict[int, Placement] = {}  # by partitions: all stages in one process
        self._apart: dict[int, Placement] = {}  # each in one of its own
        self._refused: list[Row] = []
        self._shared: tuple[str, ...] = ()
        try:
            shapes = profile_model(config)
        except ChangedInputError as error:
            self._findings.append(Finding("in_place", error.layer, str(error)))
            self._refuse(config.partitions, "in_process", "fails", str(error), error.layer)
            return
        self._shared = tuple(shared.text for shared in shapes.shared)
        for partitions in range(config.partitions, 0, -1):  # the greatest first: what is wrong with it is bad input
            self._place(partitions, shapes)

    @property
    def rows(self) -> list[Row]:
        return [*self._done.values(), *self._refused]

    @property
    def expected(self) -> int:
        return sum(len(variants) for variants in self.runs()) + len(self._refused)

    def runs(self) -> list[list[Variant]]:
        """The variants, by the processes that run them one after another; what others are compared with comes first."""
        if 1 not in self._together:
            return []
        whole = self._config.micro_batches

        def variant(placement: Placement, executor: Way, schedule: Schedule, mode: Mode, m: int = whole) -> Variant:
            return Variant(replace(placement, recompute=mode), m, schedule, mode, executor)

        together = [
            variant(self._together[k], "in_process", schedule, mode)
            for schedule, mode in product(SCHEDULES, MODES)
            for k in sorted(self._together)
        ]
        together.insert(1, variant(self._together[1], "pytorch", SCHEDULES[0], MODES[0]))
        if whole > 1:
            together.append(variant(self._together[1], "in_process", SCHEDULES[0], MODES[0], 1))
        apart = [
            [variant(self._apart[k], "distributed", schedule, mode) for schedule, mode in product(SCHEDULES, MODES)]
            for k in sorted(self._apart)
        ]
        return [together, *apart]

    def on_message(self, message: object) -> None:
        """Take a worker's message."""
        match message:
            case LayersWatched():
                self._findings += message.findings
                self._watched = message
            case ReferenceDone():
                self.references[message.schedule] = message.digests
            case Row():
                self._done.setdefault(message.key, message)  # of several stages that fail the first

    def add(self, variant: Variant, verdict: Verdict, text: str) -> None:
        self._done.setdefault(variant.key, variant.row(verdict, text=text))

    def missing(self, variants: Sequence[Variant]) -> list[Variant]:
        """Those that have no row yet."""
        return [variant for variant in variants if variant.key not in self._done]

    def failed(self, variant: Variant) -> bool:
        row = self._done.get(variant.key)
        return row is not None and row.verdict == "fails"

    def worth_running(self, variants: Sequence[Variant]) -> list[Variant]:
        """Leaves out what cannot be compared with anything, and what has failed in one process already."""
        worth = []
        for variant in variants:
            same = self._done.get(replace(variant, executor="in_process").key)
            if variant.executor == "distributed" and same is not None and same.verdict == "fails":
                self.add(variant, "left out", "what fails in one process is not run in several")
            elif variant.executor == "distributed" and variant.schedule not in self.references:
                self.add(variant, "left out", f"the reference of {variant.schedule} failed")
            else:
                worth.append(variant)
        return worth

    def facts(self, found: LayersWatched) -> list[tuple[str, str]]:
        """What is checked, in labelled lines."""
        config = self._config
        layers = sum(len(names) for names in self._together[1].layer_names)
        pieces = plural(len(found.micro_batch_sizes), "micro-batch")
        return [
            ("model", f"{choice_of(config.model)}: {plural(layers, 'layer')}"),
            ("mini-batch", f"{plural(sum(found.micro_batch_sizes), 'sample')} of {config.dataset.name} in {pieces}"),
            ("variants", f"{self.expected - 1}, {plural(config.threads or 1, 'thread')} for each process"),
        ]

    def report(self) -> CheckReport:
        first = self.references.get(SCHEDULES[0])
        return CheckReport(
            rows=tuple(sorted((self._explained(row) for row in self.rows), key=_order)),
            findings=tuple(self._findings),
            shared=self._shared,
            loss=None if first is None else first.loss,
            config=asdict(self._config),
        )

    def _explained(self, row: Row) -> Row:
        """With the reason, where a probe has found it."""
        if not row.bad:
            return row
        if row.micro_batches != self._config.micro_batches and row.verdict == "differs":
            assert self._watched is not None
            if self._watched.batch_norm:
                why = "batch norm normalizes each micro-batch (paper, section 2.2)"
                return replace(row, verdict="differs, as it must", text=why)
            if self._watched.draws:
                why = "random numbers, as for dropout, are drawn for each micro-batch"
                return replace(row, verdict="differs, as it must", text=why)
        own = [finding for finding in self._findings if finding.layer == row.layer]
        if row.verdict == "differs" and row.layer is None:  # its sums have another order: no layer can be named
            own = [finding for finding in self._findings if finding.kind in ("random", "state")]
        if not own and row.verdict == "fails" and row.partitions in self._together:
            begin = {names[0] for names in self._together[row.partitions].layer_names[1:]}
            own = [finding for finding in self._findings if finding.kind == "in_place" and finding.layer in begin]
        why = "; ".join(finding.text for finding in own if finding.text not in row.text)
        return replace(row, text=f"{row.text}; {why}" if row.text and why else row.text or why)

    def _place(self, partitions: int, shapes: ModelProfile) -> None:
        config = self._config
        if partitions < config.partitions:  # a cut that was given is for K
            config = replace(config, partitions=partitions, partition=PartitionConfig(None))
        try:
            self._together[partitions] = make_placement(replace(config, executor="in_process"), shapes)
        except SeparatedError as error:
            self._refuse(partitions, "in_process", "fails", str(error))
            return
        if partitions > 1 and config.executor != "in_process":
            placement = make_placement(config, shapes)
            if placement.distributed:
                self._apart[partitions] = placement
            else:
                text = f"executor=distributed: {partitions} processes would need a GPU each"
                self._refuse(partitions, "distributed", "left out", text)

    def _refuse(self, partitions: int, executor: str, verdict: Verdict, text: str, layer: str | None = None) -> None:
        """Rows of what cannot be run at all."""
        m = self._config.micro_batches
        self._refused += [
            Row(partitions, m, schedule, mode, executor, verdict, layer=layer, text=text)
            for schedule, mode in product(SCHEDULES, MODES)
        ]


def _order(row: Row) -> tuple[int, ...]:
    """As the table has them: by schedule, partitions, mode and executor; other micro-batches last."""
    return (
        -row.micro_batches,
        SCHEDULES.index(row.schedule),
        row.partitions,
        MODES.index(row.recompute),
        ("in_process", "pytorch", "distributed").index(row.executor),
    )
