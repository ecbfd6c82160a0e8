"""Table 1: what is planned, what was counted, and the largest model that fits."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_runs import HERE, answering, column, experiment, real_runner

from gpipe_cli.errors import NothingFitsError
from gpipe_cli.reproduction.experiments.largest_model import BYTES, NAIVE, naive_activations, train
from gpipe_cli.reproduction.recipe import read_recipe
from gpipe_cli.reproduction.runner import keep_last

MB = 10**6
SIZES = [
    {"name": name, "shown": f"(18, {filters})", "settings": [f"model.filters={filters}"], "partitions": partitions,
     "parameters": parameters, "model": 12e-9 * parameters, "activations": activations}
    for name, filters, partitions, parameters, activations in (
        ("Naive-1", 8, 1, 10e6, 3.0), ("Pipeline-1", 16, 1, 20e6, 2.0), ("Pipeline-2", 32, 2, 40e6, 4.0)
    )
]  # fmt: skip


def answer(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
    """A model has a million parameters for each filter; 16 bytes of each, and 100 MB more for each stage."""
    k, filters = int(settings["partitions"]), int(settings.get("model.filters", "8"))
    naive = settings["recompute"] == "never"
    assert naive == (settings["micro_batches"] == "1")
    if command == "bench":
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "result.json").write_text(f'{{"prediction": {{"activation_bytes": {[1000] * k}}}}}')
        return "bench.json", {"rows": [{"folders": ["run"], "activation_bytes": [1000] * (k - 1) + [1024]}]}
    if command == "simulated":
        raise NothingFitsError("not even one sample")  # see below for real ones
    comparisons = []
    if "++solve" in settings:
        if naive and settings.get("hardware.memory_gib") == "0.001":
            raise NothingFitsError("solve=max_model: not even the smallest model fits")
        filters = 9 if naive else 24 * k
        tried = [{"value": str(filters), "chosen": True}, {"value": str(filters + 1), "chosen": False}]
        comparisons = [
            {"setting": "model.normal_cells", "candidates": [{"value": "99", "chosen": True}]},
            {"setting": "model.filters", "candidates": tried},
        ]
    elif filters == 32 and "here_" not in folder.name and settings.get("hardware.memory_gib") != "null":
        raise NothingFitsError("hardware.memory_gib=8: no cut fits")
    memory = {
        "weights_bytes": 4 * filters * MB / k,
        "optimizer_bytes": 8 * filters * MB / k,
        "gradients_bytes": 4 * filters * MB / k,
        "activations_bytes": 60 * MB,
        "workspace_bytes": 40 * MB,
        "total_bytes": 16 * filters * MB / k + 100 * MB,
        "limit_bytes": 2**30,
    }
    plan = {
        "parameters": filters * MB,
        "model_name": f"AmoebaNet-D (18, {filters})",
        "hardware": {"name": "tpu_v2"},
        "comparisons": comparisons,
    }
    return "plan.json", {**plan, "stages": [{"memory": memory}] * k}


def test_planned_counted_and_the_papers_numbers_have_columns_of_their_own(tmp_path: Path) -> None:
    found = experiment("table1_amoebanet", sizes=SIZES, micro_batches=4)(answering(tmp_path, answer))
    parameters, model, activations, largest, trained = found.tables
    assert column(parameters, "planned - paper, %", "difference") == ["-20.0", "-20.0", "-20.0"]
    assert column(model, "weights, optimizer, GB", "planned") == ["0.10", "0.19", "0.38"]  # 12 bytes each
    assert column(model, "and gradients, GB", "planned") == ["0.13", "0.26", "0.51"]
    assert column(model, "planned - paper", "difference") == ["-0.02", "-0.05", "-0.10"]
    assert column(activations, "activations, GB", "planned") == ["0.10", "0.10", "0.20"]
    assert column(activations, "fits", "planned") == ["yes", "yes", "no"]
    assert column(largest, "size", "planned") == ["(18, 9)", "(18, 24)", "(18, 48)"]
    assert column(largest, "times", "paper") == ["1.0", "2.0", "4.0"]
    assert column(largest, "times", "planned") == ["1.0", "2.7", "5.3"]
    assert column(largest, "planned - paper", "difference") == ["+0.0", "+0.7", "+1.3"]
    assert column(trained, "", "") == ["Naive-1", "Pipeline-1", "Pipeline-2"]
    assert column(trained, "activations", "planned") == ["1000 B", "1000 B", "2.0 KiB"]
    assert column(trained, "activations", "counted") == ["1.0 KiB", "1.0 KiB", "2.0 KiB"]
    assert column(trained, "counted - planned", "difference") == ["+24 B"] * 3
    assert ("found", "activations planned and counted are the same to the byte in 0 of 3 rows") in found.notes


def test_a_compiler_that_fuses_keeps_the_inputs_of_products_alone(tmp_path: Path) -> None:
    """Of each layer what goes into the attention's three projections, its output, and the two of the feed-forward; of
    the softmax its input."""
    width, hidden, length, samples = 16, 32, 8, 4
    tiny = (
        f"model.width={width}", f"model.hidden={hidden}", f"model.length={length}", "model.heads=2",
        "dataset.vocabulary=50", f"batch_size={samples}", *HERE,
    )  # fmt: skip
    values = read_recipe("table1_transformer").values
    model = values["sizes"][0]
    here = real_runner("table1_transformer", tmp_path, *tiny)
    layers = int(model["shown"])
    inputs = layers * (3 * width + hidden) + width
    row = naive_activations("float32", "hardware.memory_gib=null", model, BYTES[values["unit"]], here)
    assert row is not None
    fused = 4 * samples * length * inputs / BYTES[values["unit"]]
    assert (row["samples"], row["fused"]) == (samples, fused)
    assert row["activations"] > fused


def test_the_largest_model_is_really_trained_and_its_activations_are_as_planned(tmp_path: Path) -> None:
    recipe = read_recipe("table1_transformer")
    tiny = ("model.width=16", "model.hidden=32", "model.length=16", "dataset.vocabulary=50", "batch_size=4")
    settings = keep_last((*recipe.small.settings, *tiny, *HERE, "hardware.memory_gib=0.0004"))
    here = real_runner("table1_transformer", tmp_path, *settings)
    row = train("Naive-1", NAIVE, recipe.values["grown"], here)
    assert row is not None
    assert row["name"] == "Naive-1"
    assert int(row["size"]) >= 1
    assert 0 < row["fullest"]["total_bytes"] <= row["fullest"]["limit_bytes"]
    assert row["counted"]
    assert row["counted"] == row["planned"]
