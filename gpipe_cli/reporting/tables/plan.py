"""How `gpipe plan` shows a plan: layers, the cut, memory of the stages, the step, the choices.

Consecutive layers or stages that are alike share a row: the paper's largest Transformer has 1,663 layers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from gpipe_cli.config.groups import model_name
from gpipe_cli.config.settings import SAMPLE_WORDS, flatten
from gpipe_cli.errors import format_value
from gpipe_cli.planner.make_plan import baseline_of
from gpipe_cli.planner.plan import PLAN, Choice, Plan, PlannedLayer, PlannedStage
from gpipe_cli.reporting.run.description import dataset_label, precision_note
from gpipe_cli.reporting.run.lines import print_fields, show_line, show_text
from gpipe_cli.reporting.run.step_breakdown import show_shares
from gpipe_cli.reporting.tables.table import SYMBOLS, Column, Table, show_table
from gpipe_cli.results.files import write_result
from gpipe_cli.units import (
    count,
    duration,
    duration_range,
    memory_unit,
    operations,
    percent,
    plural,
    rate,
    round_preserving_sum,
    size,
)

MAX_ROWS = 40  # a table with more rows shows only the first and the last rows
MAX_SKIPS = 3  # further skips are only counted
GRID_LINES = 34  # the most lines of a grid on the console: two blocks of sixteen stages


class SweptPlan(NamedTuple):
    """A combination of settings in a sweep of plans."""

    settings: Mapping[str, object]  # settings that vary
    error: str | None  # why it cannot be planned
    plan: Plan | None

    def tree(self) -> dict[str, Any]:
        """The entries of the plan as in plan.json, with the settings and the error."""
        return {"settings": self.settings, "error": self.error} | (self.plan.tree() if self.plan else {})


def show_plan(console: Console, plan: Plan, folder: Path, *, verbose: bool = False) -> None:
    """Writes plan.json into ``folder``, which must exist, and shows the plan, the answers first; if ``verbose``, with
    its layers, the parts of the memory and the grid. Raises OSError if it could not be written."""
    try:
        write_result(folder, plan.tree(), PLAN)
    finally:
        show_text(console, "plan: everything below is predicted; nothing was run", "bold")
        print_fields(console, [*_answers(plan), *_what_is_planned(plan)])
        console.print()
        if verbose:
            _show_layers(console, plan.layers)
        _show_stages(console, plan.stages, plan.micro_batches)
        if verbose:
            _show_memory(console, plan)
        for choice in plan.choices:
            _show_choice(console, choice)
        if verbose:
            _show_grid(console, plan.grid)
        print_fields(console, _details(plan))
        show_shares(console, {"predicted": plan.breakdown._asdict()}, plan.ideal_bubble, plan)


def stage_table(plan: Plan) -> Table:
    """A row for each stage, for programs; keys of its memory are dotted, `memory.total_bytes`."""
    rows = [{"stage": k, **dict(flatten(stage))} for k, stage in enumerate(plan.tree()["stages"])]
    return Table("stages", [Column(key, values=[row[key] for row in rows]) for key in rows[0]])


def plan_table(plans: Sequence[SweptPlan]) -> Table:
    """A row for each plan of a sweep, with the settings that vary, or the error."""
    varied = [key for key in plans[0].settings if key not in SYMBOLS]

    def column(key: str, heading: str, form: Callable[[Any], str], value_of: Callable[[Plan], Any]) -> Column:
        """A number of each plan; where planning failed, the requested setting `key`."""
        values = [swept.settings.get(key) if swept.plan is None else value_of(swept.plan) for swept in plans]
        return Column.of(key, heading, values, form)

    columns = [
        column("partitions", "K", format_value, lambda plan: len(plan.stages)),
        column("micro_batches", "M", format_value, attrgetter("micro_batches")),
        *(Column.of(key, key, [swept.settings[key] for swept in plans], format_value) for key in varied),
        column("step_seconds", "step", _format_step, attrgetter("step_seconds")),
        column("samples_per_second", "samples/s", rate, attrgetter("samples_per_second")),
        column("bubble", "bubble", percent, attrgetter("breakdown.bubble")),
        column("memory_bytes", "fullest stage", size, lambda plan: max(plan.held_bytes)),
        column("imbalance", "slowest/mean", percent, attrgetter("imbalance")),
        column("utilisation", "utilisation", percent, attrgetter("utilisation")),
        Column.of("error", "error", [swept.error for swept in plans], format_value, printed=False),
    ]
    return Table("plans", columns, 2 + len(varied))


def show_plans(console: Console, plans: Sequence[SweptPlan]) -> None:
    """Shows the table of a sweep, the reasons why planning failed, and the paths of the plans' pages."""
    show_table(console, plan_table(plans), elsewhere="format=csv")
    console.print()
    refused = dict.fromkeys(("impossible", swept.error) for swept in plans if swept.error is not None)
    pages = (swept.plan.files["page"] for swept in plans if swept.plan is not None)
    print_fields(console, [*refused, *(("page", page) for page in pages)])


def _what_is_planned(plan: Plan) -> Iterator[tuple[str, str]]:
    hardware = plan.hardware
    shared = f", shared by {hardware.memory_stages} stages" if (hardware.memory_stages or 1) > 1 else ""
    layers, partitions = plural(len(plan.layers), "layer"), plural(len(plan.stages), "partition")
    yield "model", f"{model_name(plan.config.model)}: {layers}, {count(plan.parameters)} parameters"
    yield "dataset", dataset_label(plan.config.dataset)
    replicas = f", R = {plan.config.replicas} replicas, of which one is shown" if plan.config.replicas > 1 else ""
    yield "pipeline", f"K = {partitions}, M = {plural(plan.micro_batches, 'micro-batch')}{replicas}"
    yield "schedule", f"{plan.schedule_name}, recompute {plan.recompute_name}"
    batch = plural(plan.step_samples, SAMPLE_WORDS[plan.config.task])
    tokens = plan.step_tokens
    yield "mini-batch", batch if tokens is None else f"{batch}, {plural(tokens, 'token')}"
    yield from precision_note(hardware.precision, hardware.computes_in)
    peaks = {name: peak for name, peak in hardware.peak_flops_per_second.items() if peak is not None}
    sheet = ", ".join(f"{peak / 1e12:g} in {name}" for name, peak in peaks.items()).replace(" in", " TFLOP/s in", 1)
    yield "hardware", f"{hardware.name}{f': {sheet}' if sheet else ''}"
    if (assumed := hardware.flops_per_second) is not None:
        precision = "float32" if hardware.computes_in == "float32" else hardware.precision
        yield "", f"assumed: {operations(assumed)}FLOP/s{f' in {precision}' if 'float32' in peaks else ''}"
    figures = [] if hardware.memory_bytes is None else [f"{size(hardware.memory_bytes)} of memory{shared}"]
    if hardware.link_bytes_per_second is not None:
        figures.append(f"links {operations(hardware.link_bytes_per_second)}B/s")
    if hardware.link_latency_seconds is not None:
        figures.append(f"latency {1e6 * hardware.link_latency_seconds:.3g} us")
    if figures:
        yield "", ", ".join(figures)
    yield "based on", hardware.source


def _answers(plan: Plan) -> Iterator[tuple[str, str]]:
    speed = f"{rate(plan.samples_per_second)} {SAMPLE_WORDS[plan.config.task]}s/s"
    tokens = plan.tokens_per_second
    speeds = speed if tokens is None else f"{rate(tokens)} tokens/s, {speed}"
    step = _format_step(plan.step_seconds) if plan.step_range is None else duration_range(plan.step_range)
    yield "predicted", f"{step} a step, {speeds}"
    baseline = baseline_of(plan)
    over = "one device with the whole mini-batch, nothing recomputed"
    if baseline is None:
        yield "speed-up", f"unknown: {over}, does not fit"
    else:
        threads = f", {plural(baseline.layout.threads, 'thread')}" if baseline.layout.shares_cores else ""
        speed_up = baseline.step_seconds / plan.step_seconds
        yield "speed-up", f"{speed_up:.2f} times as fast as {over}{threads}: {_format_step(baseline.step_seconds)}"
    held = plan.held_bytes
    limit = plan.layout.limit_bytes
    memory = f"{size(max(held))} on stage {held.index(max(held))}, the fullest"
    shared = len(plan.device_bytes) < len(held)
    fits = "; give hardware.memory_gib to see whether it fits" if limit is None else f": fits {size(limit)}"
    yield "memory", memory + (fits if not shared or limit is None else "")
    if shared and (most := max(plan.device_bytes)):
        fits = "" if limit is None else f": fits {size(limit)} per stage"
        yield "", f"{size(most)} on device {plan.device_bytes.index(most)}, the fullest, at its peak{fits}"


def _details(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.utilisation is not None:
        yield "utilisation", f"{percent(plan.utilisation)} of these figures, predicted, without recomputation"
        if plan.recomputed_flops:
            yield "", f"recomputation adds {percent(plan.recomputed_flops / plan.step_flops)} to the operations"
    yield "balance", f"the slowest stage takes {percent(plan.imbalance)} longer than the mean stage"
    long = [skip for skip in plan.skips if skip.to_stage > skip.from_stage + 1]
    shown = [
        f"{skip.name}: stage {skip.from_stage} to {skip.to_stage}, {size(skip.bytes)} of each micro-batch"
        for skip in long[:MAX_SKIPS]
    ]
    more = [f"and {len(long) - MAX_SKIPS} more, in {PLAN}"] if len(long) > MAX_SKIPS else []
    for n, line in enumerate([*shown, *more]):
        yield "" if n else "skips", line
    for n, tie in enumerate(plan.ties):
        stages = f"{', '.join(map(str, tie.stages[:-1]))} and {tie.stages[-1]}"
        yield "" if n else "tied", f"{tie.name} on stages {stages}, {size(tie.bytes)} of gradients exchanged per step"
    if plan.host_bytes is not None:
        yield "", f"checkpoints take {size(plan.host_bytes)} of page-locked host memory"


def _show_layers(console: Console, layers: Iterable[PlannedLayer]) -> None:
    headings = ("layers", "params", "FLOPs", "saved", "sends", "forward", "backward")
    rows = []
    for _, group in groupby(layers, attrgetter("parameters", "forward_flops", "saved_bytes", "boundary_bytes")):
        same = list(group)
        first = same[0]
        name = first.name if len(same) == 1 else f"{first.name} ... {same[-1].name} x{len(same)}"
        work = [count(first.parameters), operations(first.forward_flops)]
        sizes = [size(first.saved_bytes), size(first.boundary_bytes)]
        times = [sum(map(attrgetter(key), same)) / len(same) for key in ("forward_seconds", "backward_seconds")]
        rows.append([name, *work, *sizes, *map(duration, times)])
    _show_rows(console, "layers: forward FLOPs, bytes and predicted time per micro-batch", headings, rows)


def _show_stages(console: Console, stages: Sequence[PlannedStage], micro_batches: int) -> None:
    uneven = len({stage.recomputed for stage in stages}) > 1
    processes = len({stage.process for stage in stages})
    several = 1 < processes < len(stages)  # some process has several stages; as in the banner of a run
    headings = ["stage", *["process"] * several, "layers", "params", "FLOPs", "forward", "backward", "sends"]

    def cells(stage: PlannedStage) -> list[str]:
        sends = "-" if stage.boundary_bytes is None else size(stage.boundary_bytes)
        times = [duration(stage.forward_seconds), duration(stage.backward_seconds)]
        recomputed = [str(stage.recomputed)] if uneven else []
        process = [str(stage.process)] if several else []
        work = [count(stage.parameters), operations(stage.forward_flops), *times, sends]
        return [*process, str(len(stage.layers)), *work, *recomputed]

    rows = []
    for numbers, label, same in _group_equal_stages(stages, cells):
        before, (layers, *behind) = same[:several], same[several:]
        first, last = stages[numbers[0]].layers[0], stages[numbers[-1]].layers[-1]
        each = " each" if len(numbers) > 1 else ""
        names = first if first == last else f"{first} ... {last}"
        rows.append([label, *before, f"{layers}{each}: {names}", *behind])
    headings += [f"R of {micro_batches}"] if uneven else []
    _show_rows(console, "stages: forward FLOPs, bytes and predicted time per micro-batch", headings, rows)


def _show_memory(console: Console, plan: Plan) -> None:
    limit_bytes = plan.layout.limit_bytes
    unit, name = memory_unit(max(plan.held_bytes))
    # activations come first, as a narrow terminal drops later columns; buffers include the workspace to save a column
    parts = ("activations", "weights", "gradients", "optimizer", "buffers")

    def cells(stage: PlannedStage) -> list[str]:
        part_bytes = {part: getattr(stage.memory, f"{part}_bytes") for part in parts}
        part_bytes["buffers"] += stage.memory.workspace_bytes
        held = round_preserving_sum({part: held_bytes / unit for part, held_bytes in part_bytes.items()})
        shares = [] if limit_bytes is None else [percent(stage.memory.total_bytes / limit_bytes)]
        total, *values = (f"{value:,.1f}" for value in (sum(held.values()), *held.values()))
        return [total, *shares, *values]

    headings = ["stage", "total", *([] if limit_bytes is None else ["of limit"]), *parts]
    rows = [[label, *same] for _, label, same in _group_equal_stages(plan.stages, cells)]
    title = f"memory: predicted peak of each stage in {name}, libraries not included"
    _show_rows(console, title, headings, rows)


def _show_choice(console: Console, choice: Choice) -> None:
    rows = []
    for tried in choice.candidates:
        verdict = ", ".join(["chosen"] * (tried is choice.chosen) + [tried.reason] * bool(tried.reason))
        figures = (
            ["-", "-"]
            if tried.plan is None
            else [_format_step(tried.plan.step_seconds), size(max(tried.plan.held_bytes))]
        )
        rows.append([tried.value, *figures, verdict])
    title = f"{choice.setting} compared, predicted: {choice.rule}"
    _show_rows(console, title, (choice.setting, "step", "fullest stage", ""), rows)


def _show_grid(console: Console, lines: Sequence[str] | None) -> None:
    if lines is None:
        print_fields(console, [("grid", "too large to show")])
    elif len(lines) > GRID_LINES or max(map(len, lines)) > console.width:
        print_fields(console, [("grid", f"too large to show; {PLAN} has it")])
    else:
        for line in lines:
            show_line(console, line)
        console.print()


def _show_rows(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Shows a table; of more than MAX_ROWS rows, only the first and the last."""
    half = MAX_ROWS // 2
    if len(rows) > MAX_ROWS:
        left_out = ["...", f"{len(rows) - 2 * half} more in {PLAN}"] + [""] * (len(headings) - 2)
        rows = [*rows[:half], left_out, *rows[-half:]]
    columns = [Column(heading, number=heading not in ("stage", "layers", "")) for heading in headings]
    show_text(console, title, "bold")
    names = 1 + next((at for at, heading in enumerate(headings) if heading in ("layers", "")), 0)
    show_table(console, Table.of_rows(title, columns, rows, names), elsewhere=PLAN)
    console.print()


def _group_equal_stages(
    stages: Sequence[PlannedStage], cells: Callable[[PlannedStage], list[str]]
) -> Iterator[tuple[list[int], str, list[str]]]:
    """Groups consecutive stages with equal cells: their numbers, their label, `3-7`, and the cells."""
    for same, group in groupby(enumerate(map(cells, stages)), itemgetter(1)):
        numbers = [number for number, _ in group]
        yield numbers, str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", same


def _format_step(seconds: float) -> str:
    """``duration``, with one more digit from 1 s to 10 s, for steps that are compared."""
    return f"{seconds:.2f} s" if 0.9995 <= seconds < 9.995 else duration(seconds)
