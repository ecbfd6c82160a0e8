"""`-m hydra/sweeper=optuna`: a search that maximizes what a run results in, and goes on."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from training_runs import TINY, command

from gpipe_cli.commands.search import objective
from gpipe_cli.commands.sweep_folder import SWEEP
from gpipe_cli.results.files import read_result
from gpipe_cli.results.run import Evaluation, RunResult

SEARCH = [
    *TINY[2:], "model=custom", "model.target=custom_models:small", "hardware=cpu", "partitions=1", "max_steps=1",
    "checkpoint.every_epochs=0", "-m", "hydra/sweeper=optuna",
]  # fmt: skip


def test_the_best_of_two_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run that was not begun, as in an interrupted search, is chosen again and is the only one that runs."""
    pytest.importorskip("optuna", "3")
    place = [f"hydra.sweep.dir={tmp_path}/found", "hydra.sweeper.n_trials=2"]
    assert command("train", *SEARCH, *place, "optimizer.momentum=interval(0.1,0.9)") == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    saved = json.loads((tmp_path / "found" / SWEEP).read_text())
    folders = [tmp_path / "found" / run["folder"] for run in saved["runs"]]
    assert len({folder.name for folder in folders}) == 2
    reached = {read_result(folder)["test"]["top1"]: folder for folder in folders}
    found = yaml.safe_load((tmp_path / "found" / "optimization_results.yaml").read_text())
    assert found["best_value"] == max(reached)
    assert re.search(r"\nbest +optimizer.momentum=0\.\d+: ", printed.out)

    dropped = saved["runs"].pop()
    (tmp_path / "found" / SWEEP).write_text(json.dumps(saved))
    shutil.rmtree(folders[-1])
    assert command("train", f"resume={tmp_path}/found") == 0
    assert capfd.readouterr().out.count("completed before, skipped") == 1
    assert json.loads((tmp_path / "found" / SWEEP).read_text())["runs"][-1]["name"] == dropped["name"]
    assert read_result(folders[-1])["status"] == "completed"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["ema_decay=interval(0.9,0.5)"], "ema_decay=interval(0.9,0.5): `low <= high` must hold"),
        (["seed=1,2", "hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials=0: must be 1 or more"),
        (["seed=1,2", "hydra.sweeper.storage=nowhere"], "hydra.sweeper.storage=nowhere: Optuna cannot use it"),
        (["seed=1,2", "dry_run=true"], "dry_run=true: a search needs the results of its runs; leave it out"),
    ],
)
def test_what_cannot_be_searched_is_one_line(
    typed: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna", "3")
    assert command("train", *SEARCH, f"hydra.sweep.dir={tmp_path}/found", *typed) == 2
    assert re.fullmatch(rf"gpipe train: {re.escape(line)}.*\n", capsys.readouterr().err)


def test_where_all_runs_fail_their_table_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Optuna's error, that there is no best one, would say less; and they failed (1), no setting was wrong."""
    pytest.importorskip("optuna", "3")
    place = [f"hydra.sweep.dir={tmp_path}/found", "hydra.sweeper.n_trials=1", "optimizer.momentum=interval(0.1,0.9)"]
    fails = ["model.target=custom_models:told", "+model.arguments.way=exits"]
    assert command("train", *SEARCH, *place, *fails) == 1
    assert "No trials" not in capfd.readouterr().err


def test_what_is_maximized() -> None:
    done = RunResult("completed", samples_per_second=9.0)
    assert objective("train", replace(done, test=Evaluation(top1=0.75, loss=1.5))) == 0.75
    assert objective("train", replace(done, task="language_model", test=Evaluation(perplexity=4.5, loss=1.5))) == -1.5
    assert objective("bench", done) == 9.0
    assert objective("bench", replace(done, task="language_model", tokens_per_second=900.0)) == 900.0
    assert objective("train", None) is None


def test_without_the_sweeper_it_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert command("train", "-m", "hydra/sweeper=optuna", "seed=choice(1,2)") == 2
    line = "gpipe train: hydra/sweeper=optuna: needs Optuna 4 or newer, which is not installed; pip"
    assert capsys.readouterr().err.startswith(line)
