"""Recipes that train: several fine-tunings, a translation; what their tables say of what was run."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import HERE, answering, column, experiment, real_runner

from gpipe_cli.reproduction.recipe import read_recipe
from gpipe_cli.reproduction.runner import keep_last
from gpipe_cli.results.files import read_result

FIRST, OTHERS = "dataset.classes=[0,1,2,3,4]", "dataset.classes=[5,6,7,8,9]"  # of transfer_cifar10


def settings(name: str, *given: str) -> tuple[str, ...]:
    return keep_last((*read_recipe(name).small.settings, *given))


TOP1 = {"pretrained": 0.8, "seed_0": 0.9, "seed_1": 0.92, "seed_2": 0.91, "from_scratch": 0.5}


def trained(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
    model = {"model": "Some model", "model_parameters": 1000, "steps": 2, "global_batch": 8, "dataset": "cifar10"}
    test = {"top1": TOP1.get(folder.name, 0.9), "top5": 0.9, "loss": 0.5}
    return "result.json", {**model, "test": test, "config": {"seed": int(settings.get("seed", "0"))}}


def test_fine_tuning_is_the_mean_of_its_runs(tmp_path: Path) -> None:
    runner = answering(tmp_path, trained)
    means, each = experiment("transfer_cifar10")(runner).tables
    assert column(means, "", "measured") == ["91.00 %", "1.00", "-", "80.00 %", "50.00 %"]
    assert column(means, "", "paper") == ["99.0 %", "-", "98.5 %", "-", "-"]
    assert column(means, "", "difference") == ["-"] * 5  # at small scale
    assert column(each, "seed") == ["0", "1", "2"]
    commands = [shlex.split(one) for one in runner.commands]
    made = f"init_from='{tmp_path / 'pretrained'}'"
    assert [made in one for one in commands] == [False, True, True, True, False]
    assert [OTHERS in one for one in commands] == [False, True, True, True, True]
    assert FIRST in commands[0]


def test_a_translation(tmp_path: Path) -> None:
    pairs = [(f"Haus{n} am See", f"house{n} by the lake", "de-en") for n in range(30)]
    for part, rows in (("train", pairs[5:]), ("test", pairs[:5])):
        (tmp_path / f"{part}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    text = (
        "dataset=parallel_text", f"dataset.root={tmp_path}", f"dataset.cache={tmp_path}", "dataset.vocabulary=288",
        "batch_tokens=200", "micro_batches=2", "model.layers=1", "model.width=16", "model.hidden=32", "model.heads=2",
        "max_steps=1", *HERE,
    )  # fmt: skip
    name, folder = "batch_size_260k", tmp_path / "recipe"
    found = experiment(name)(real_runner(name, folder, *settings(name, *text)))
    table, _ = found.tables
    evaluation = read_result(folder / "trained", "evaluate.json")
    assert evaluation["translation"]["sentences"] == 5
    assert evaluation["loss"] == pytest.approx(read_result(folder / "trained")["test"]["loss"])
    assert column(table, "") == [
        "NLL, nats a token", "perplexity", "... of a unigram model", "BLEU", "... of copying the source", "chrF",
        "... of copying the source",
    ]  # fmt: skip
    measured = column(table, "", "measured")
    assert measured[0] == f"{evaluation['loss']:.2f}"
    assert measured[5:] == [f"{evaluation['translation'][key]:.2f}" for key in ("chrf", "chrf_copy")]
    assert column(table, "", "paper") == ["2.58", "-", "-", "30.92", "-", "-", "-"]
    assert "of at most 200 tokens" in dict(found.notes)["trained"]
