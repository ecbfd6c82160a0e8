"""What `gpipe plan` keeps in plan.json and shows: layers, the cut, memory of the stages, the step, the choices.

All of it is predicted, times from a simulation and bytes from shapes; with ``cost=measured`` the seconds of single
layers are measured. Layers and stages that are alike share a row: the paper's largest Transformer has 1,663 layers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import show
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory
from gpipe_cli.pipeline.schedule.dependencies import grid
from gpipe_cli.pipeline.schedule.simulator import ideal_bubble
from gpipe_cli.planner.auto_settings import Comparison
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.device_rates import computes_in, reached_tflops
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.reporting.plots.timeline_values import idle
from gpipe_cli.reporting.run.description import model_name, precision_facts, words_of
from gpipe_cli.reporting.run.lines import show_facts, show_line, show_text
from gpipe_cli.reporting.run.step_breakdown import show_shares
from gpipe_cli.reporting.tables.table import SYMBOLS, Column, Table, show_table
from gpipe_cli.results.files import flattened, write_result
from gpipe_cli.units import GIB, MIB, count, duration, operations, percent, plural, rate, rounded, size

PLAN = "plan.json"
MOST_ROWS = 40  # of a table; of more the first and the last are shown
GRID_STAGES, GRID_TICKS = 16, 400  # a larger one cannot be read
GRID_LINES = 34  # in the console: two blocks of sixteen stages

Facts = dict[str, Any]  # of plan.json


def plan_json(
    config: TrainConfig,
    profile: ModelProfile,
    plan: Plan,
    comparisons: Sequence[Comparison],
    files: Mapping[str, str],
) -> Facts:
    """What plan.json holds of the plan of `config`; units stand in the names, and null is what is not known.

    Layers and stages have the operations, bytes sent and seconds of one micro-batch, the largest if they are uneven;
    all else is of an optimizer step. `files`: written beside plan.json, what each is -> where.
    """
    samples, partitions = mini_batch_samples(config, profile.lengths), len(plan.stages)
    tokens = None if config.task == "classification" else samples * max(profile.lengths)
    hardware = _hardware(config, plan)
    peak = hardware["flops_per_second"]
    flops = round(sum(cost.flops for cost in profile.costs) * samples)
    # elsewhere there are as many processes as devices, whatever is here
    process_of_stage = plan.layout.process_of_stage if plan.layout.here else plan.device_of_stage
    layers, stages = _stages(profile, plan, process_of_stage, _limit_bytes(hardware))
    recomputed_flops = sum(
        recomputed * sum(cost.forward.flops for cost in profile.costs[first:end]) * samples / plan.micro_batches
        for recomputed, (first, end) in zip(plan.recomputed, plan.bounds, strict=True)
    )
    shares = asdict(plan.breakdown)
    recompute: str = config.recompute
    if recompute == "auto":
        recompute = f"auto ({sum(plan.recomputed)} of {partitions * plan.micro_batches} forwards)"
    devices = len(set(plan.device_of_stage)) * config.replicas
    drawable = partitions <= GRID_STAGES and max(map(len, plan.schedule.stages)) <= GRID_TICKS
    return {
        "kind": "predicted",
        "model_name": model_name(config),
        "dataset_name": config.dataset.name,
        "parameters": sum(layer["parameters"] for layer in layers),
        "layers": layers,
        "stages": stages,
        "micro_batches": plan.micro_batches,
        "replicas": config.replicas,
        "schedule": config.schedule if not plan.chosen_order else f"{config.schedule} ({plan.chosen_order})",
        "recompute": recompute,
        "sample": words_of(config.task).sample,
        "step_samples": samples,
        "step_tokens": tokens,
        "hardware": hardware,
        "step_seconds": plan.step_seconds,
        "samples_per_second": samples / plan.step_seconds,
        "tokens_per_second": None if tokens is None else tokens / plan.step_seconds,
        "breakdown": shares,
        "idle": idle(shares),
        "bubble": shares["bubble"],
        "ideal_bubble": ideal_bubble(len(set(plan.device_of_stage)), plan.micro_batches),
        "imbalance": plan.imbalance,
        "step_flops": flops,  # forwards and backwards of all micro-batches, without recomputation
        "recomputed_flops": round(recomputed_flops),
        # Of what all devices could do; recomputation is not counted as useful, as in "model FLOPs utilization"
        # (Chowdhery et al., 2022, PaLM, section 4.1).
        "utilisation": None if peak is None else flops / (peak * devices * plan.step_seconds),
        "comparisons": [
            {
                "setting": comparison.setting,
                "rule": comparison.rule,
                "candidates": [
                    {
                        "value": one.value,
                        "step_seconds": one.plan and one.plan.step_seconds,
                        "memory_bytes": one.plan and max(held.total_bytes for held in one.plan.memory),
                        "chosen": one is comparison.chosen,
                        "reason": one.reason,
                    }
                    for one in comparison.candidates
                ],
            }
            for comparison in comparisons
        ],
        "grid": grid(plan.schedule, width=80, device_of_stage=plan.device_of_stage).splitlines() if drawable else None,
        "files": dict(files),
    }


def _stages(
    profile: ModelProfile, plan: Plan, process_of_stage: Sequence[int], limit_bytes: int | None
) -> tuple[list[Facts], list[Facts]]:
    activations = ActivationMemory(profile.costs, profile.inputs, plan.samples, profile.lengths)
    layers: list[Facts] = []
    stages: list[Facts] = []
    for k, (first, end) in enumerate(plan.bounds):
        for at, cost in enumerate(profile.costs[first:end], first):
            layer = {
                "name": cost.name,
                "stage": k,
                "parameters": cost.parameters,
                "forward_flops": round(cost.forward.flops * plan.samples),
                "saved_bytes": activations.held(at, at + 1).graph,  # that autograd keeps for the backward
                "boundary_bytes": sum(t.bytes(plan.samples, profile.lengths) for t in cost.outputs),  # over a cut here
                "forward_seconds": plan.costs.layers[at].graph,
                "backward_seconds": plan.costs.layers[at].backward,
            }
            layers.append(layer)
        memory = plan.memory[k]
        stage = {
            "process": process_of_stage[k],
            "layers": [layer["name"] for layer in layers[first:]],
            "parameters": sum(layer["parameters"] for layer in layers[first:]),
            "forward_flops": round(sum(cost.forward.flops for cost in profile.costs[first:end]) * plan.samples),
            "boundary_bytes": layers[-1]["boundary_bytes"] if end < len(profile.costs) else None,
            "forward_seconds": plan.stages[k].graph_seconds,
            "backward_seconds": plan.stages[k].backward_seconds,
            "recomputed": plan.recomputed[k],  # of the M micro-batches
            "memory": {**asdict(memory), "total_bytes": memory.total_bytes, "limit_bytes": limit_bytes},
        }
        stages.append(stage)
    return layers, stages


def _hardware(config: TrainConfig, plan: Plan) -> Facts:
    """One device and one link of the machine that is planned for."""
    memory = plan.layout.memory
    hardware = resolved(config.hardware, plan.layout.devices)
    timed = plan.costs.basis in ("timed_machine", "timed_layers")  # then no data sheet is behind the seconds
    figures = plan.costs.figures
    reached = None if hardware.tflops is None else reached_tflops(hardware, config.precision)
    peaks = {"float32": hardware.peak_tflops, "tf32": hardware.tf32_tflops, "bfloat16": hardware.bfloat16_tflops}

    def times(value: float | None, factor: float) -> float | None:
        return None if timed or value is None else value * factor

    return {
        "name": hardware.name,
        "source": plan.costs.source,
        "precision": config.precision,
        "computes_in": computes_in(hardware.name, config.precision),
        "peak_flops_per_second": {name: None if peak is None else peak * 1e12 for name, peak in peaks.items()},
        "flops_per_second": times(reached, 1e12 * (plan.layout.threads if hardware.name == "cpu" else 1)),
        "timed": figures and asdict(figures),
        "memory_bytes": memory and memory.device_bytes,
        "memory_stages": memory and memory.stages,  # that share it
        "link_bytes_per_second": times(hardware.link_gb_per_second, 1e9),
        "link_latency_seconds": times(hardware.link_microseconds, 1e-6),
    }


def _limit_bytes(hardware: Facts) -> int | None:
    """Of a stage."""
    memory: int | None = hardware["memory_bytes"]
    return memory and memory // hardware["memory_stages"]


def show_plan(console: Console, plan: Facts, folder: Path) -> None:
    """Writes plan.json into ``folder``, which must exist, and shows it. Raises OSError if it could not be written."""
    try:
        write_result(folder, plan, PLAN)
    finally:
        show_text(console, "plan: everything below is predicted, nothing was run", "bold")
        show_facts(console, _what(plan))
        console.print()
        _show_layers(console, plan["layers"])
        _show_stages(console, plan["stages"], plan["micro_batches"])
        _show_memory(console, plan["stages"], _limit_bytes(plan["hardware"]))
        for comparison in plan["comparisons"]:
            _show_comparison(console, comparison)
        _show_grid(console, plan["grid"])
        show_facts(console, _outcome(plan))
        show_shares(console, {"predicted": plan["breakdown"]}, plan["ideal_bubble"])
        show_facts(console, [*plan["files"].items(), ("written to", str(folder / PLAN))])


def stages_of(plan: Facts) -> Table:
    """A row for each stage, for programs; of groups the keys are dotted, `memory.total_bytes`."""
    rows = [{"stage": k, **dict(flattened(stage))} for k, stage in enumerate(plan["stages"])]
    return Table("stages", [Column(key, values=[row[key] for row in rows]) for key in rows[0]])


def plans_of(plans: Sequence[Facts]) -> Table:
    """A row for each plan of a sweep: plan.json, with the `settings` that vary, and the `error` if there is no plan."""
    varied = [key for key in plans[0]["settings"] if key not in SYMBOLS]

    def column(key: str, heading: str, form: Callable[[Any], str], of: Callable[[Facts], Any] | None = None) -> Column:
        """What a plan has under this key, or `of` it; of what cannot be planned, what was asked for."""
        values = [
            plan["settings"].get(key) if plan["error"] is not None else of(plan) if of is not None else plan[key]
            for plan in plans
        ]
        return Column.of(key, heading, values, form)

    def asked(key: str) -> Column:
        return Column.of(key, key, [plan["settings"][key] for plan in plans], show)

    columns = [
        column("partitions", "K", show, lambda plan: len(plan["stages"])),
        column("micro_batches", "M", show),
        *map(asked, varied),
        column("step_seconds", "step", _step),
        column("samples_per_second", "samples/s", rate),
        column("bubble", "bubble", percent),
        column("memory_bytes", "fullest stage", size, lambda plan: max(_held(plan))),
        column("imbalance", "imbalance", percent),
        column("utilisation", "utilisation", percent),
        Column.of("error", "error", [plan["error"] for plan in plans], show, printed=False),
    ]
    return Table("plans", columns, 2 + len(varied))


def show_plans(console: Console, plans: Sequence[Facts]) -> None:
    """The table of a sweep, why some cannot be planned, and where the others are."""
    show_table(console, plans_of(plans), elsewhere="format=csv")
    console.print()
    refused = dict.fromkeys(("cannot be", plan["error"]) for plan in plans if plan["error"] is not None)
    pages = (plan["files"]["page"] for plan in plans if plan["error"] is None)
    show_facts(console, [*refused, *(("page", page) for page in pages)])


def _held(plan: Facts) -> list[int]:
    """The bytes of each stage at its fullest moment."""
    return [stage["memory"]["total_bytes"] for stage in plan["stages"]]


def _what(plan: Facts) -> Iterator[tuple[str, str]]:
    hardware = plan["hardware"]
    shared = f", shared by {hardware['memory_stages']} stages" if (hardware["memory_stages"] or 1) > 1 else ""
    layers, partitions = plural(len(plan["layers"]), "layer"), plural(len(plan["stages"]), "partition")
    yield "model", f"{plan['model_name']}: {layers}, {count(plan['parameters'])} parameters"
    yield "dataset", plan["dataset_name"]
    replicas = f", R = {plan['replicas']} replicas, of which one is shown" if plan["replicas"] > 1 else ""
    yield "pipeline", f"K = {partitions}, M = {plural(plan['micro_batches'], 'micro-batch')}{replicas}"
    yield "schedule", f"{plan['schedule']}, recompute {plan['recompute']}"
    batch, tokens = plural(plan["step_samples"], plan["sample"]), plan["step_tokens"]
    yield "mini-batch", batch if tokens is None else f"{batch}, {plural(tokens, 'token')}"
    yield from precision_facts(hardware["precision"], hardware["computes_in"])
    peaks = {name: peak for name, peak in hardware["peak_flops_per_second"].items() if peak is not None}
    sheet = ", ".join(f"{peak / 1e12:g} in {name}" for name, peak in peaks.items()).replace(" in", " TFLOP/s in", 1)
    yield "hardware", f"{hardware['name']}{f': {sheet}' if sheet else ''}"
    if (assumed := hardware["flops_per_second"]) is not None:
        precision = "float32" if hardware["computes_in"] == "float32" else hardware["precision"]
        yield "", f"assumed: {operations(assumed)}FLOP/s{f' in {precision}' if 'float32' in peaks else ''}"
    figures = [
        words(hardware[key])
        for key, words in (
            ("memory_bytes", lambda memory: f"{size(memory)} of memory{shared}"),
            ("link_bytes_per_second", lambda speed: f"links {operations(speed)}B/s"),
            ("link_latency_seconds", lambda latency: f"latency {1e6 * latency:.3g} us"),
        )
        if hardware[key] is not None
    ]
    if figures:
        yield "", ", ".join(figures)
    yield "costs from", hardware["source"]
    if (timed := hardware["timed"]) is not None:
        products, convolutions = (operations(timed[f"{each}_flops_per_second"]) for each in ("product", "convolution"))
        yield "", f"products {products}FLOP/s, convolutions {convolutions}FLOP/s"
        copies, launch = operations(timed["copied_bytes_per_second"]), 1e6 * timed["launch_seconds"]
        yield "", f"copies {copies}B/s, {launch:.3g} us for an operation at least"


def _outcome(plan: Facts) -> Iterator[tuple[str, str]]:
    yield "predicted", f"step {_step(plan['step_seconds'])}"
    speed, tokens = f"{rate(plan['samples_per_second'])} {plan['sample']}s/s", plan["tokens_per_second"]
    yield "speed", f"{speed if tokens is None else f'{rate(tokens)} tokens/s, {speed}'}, predicted"
    if plan["utilisation"] is not None:
        yield "utilisation", f"{percent(plan['utilisation'])} of these figures, predicted, without recomputation"
        if plan["recomputed_flops"]:
            yield "", f"recomputation adds {percent(plan['recomputed_flops'] / plan['step_flops'])} to the operations"
    yield "balance", f"the slowest stage takes {percent(plan['imbalance'])} more than the mean of all"
    held = _held(plan)
    memory, limit = f"{size(max(held))} on stage {held.index(max(held))}, the fullest", _limit_bytes(plan["hardware"])
    yield "memory", f"{memory}, predicted" if limit is None else f"{memory}, predicted, of {size(limit)}"


def _show_layers(console: Console, layers: Iterable[Facts]) -> None:
    headings = ("layers", "params", "FLOPs", "saved", "sends", "forward", "backward")
    rows = []
    for _, group in groupby(layers, itemgetter("parameters", "forward_flops", "saved_bytes", "boundary_bytes")):
        same = list(group)
        first = same[0]
        name = first["name"] if len(same) == 1 else f"{first['name']} ... {same[-1]['name']} x{len(same)}"
        work = [count(first["parameters"]), operations(first["forward_flops"])]
        sizes = [size(first["saved_bytes"]), size(first["boundary_bytes"])]
        times = [sum(layer[key] for layer in same) / len(same) for key in ("forward_seconds", "backward_seconds")]
        rows.append([name, *work, *sizes, *map(duration, times)])
    _show_rows(console, "layers: each, for one micro-batch; FLOPs are those of the forward", headings, rows)


def _show_stages(console: Console, stages: Sequence[Facts], micro_batches: int) -> None:
    uneven = len({stage["recomputed"] for stage in stages}) > 1
    processes = len({stage["process"] for stage in stages})
    several = 1 < processes < len(stages)  # then some have more than one stage, as in the banner of a run
    headings = ["stage", *["process"] * several, "layers", "params", "FLOPs", "forward", "backward", "sends"]

    def cells(stage: Facts) -> list[str]:
        sends = "-" if stage["boundary_bytes"] is None else size(stage["boundary_bytes"])
        times = [duration(stage["forward_seconds"]), duration(stage["backward_seconds"])]
        recomputed = [str(stage["recomputed"])] if uneven else []
        layers = str(len(stage["layers"]))
        process = [str(stage["process"])] if several else []
        return [
            *process,
            layers,
            count(stage["parameters"]),
            operations(stage["forward_flops"]),
            *times,
            sends,
            *recomputed,
        ]

    rows = []
    for numbers, label, same in _alike(stages, cells):
        before, (layers, *behind) = same[:several], same[several:]
        first, last = stages[numbers[0]]["layers"][0], stages[numbers[-1]]["layers"][-1]
        each = " each" if len(numbers) > 1 else ""
        names = first if first == last else f"{first} ... {last}"
        rows.append([label, *before, f"{layers}{each}: {names}", *behind])
    headings += [f"R of {micro_batches}"] if uneven else []
    _show_rows(console, "stages: predicted, for one micro-batch; FLOPs are those of the forward", headings, rows)


def _show_memory(console: Console, stages: Sequence[Facts], limit_bytes: int | None) -> None:
    largest = max(stage["memory"]["total_bytes"] for stage in stages)
    unit, name = (GIB, "GiB") if largest >= 10 * GIB else (MIB, "MiB")
    parts = ("weights", "gradients", "optimizer", "activations", "workspace")

    def cells(stage: Facts) -> list[str]:
        held = rounded({part: stage["memory"][f"{part}_bytes"] / unit for part in parts})
        shares = [] if limit_bytes is None else [percent(stage["memory"]["total_bytes"] / limit_bytes)]
        total, *values = (f"{value:,.1f}" for value in (sum(held.values()), *held.values()))
        return [total, *shares, *values]

    headings = ["stage", "total", *([] if limit_bytes is None else ["of limit"]), *parts]
    rows = [[label, *same] for _, label, same in _alike(stages, cells)]
    title = f"memory: predicted, {name} at each stage's fullest moment, without libraries"
    _show_rows(console, title, headings, rows)


def _show_comparison(console: Console, comparison: Facts) -> None:
    setting = comparison["setting"]
    rows = []
    for candidate in comparison["candidates"]:
        seconds, memory = candidate["step_seconds"], candidate["memory_bytes"]
        verdict = ", ".join(["chosen"] * candidate["chosen"] + [candidate["reason"]] * bool(candidate["reason"]))
        known = ["-", "-"] if seconds is None else [_step(seconds), size(memory)]
        rows.append([candidate["value"], *known, verdict])
    title = f"{setting} compared, predicted: {comparison['rule']}"
    _show_rows(console, title, (setting, "step", "fullest stage", ""), rows)


def _show_grid(console: Console, lines: Sequence[str] | None) -> None:
    if lines is None:
        show_facts(console, [("grid", "too large to be shown")])
    elif len(lines) > GRID_LINES or max(map(len, lines)) > console.width:
        show_facts(console, [("grid", f"too large to be shown here; {PLAN} has it")])
    else:
        for line in lines:
            show_line(console, line)
        console.print()


def _show_rows(console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Of many rows the first and the last."""
    half = MOST_ROWS // 2
    if len(rows) > MOST_ROWS:
        left_out = ["...", f"{len(rows) - 2 * half} more in {PLAN}"] + [""] * (len(headings) - 2)
        rows = [*rows[:half], left_out, *rows[-half:]]
    columns = [Column(heading, number=heading not in ("stage", "layers", "")) for heading in headings]
    show_text(console, title, "bold")
    names = 1 + next((at for at, heading in enumerate(headings) if heading in ("layers", "")), 0)
    show_table(console, Table.of_rows(title, columns, rows, names), elsewhere=PLAN)
    console.print()


def _alike(stages: Sequence[Facts], cells: Callable[[Facts], list[str]]) -> Iterator[tuple[list[int], str, list[str]]]:
    """The numbers of consecutive stages that have the same cells, in words `3-7`, and these cells."""
    for same, group in groupby(enumerate(map(cells, stages)), itemgetter(1)):
        numbers = [number for number, _ in group]
        yield numbers, str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}", same


def _step(seconds: float) -> str:
    """As ``duration``, with a digit more where steps are compared."""
    return f"{seconds:.2f} s" if 0.9995 <= seconds < 9.995 else duration(seconds)
