"""The largest models that can be trained: the paper's Table 1.

Plans for the paper's hardware show the memory that its models would take there, and the largest model that would fit.
On the device at hand, a plan finds the largest model of a family below a memory limit, which is then trained. Planned
and counted numbers never share a column.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gpipe_cli.config.settings import key_of, load_hardware
from gpipe_cli.errors import NothingFitsError
from gpipe_cli.reproduction.runner import Runner
from gpipe_cli.results.files import read_result
from gpipe_cli.units import size

_MEMORY_LIMIT = "hardware.memory_gib"
_SOLVE_MAX_MODEL = "++solve=max_model"  # `++`, as the file of a recipe has no such key
BYTES = {"GB": 10**9, "GiB": 2**30}
Row = dict[str, Any]


def largest_model(results: dict[str, Any], runner: Runner) -> tuple[()]:
    """Train the largest models that fit the device at hand, then plan the paper's for its hardware.

    The first of `sizes` is naive: one partition, one micro-batch, nothing recomputed.
    """
    sizes = results["sizes"]
    precisions = ["float32", "bfloat16"]
    wanted = [(1, True), *((partitions, False) for partitions in results["measured"])]
    if runner.scale == "smoke":
        results["left_out"] = f"{sizes[1]['name']} to {sizes[-1]['name']}"
        sizes, precisions, wanted = sizes[:1], precisions[:1], wanted[:1]
    trained = [row for k, naive in wanted if (row := train(k, naive, results, runner))]
    paper = runner.with_settings().without("cost")  # no layer of that size is timed on this device
    planned = [_plan_paper_model(at, model, results, paper) for at, model in enumerate(sizes)]
    assumptions = [
        (precision, more) for precision in precisions for more in (f"{_MEMORY_LIMIT}=null", "batch_size=auto")
    ]
    naive = [row for assumed in assumptions if (row := naive_activations(*assumed, results, paper))]
    _add_ratios(planned, "parameters", "largest_parameters")
    _add_ratios(trained, "paper", "parameters")
    results |= {"planned": planned, "naive": naive, "trained": trained, "name": sizes[0]["name"]}
    results["paper_activations"] = sizes[0]["activations"]
    results["largest"] = planned if any(row["largest_parameters"] is not None for row in planned) else []
    results["first"] = next((row["name"] for row in planned if row["largest_parameters"] is not None), None)
    results["precision"] = runner.setting_value("precision") or "float32"
    results["hardware"] = planned[0]["plan"]["hardware"]["name"]
    _note_what_does_not_fit(planned, results, paper)
    _note_nearest_assumption(sizes[0]["activations"], naive, results)
    results["where"] = "at small scale" if runner.is_small else "here"
    results["last"] = trained[-1] if len(trained) > 1 else None
    results["trained_first"] = trained[0]["name"] if trained else None
    results["exact"] = sum(row["planned"] is not None and row["planned"] == row["counted"] for row in trained)
    results["rows"] = len(trained) or None
    results["wanted"] = len(wanted)
    results["missing"] = len(wanted) - len(trained) or None
    return ()


def _add_ratios(rows: Sequence[Row], paper: str, ours: str) -> None:
    """Counts of parameters relative to the first row that has a count of ours."""
    base = next((row for row in rows if row[ours] is not None), None)
    for row in rows:
        for key, name in ((paper, "paper_times"), (ours, "times")):
            row[name] = row[key] / base[key] if base and row[key] is not None and base[key] else None


def _note_what_does_not_fit(planned: Sequence[Row], results: dict[str, Any], runner: Runner) -> None:
    given = runner.setting_value(_MEMORY_LIMIT)
    limit_bytes = (float(given) if given else load_hardware(results["hardware"]).memory_gib or 0.0) * 2**30
    results["accelerators"] = "the paper's accelerators"
    if runner.incomparable_settings():
        results["accelerators"] = f"{results['hardware']} with the given settings"
    too_large = {row["name"]: row["fullest"] for row in planned if row["fits"] == "no"}
    alone = [name for name, m in too_large.items() if m["total_bytes"] - m["gradients_bytes"] <= limit_bytes]
    results["because_of_gradients"] = ", ".join(alone) or None
    results["because_of_activations"] = ", ".join(name for name in too_large if name not in alone) or None
    results["none_fits"] = ", ".join(row["name"] for row in planned if row["largest_parameters"] is None) or None


def _note_nearest_assumption(paper: float, naive: Sequence[Row], results: dict[str, Any]) -> None:
    """Which of the assumptions comes closest to the paper's number."""
    assumptions = [(f"{row['precision']}, N = {row['samples']}", row["activations"]) for row in naive]
    assumptions += [
        (f"{name}, one tensor for each product or convolution", row["fused"])
        for (name, _), row in zip(assumptions, naive, strict=True)
    ]
    results["nearest"] = None
    if assumptions and results["comparable"]:
        results["nearest"], results["nearest_activations"] = min(
            assumptions, key=lambda assumption: abs(assumption[1] - paper)
        )


def train(partitions: int, naive: bool, results: Mapping[str, Any], runner: Runner) -> Row | None:
    """Find the largest model that fits the device at hand, and train it for two steps; None if none fits."""
    name = f"{'Naive' if naive else 'Pipeline'}-{partitions}"
    cell = _cell(partitions, naive, results)
    folder = f"here_{name.lower()}"
    largest = _largest_size(results["grown"], _plan(runner, f"{folder}_largest", *cell, _SOLVE_MAX_MODEL))
    if largest is None:
        return None
    grown = runner.without(key_of(largest))
    plan = grown.plan(f"{folder}_plan", *cell, largest)
    (row,) = grown.bench(folder, *cell, largest, "warm_up_steps=1", "steps=1", "rounds=1")["rows"]
    predicted = read_result(runner.folder / folder / row["folders"][0])["prediction"] if row["folders"] else None
    planned, counted = predicted and predicted["activation_bytes"], row["activation_bytes"]
    paper = [model["parameters"] for model in results["sizes"] if model["name"] == name]
    return {
        "name": name,
        "size": size_in_name(plan),
        "parameters": plan["parameters"],
        "paper": paper[0] if paper else None,
        "fullest": max_stage_bytes(plan),
        "planned": planned,
        "counted": counted,
        "planned_activations": None if planned is None else sum(planned),
        "counted_activations": None if counted is None else sum(counted),
        "apart": None if planned is None or counted is None else _difference_text(sum(counted) - sum(planned)),
    }


def _difference_text(off: int) -> str:
    return "0 B" if not off else f"{'+' if off > 0 else '-'}{size(abs(off))}"


def _plan_paper_model(at: int, model: Row, results: Mapping[str, Any], runner: Runner) -> Row:
    """The plan of a model of the paper, without a memory limit if it does not fit; and the largest that does."""
    settings = *model["settings"], *_cell(model["partitions"], at == 0, results)
    folder = f"planned_{at + 1}"
    fitting = _plan(runner, folder, *settings)
    plan = fitting or runner.without(_MEMORY_LIMIT).plan(folder, *settings, f"{_MEMORY_LIMIT}=null")
    largest = _plan(runner, f"largest_{at + 1}", *settings, _SOLVE_MAX_MODEL)

    def amount(*parts: str) -> float:
        """The memory of these parts, such as `weights`, summed over all stages, in the unit of the table."""
        held = sum(stage["memory"][f"{part}_bytes"] for stage in plan["stages"] for part in parts)
        return float(held / BYTES[results["unit"]])

    return {
        **model,
        "plan": plan,
        "planned": plan["parameters"],
        "planned_model": amount("weights", "optimizer"),
        "with_gradients": amount("weights", "optimizer", "gradients"),
        "planned_activations": amount("activations", "workspace"),
        "fullest": max_stage_bytes(plan),
        "paper_fits": "yes",  # the paper trained it
        "fits": "no" if fitting is None else "yes",
        "largest_parameters": None if largest is None else largest["parameters"],
        "largest_size": None if largest is None else size_in_name(largest),
    }


def naive_activations(precision: str, more: str, results: Mapping[str, Any], runner: Runner) -> Row | None:
    """The naive model's activations, in the unit of the table, if it was trained in this precision and with the setting
    ``more``, as the paper states neither: as planned, with the workspace of a layer, and if a compiler keeps only the
    inputs of matrix products and convolutions with weights. None if not even one sample fits."""
    from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory  # imports torch, which listing recipes avoids

    halves = "schedule=zero_bubble"  # so that the profile includes what the gradients of weights need
    cell = _cell(1, True, results)
    settings = *results["sizes"][0]["settings"], *cell, halves, f"precision={precision}", more
    try:
        simulated = runner.without(key_of(more)).simulate_plan(*settings)
    except NothingFitsError:
        return None
    (stage,) = simulated.plan.memory
    profile = simulated.profile
    memory = ActivationMemory(profile.costs, profile.inputs, simulated.samples, profile.lengths)
    held = memory.saved_amounts(0, len(profile.costs))
    unit = BYTES[results["unit"]]
    return {
        "precision": precision,
        "samples": simulated.samples,  # N
        "activations": (stage.activations_bytes + stage.workspace_bytes) / unit,
        "fused": (held.weights - held.gradients) / unit,
    }


def _cell(partitions: int, naive: bool, results: Mapping[str, Any]) -> tuple[str, ...]:
    """The settings in which the rows of the table differ."""
    micro_batches, mode = (1, "never") if naive else (results["micro_batches"], "always")
    return f"partitions={partitions}", f"micro_batches={micro_batches}", f"recompute={mode}"


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
