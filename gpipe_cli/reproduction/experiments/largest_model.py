"""The largest models that can be trained: the paper's Table 1.

Plans for the paper's hardware show the memory that its models would take there, and the largest model that would fit.
On the device at hand, a plan finds the largest model of a family below a memory limit, which is then trained. Planned
and counted numbers never share a column.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpipe_cli.config.settings import key_of, load_hardware
from gpipe_cli.errors import NothingFitsError
from gpipe_cli.reporting.tables.table import Table
from gpipe_cli.reproduction.comparison import Difference, Shown, make_table
from gpipe_cli.reproduction.runner import ROWS_DIFFER, Findings, Note, Runner
from gpipe_cli.results.files import read_result
from gpipe_cli.units import size

_MEMORY_LIMIT = "hardware.memory_gib"
_SOLVE_MAX_MODEL = "++solve=max_model"  # `++`, as the file of a recipe has no such key
BYTES = {"GB": 10**9, "GiB": 2**30}
NAIVE = "partitions=1", "micro_batches=1", "recompute=never"
Model = Mapping[str, Any]  # a model of the paper: its settings, and the paper's numbers
Row = dict[str, Any]


def reproduce(
    runner: Runner, sizes: Sequence[Model], unit: str, micro_batches: int, measured: Sequence[int], grown: str
) -> Findings:
    """Train the largest models that fit the device at hand, then plan the paper's for its hardware.

    ``sizes``: the paper's models, the first of them naive; ``unit``: of memory; ``micro_batches``: M of all but naive
    models; ``measured``: numbers of partitions of trained models; ``grown``: the size in which these grow.
    """
    settings = [key_of(setting) for setting in sizes[0]["settings"]]
    runner.check_not_given(dict.fromkeys(("partitions", "micro_batches", "recompute", *settings), ROWS_DIFFER))
    comparable = not runner.incomparable_settings()
    parameters = {model["name"]: model["parameters"] for model in sizes}
    precisions = ["float32", "bfloat16"]
    wanted = {"Naive-1": NAIVE, **{f"Pipeline-{k}": _pipeline(k, micro_batches) for k in measured}}
    notes = list[Note]()
    if runner.scale == "smoke":
        notes.append(("left out", f"no rows of {sizes[1]['name']} to {sizes[-1]['name']} at scale=smoke"))
        sizes, precisions, wanted = sizes[:1], precisions[:1], {"Naive-1": NAIVE}
    trained = [row for name, cell in wanted.items() if (row := train(name, cell, grown, runner))]
    paper = runner.with_settings().without("cost")  # no layer of that size is timed on this device
    cells = NAIVE, *(_pipeline(model["partitions"], micro_batches) for model in sizes[1:])
    planned = [
        {**model, **_plan_paper_model(number, (*model["settings"], *cell), BYTES[unit], paper)}
        for number, (model, cell) in enumerate(zip(sizes, cells, strict=True), start=1)
    ]
    assumptions = [
        (precision, more) for precision in precisions for more in (f"{_MEMORY_LIMIT}=null", "batch_size=auto")
    ]
    naive = [row for assumed in assumptions if (row := naive_activations(*assumed, sizes[0], BYTES[unit], paper))]
    for row in trained:
        row["paper"] = parameters.get(row["name"])
    _add_ratios(planned, "parameters", "largest_parameters")
    _add_ratios(trained, "paper", "parameters")
    hardware = planned[0]["plan"]["hardware"]["name"]
    precision = runner.setting_value("precision") or "float32"
    notes += [
        ("planned", f"for {hardware}: bytes follow from shapes, in {precision}; nothing was run"),
        (
            "planned",
            "activations: all that stages keep for the backward, plus the workspace of one recomputation and one layer",
        ),
        ("planned", "the paper counts 12 bytes a parameter; we count the gradient too: 16 with RMSProp or Adam"),
        *_describe_what_does_not_fit(planned, hardware, paper),
        *(_describe_nearest(sizes[0], naive, unit) if naive and comparable else ()),
    ]
    if len(trained) > 1 and trained[-1]["times"] is not None:
        where, last = "at small scale" if runner.is_small else "here", trained[-1]
        holds = f"holds {last['times']:.1f} times the parameters of {trained[0]['name']}"
        notes.append(("found", f"{where} {last['name']} {holds}"))
    if trained:
        exact = sum(row["planned"] is not None and row["planned"] == row["counted"] for row in trained)
        same = "activations planned and counted are the same to the byte"
        notes.append(("found", f"{same} in {exact} of {len(trained)} rows"))
    if missing := len(wanted) - len(trained):
        notes.append(("found", f"{missing} of {len(wanted)} rows could not be trained here: no model fits the limit"))
    tables = *_make_planned_tables(planned, naive, unit, comparable), *_make_trained_tables(trained)
    return Findings(tables, notes, comparable=comparable)


def _make_planned_tables(planned: Sequence[Row], naive: Sequence[Row], unit: str, comparable: bool) -> Iterator[Table]:
    name = Shown("", "name")
    ours = Shown("parameters", "planned", "count", "planned")
    columns = [name, Shown("size", "shown"), Shown("parameters", "parameters", "count", "paper"), ours]
    off = Difference("planned - paper, %", ours, "parameters", digits=1, relative=True)
    yield make_table("The paper's models: parameters", [*columns, off], planned, comparable)
    ours = Shown(f"weights, optimizer, {unit}", "planned_model", ",.2f", "planned")
    columns = [name, Shown(ours.heading, "model", ",.2f", "paper"), ours]
    gradients = Shown(f"and gradients, {unit}", "with_gradients", ",.2f", "planned")
    off = Difference("planned - paper", ours, "model")
    title = "The paper's models: memory of the parameters, all stages"
    yield make_table(title, [*columns, gradients, off], planned, comparable)
    ours = Shown(f"activations, {unit}", "planned_activations", ",.2f", "planned")
    columns = [name, Shown(ours.heading, "activations", ",.2f", "paper"), ours]
    off = Difference("planned - paper", ours, "activations")
    fits = [
        Shown("fullest stage", "fullest_bytes", "size", "planned"),
        Shown("fits", "paper_fits", origin="paper"),
        Shown("fits", "fits", origin="planned"),
    ]
    title = "The paper's models: peak of the activations, all stages"
    yield make_table(title, [*columns, off, *fits], planned, comparable)
    if naive:
        ours = Shown("activations", "activations", ",.2f", "planned")
        fused = Shown("one tensor for each product", "fused", ",.2f", "planned")
        title = f"{planned[0]['name']}: peak of the activations, {unit}, by what the paper leaves open"
        yield make_table(
            f"{title} (its number is {planned[0]['activations']:,.2f})",
            [
                Shown("precision", "precision"),
                Shown("N", "samples"),
                ours,
                Difference("planned - paper", ours, "paper"),
                fused,
                Difference("one tensor - paper", fused, "paper"),
            ],
            naive,
            comparable,
        )
    if (first := _first_with(planned, "largest_parameters")) is not None:
        ours = Shown("times", "times", ",.1f", "planned")
        yield make_table(
            f"The largest model that fits, by our count; times: relative to {first['name']}",
            [
                name,
                Shown("parameters", "parameters", "count", "paper"),
                Shown("parameters", "largest_parameters", "count", "planned"),
                Shown("size", "largest_size", origin="planned"),
                Shown("times", "paper_times", ",.1f", "paper"),
                ours,
                Difference("planned - paper", ours, "paper_times", digits=1),
            ],
            planned,
            comparable,
        )


def _make_trained_tables(trained: Sequence[Row]) -> Iterator[Table]:
    columns = (
        Shown("", "name"),
        Shown("size", "size", origin="planned"),
        Shown("parameters", "parameters", "count", "counted"),
        Shown("times", "paper_times", ",.1f", "paper"),
        Shown("times", "times", ",.1f", "counted"),
        Shown("fullest stage", "fullest_bytes", "size", "planned"),
        Shown("activations", "planned_activations", "size", "planned"),
        Shown("activations", "counted_activations", "size", "counted"),
        Shown("counted - planned", "apart", origin="difference"),
    )
    if trained:
        limit = size(trained[0]["fullest"]["limit_bytes"])
        title = f"Trained here: the largest model below {limit} a stage; times: relative to {trained[0]['name']}"
        yield make_table(title, columns, trained)


def _first_with(rows: Sequence[Row], key: str) -> Row | None:
    return next((row for row in rows if row[key] is not None), None)


def _add_ratios(rows: Sequence[Row], paper: str, ours: str) -> None:
    """Counts of parameters relative to the first row that has a count of ours."""
    base = _first_with(rows, ours)
    for row in rows:
        for key, name in ((paper, "paper_times"), (ours, "times")):
            row[name] = row[key] / base[key] if base and row[key] is not None and base[key] else None


def _describe_what_does_not_fit(planned: Sequence[Row], hardware: str, runner: Runner) -> Iterator[Note]:
    given = runner.setting_value(_MEMORY_LIMIT)
    limit_bytes = (float(given) if given else load_hardware(hardware).memory_gib or 0.0) * 2**30
    accelerators = "the paper's accelerators"
    if runner.incomparable_settings():
        accelerators = f"{hardware} with the given settings"
    too_large = {row["name"]: row["fullest"] for row in planned if row["fits"] == "no"}
    alone = [name for name, m in too_large.items() if m["total_bytes"] - m["gradients_bytes"] <= limit_bytes]
    others = [name for name in too_large if name not in alone]
    if alone:
        because = "but only because of gradients, which the paper's 12 bytes a parameter leave out"
        yield "found", f"{', '.join(alone)}: by our count too large for {accelerators}, {because}"
    if others:
        yield "found", f"{', '.join(others)}: by our count too large for {accelerators}, because of activations"
    if none_fits := [row["name"] for row in planned if row["largest_parameters"] is None]:
        yield "found", f"by our count no model of this family fits as {', '.join(none_fits)}, however small"


def _describe_nearest(paper: Mapping[str, Any], naive: Sequence[Row], unit: str) -> Iterator[Note]:
    """Which of the assumptions comes closest to the paper's number."""
    assumptions = [(f"{row['precision']}, N = {row['samples']}", row["activations"]) for row in naive]
    assumptions += [
        (f"{name}, one tensor for each product or convolution", row["fused"])
        for (name, _), row in zip(assumptions, naive, strict=True)
    ]
    nearest, activations = min(assumptions, key=lambda assumption: abs(assumption[1] - paper["activations"]))
    of_paper = f"the paper's {paper['activations']:,.2f} {unit} for {paper['name']}"
    yield "found", f"{of_paper} are closest to {nearest}: {activations:,.2f} {unit}"


def _pipeline(partitions: int, micro_batches: int) -> tuple[str, ...]:
    return f"partitions={partitions}", f"micro_batches={micro_batches}", "recompute=always"


def train(name: str, cell: Sequence[str], grown: str, runner: Runner) -> Row | None:
    """Find the largest model that fits the device at hand, and train it for two steps; None if none fits. ``cell``: the
    settings of this row; ``grown``: the size in which the model grows."""
    folder = f"here_{name.lower()}"
    largest = _largest_size(grown, _plan(runner, f"{folder}_largest", *cell, _SOLVE_MAX_MODEL))
    if largest is None:
        return None
    runner = runner.without(key_of(largest))
    plan = runner.plan(f"{folder}_plan", *cell, largest)
    (row,) = runner.bench(folder, *cell, largest, "warm_up_steps=1", "steps=1", "rounds=1")["rows"]
    predicted = read_result(runner.folder / folder / row["folders"][0])["prediction"] if row["folders"] else None
    planned, counted = predicted and predicted["activation_bytes"], row["activation_bytes"]
    fullest = max_stage_bytes(plan)
    return {
        "name": name,
        "size": size_in_name(plan),
        "parameters": plan["parameters"],
        "fullest": fullest,
        "fullest_bytes": fullest["total_bytes"],
        "planned": planned,
        "counted": counted,
        "planned_activations": None if planned is None else sum(planned),
        "counted_activations": None if counted is None else sum(counted),
        "apart": None if planned is None or counted is None else _difference_text(sum(counted) - sum(planned)),
    }


def _difference_text(off: int) -> str:
    return "0 B" if not off else f"{'+' if off > 0 else '-'}{size(abs(off))}"


def _plan_paper_model(number: int, settings: Sequence[str], unit: int, runner: Runner) -> Row:
    """The plan of a model of the paper, without a memory limit if it does not fit; and the largest that does. ``unit``:
    of memory, in bytes."""
    folder = f"planned_{number}"
    fitting = _plan(runner, folder, *settings)
    plan = fitting or runner.without(_MEMORY_LIMIT).plan(folder, *settings, f"{_MEMORY_LIMIT}=null")
    largest = _plan(runner, f"largest_{number}", *settings, _SOLVE_MAX_MODEL)
    fullest = max_stage_bytes(plan)

    def amount(*parts: str) -> float:
        """The memory of these parts, such as `weights`, summed over all stages, in the unit of the table."""
        held = sum(stage["memory"][f"{part}_bytes"] for stage in plan["stages"] for part in parts)
        return float(held / unit)

    return {
        "plan": plan,
        "planned": plan["parameters"],
        "planned_model": amount("weights", "optimizer"),
        "with_gradients": amount("weights", "optimizer", "gradients"),
        "planned_activations": amount("activations", "workspace"),
        "fullest": fullest,
        "fullest_bytes": fullest["total_bytes"],
        "paper_fits": "yes",  # the paper trained it
        "fits": "no" if fitting is None else "yes",
        "largest_parameters": None if largest is None else largest["parameters"],
        "largest_size": None if largest is None else size_in_name(largest),
    }


def naive_activations(precision: str, more: str, model: Model, unit: int, runner: Runner) -> Row | None:
    """The naive model's activations, in a ``unit`` of bytes, if it was trained in this precision and with the setting
    ``more``, as the paper states neither: as planned, with the workspace of a layer, and if a compiler keeps only the
    inputs of matrix products and convolutions with weights. None if not even one sample fits."""
    from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory  # imports torch, which listing recipes avoids

    halves = "schedule=zero_bubble"  # so that the profile includes what the gradients of weights need
    settings = *model["settings"], *NAIVE, halves, f"precision={precision}", more
    try:
        simulated = runner.without(key_of(more)).simulate_plan(*settings)
    except NothingFitsError:
        return None
    (stage,) = simulated.plan.memory
    profile = simulated.profile
    memory = ActivationMemory(profile.costs, profile.inputs, simulated.samples, profile.lengths)
    held = memory.saved_amounts(0, len(profile.costs))
    return {
        "precision": precision,
        "samples": simulated.samples,  # N
        "paper": model["activations"],
        "activations": (stage.activations_bytes + stage.workspace_bytes) / unit,
        "fused": (held.weights - held.gradients) / unit,
    }


def _plan(runner: Runner, folder: str, *settings: str) -> dict[str, Any] | None:
    """The content of plan.json; None if nothing fits."""
    try:
        return runner.plan(folder, *settings)
    except NothingFitsError:
        return None


def _largest_size(key: str, plan: Mapping[str, Any] | None) -> str | None:
    """The largest value of the size ``key`` that fits, as a setting; None if there is none.

    Growing another size may give more parameters, but only models that differ in a single size can be compared.
    """
    for comparison in plan["comparisons"] if plan else ():
        if comparison["setting"] == f"model.{key}":
            for candidate in comparison["candidates"]:
                if candidate["chosen"]:
                    return f"model.{key}={candidate['value']}"
    return None


def size_in_name(plan: Mapping[str, Any]) -> str:
    """The size in a model's name: `(18, 48)` of AmoebaNet-D (18, 48), `103` of Transformer-103, of any width."""
    name = str(plan["model_name"])
    return name[name.index("(") :] if "(" in name else name.partition("-")[2].partition(" ")[0]


def max_stage_bytes(plan: Mapping[str, Any]) -> Mapping[str, int]:
    """The memory of the stage that needs the most, in bytes."""
    return max((stage["memory"] for stage in plan["stages"]), key=lambda memory: int(memory["total_bytes"]))
