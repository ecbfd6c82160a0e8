"""What `gpipe plan` shows: layers, the cut, memory of the stages, the step, the choices; 80 columns are enough.

The questions of the paper's Table 1 (does it fit?) and Table 2 (how fast will it be?), answered before anything runs.
Everything in here is predicted and says so. Layers and stages that are alike share a row: the paper's Transformer of
83.9 billion parameters has 1,663 layers of one kind.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.planner.auto_settings import Comparison
from gpipe_cli.reporting.run.lines import show_facts, show_line
from gpipe_cli.reporting.run.result import write_result
from gpipe_cli.reporting.run.step_breakdown import ideal_bubble_line, share_lines
from gpipe_cli.reporting.tables.plan_values import LayerView, PlanView, StageView, plan_json
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.units import count, duration, operations, percent, plural, rate, rounded, size

PLAN = "plan.json"
MOST_ROWS = 40  # of a table; of more the first and the last are shown
GRID_STAGES, GRID_LINES = 16, 34  # two blocks of sixteen stages
GIB, MIB = 2**30, 2**20


def show_plan(console: Console, view: PlanView, folder: Path) -> None:
    """Writes plan.json into ``folder``, which must exist, and shows the plan even if that is not possible.

    Raises:
        OSError: all is shown, and plan.json could not be written.
    """
    try:
        write_result(folder, plan_json(view), PLAN)
    finally:
        _show(console, view, folder)


def _show(console: Console, view: PlanView, folder: Path) -> None:
    show_line(console, "plan: everything below is predicted, nothing was run", "bold")
    show_facts(console, _what(view))
    console.print()
    _show_layers(console, view.layers)
    _show_stages(console, view)
    _show_memory(console, view)
    for comparison in view.comparisons:
        _show_comparison(console, comparison)
    _show_grid(console, view)
    show_facts(console, _outcome(view))
    show_facts(console, [*view.files, ("written to", str(folder / PLAN))])


def _what(view: PlanView) -> Iterable[tuple[str, str]]:
    hardware, stages = view.hardware, len(view.stages)
    yield "model", f"{view.model_name}: {plural(len(view.layers), 'layer')}, {count(view.parameters)} parameters"
    yield "dataset", view.dataset_name
    yield "pipeline", f"K = {plural(stages, 'partition')}, M = {plural(view.micro_batches, 'micro-batch')}"
    yield "schedule", f"{view.schedule}, recompute {view.recompute}"
    batch = plural(round(view.step_samples), view.sample)
    yield "mini-batch", batch if view.step_tokens is None else f"{batch}, {plural(round(view.step_tokens), 'token')}"
    yield "hardware", hardware.name
    figures = [f"{operations(flops)}FLOP/s" for flops in [hardware.flops_per_second] if flops is not None]
    if hardware.memory_bytes is not None:
        figures.append(f"{size(hardware.memory_bytes)} of memory")
    if hardware.link_bytes_per_second is not None:
        figures.append(f"links {operations(hardware.link_bytes_per_second)}B/s")
    if hardware.link_latency_seconds is not None:
        figures.append(f"latency {1e6 * hardware.link_latency_seconds:.3g} us")
    if figures:
        yield "", ", ".join(figures)
    yield "costs from", hardware.source


def _outcome(view: PlanView) -> Iterable[tuple[str, str]]:
    yield "predicted", f"step {_step(view.step_seconds)}"
    speed = f"{rate(view.samples_per_second)} {view.sample}s/s"
    tokens = view.tokens_per_second
    yield "speed", f"{speed if tokens is None else f'{rate(tokens)} tokens/s, {speed}'}, predicted"
    if view.utilisation is not None:
        recomputed = view.recomputed_flops / view.step_flops if view.step_flops else 0.0
        yield (
            "utilisation",
            f"{percent(view.utilisation)} of these figures, predicted, without recomputation",
        )
        if view.recomputed_flops:
            yield "", f"recomputation adds {percent(recomputed)} to the operations"
    yield "balance", f"the slowest stage takes {percent(view.imbalance)} more than the mean of all"
    fullest = max(range(len(view.stages)), key=lambda stage: view.stages[stage].memory.total_bytes)
    memory = f"{size(view.stages[fullest].memory.total_bytes)} on stage {fullest}, the fullest"
    limit = view.hardware.memory_bytes
    yield "memory", f"{memory}, predicted" if limit is None else f"{memory}, predicted, of {size(limit)}"
    yield from share_lines({"predicted": view.breakdown})
    yield ideal_bubble_line(view.ideal_bubble)


def _show_layers(console: Console, layers: Sequence[LayerView]) -> None:
    columns = [Column("layers"), *_of_numbers("params", "FLOPs", "saved", "sends", "forward", "backward")]
    rows = []
    for _, group in groupby(layers, key=lambda v: (v.parameters, v.forward_flops, v.saved_bytes, v.boundary_bytes)):
        same = list(group)
        first = same[0]
        name = first.name if len(same) == 1 else f"{first.name} ... {same[-1].name} x{len(same)}"
        sizes = [size(first.saved_bytes), size(first.boundary_bytes)]
        times = [sum(v.forward_seconds for v in same), sum(v.backward_seconds for v in same)]
        cells = [name, count(first.parameters), operations(first.forward_flops), *sizes]
        rows.append([*cells, *(duration(seconds / len(same)) for seconds in times)])
    _print(console, "layers: each, for one micro-batch; FLOPs are those of the forward", columns, rows)


def _show_stages(console: Console, view: PlanView) -> None:
    uneven = len({stage.recomputed for stage in view.stages}) > 1
    columns = [Column("stage"), Column("layers"), *_of_numbers("params", "FLOPs", "forward", "backward", "sends")]
    columns += _of_numbers(f"R of {view.micro_batches}") if uneven else []

    def cells(stage: StageView) -> list[str]:
        sends = "-" if stage.boundary_bytes is None else size(stage.boundary_bytes)
        times = [duration(stage.forward_seconds), duration(stage.backward_seconds)]
        recomputed = [str(stage.recomputed)] if uneven else []
        return [count(stage.parameters), operations(stage.forward_flops), *times, sends, *recomputed]

    rows = [
        [_numbers(same), _layers([view.stages[k] for k in same]), *cells(view.stages[same[0]])]
        for same in _alike(view.stages, lambda stage: (len(stage.layers), cells(stage)))
    ]
    _print(console, "stages: predicted, for one micro-batch; FLOPs are those of the forward", columns, rows)


def _show_memory(console: Console, view: PlanView) -> None:
    limit = view.hardware.memory_bytes
    largest = max(stage.memory.total_bytes for stage in view.stages)
    unit, name = (GIB, "GiB") if largest >= 10 * GIB else (MIB, "MiB")
    columns = [Column("stage"), *_of_numbers("weights", "gradients", "optimizer", "activations", "workspace", "total")]
    columns += [] if limit is None else _of_numbers("of limit")

    def cells(stage: StageView) -> list[str]:
        parts = rounded({part: value / unit for part, value in asdict(stage.memory).items()})
        values = [*parts.values(), sum(parts.values())]
        shares = [] if limit is None else [percent(stage.memory.total_bytes / limit)]
        return [f"{value:,.1f}" for value in values] + shares

    rows = [[_numbers(same), *cells(view.stages[same[0]])] for same in _alike(view.stages, cells)]
    title = f"memory: predicted, {name} at each stage's fullest moment, without libraries"
    _print(console, title, columns, rows)


def _show_comparison(console: Console, comparison: Comparison) -> None:
    columns = [*_of_numbers(comparison.setting, "step", "fullest stage"), Column("")]
    rows = []
    for candidate in comparison.candidates:
        step = "-" if candidate.step_seconds is None else _step(candidate.step_seconds)
        memory = "-" if candidate.memory_bytes is None else size(candidate.memory_bytes)
        verdict = ", ".join(["chosen"] * candidate.chosen + [candidate.reason] * bool(candidate.reason))
        rows.append([candidate.value, step, memory, verdict])
    _print(console, f"{comparison.setting} compared, predicted: {comparison.rule}", columns, rows)


def _show_grid(console: Console, view: PlanView) -> None:
    if view.grid is None:
        show_facts(console, [("grid", "too large to be shown")])
        return
    lines = view.grid.splitlines()
    widest = max(map(len, lines), default=0)
    if len(view.stages) > GRID_STAGES or len(lines) > GRID_LINES or widest > console.width:
        show_facts(console, [("grid", f"too large to be shown here; {PLAN} has it")])
        return
    for line in lines:
        show_line(console, line)
    console.print()


def _print(console: Console, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Of many rows the first and the last."""
    half = MOST_ROWS // 2
    if len(rows) > MOST_ROWS:
        left_out = ["...", f"{len(rows) - 2 * half} more in {PLAN}"] + [""] * (len(columns) - 2)
        rows = [*rows[:half], left_out, *rows[-half:]]
    show_line(console, title, "bold")
    show_table(console, Table.of_rows(title, columns, rows))
    console.print()


def _of_numbers(*headings: str) -> list[Column]:
    return [Column(heading, number=True) for heading in headings]


def _alike(stages: Sequence[StageView], look: Callable[[StageView], Any]) -> Iterable[list[int]]:
    """The numbers of consecutive stages that look the same."""
    for _, group in groupby(range(len(stages)), key=lambda k: look(stages[k])):
        yield list(group)


def _numbers(stages: Sequence[int]) -> str:
    return str(stages[0]) if len(stages) == 1 else f"{stages[0]}-{stages[-1]}"


def _layers(stages: Sequence[StageView]) -> str:
    """`6: cell_0 ... cell_5`; of several stages `13 each: layer_14 ... layer_1651`."""
    first, last = stages[0].layers[0], stages[-1].layers[-1]
    number = f"{len(stages[0].layers)} each" if len(stages) > 1 else str(len(stages[0].layers))
    return f"{number}: {first}" if first == last else f"{number}: {first} ... {last}"


def _step(seconds: float) -> str:
    """As ``duration``, with a digit more where steps are compared."""
    return f"{seconds:.2f} s" if 0.9995 <= seconds < 9.995 else duration(seconds)
