"""What commit e8b9ded4 wrote is read as before: a run (second), a sweep and a reproduction, in words that have changed.

They were made there by `gpipe train`, `gpipe train -m` and `gpipe reproduce`, and are kept without pages, pictures and
checkpoints that no test reads.
"""

import json
import shutil
from pathlib import Path

import pytest
from training_runs import command

from gpipe_cli.config.old_words import KEYS, VALUES, update_words
from gpipe_cli.config.settings import read_config
from gpipe_cli.reporting.tables.recipe import read_reproduction
from gpipe_cli.results.run import read_run_result

OLD = Path(__file__).parent / "old_runs"


@pytest.fixture(autouse=True)
def _in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(OLD, tmp_path / "old", symlinks=True)
    monkeypatch.chdir(tmp_path / "old")


def test_a_run_is_evaluated_exported_and_resumed() -> None:
    config, result = read_config(Path("second")), read_run_result(Path("second"))
    assert (config.freeze, config.cost) == (("backbone",), "datasheet")
    assert (result.config["freeze"], result.config["cost"]) == (["backbone"], "datasheet")
    assert result.cpu_starved_share == pytest.approx(0.958, abs=1e-3)
    assert command("evaluate", "run=second") == 0
    evaluated = json.loads(Path("second/evaluate.json").read_text(encoding="utf-8"))
    assert evaluated["loss"] == pytest.approx(2.39427, abs=1e-4), "as in its result.json"
    assert command("export", "run=second", "format=safetensors", "file=model.safetensors") == 0
    assert command("train", "resume=second", "max_steps=null", "run_folder=resumed") == 0
    resumed = read_run_result(Path("resumed"))
    assert resumed.test is not None
    assert resumed.steps == 4
    assert resumed.test.loss == pytest.approx(2.3889, abs=1e-3), "as e8b9ded4 prints after the same step"
    assert "taken" not in Path("resumed/config.yaml").read_text(encoding="utf-8")


def test_a_sweep_is_resumed_and_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Its runs are named by old words, `cost=figures`, and none of them begins again."""
    assert command("train", "resume=sweep") == 0
    shown = capsys.readouterr().out
    assert "cost=datasheet" in shown
    assert "cost=reprofile" in shown
    assert sorted(path.name for path in Path("sweep").iterdir()) == ["cost=figures", "cost=measured_anew", "sweep.json"]
    assert command("compare", "second", "sweep", "format=json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["cost"] for row in rows] == ["datasheet", "datasheet", "reprofile"]


def test_a_reproduction_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Both recipes are done, so that none runs again; what `desk` meant is `small` today, and a line tells it."""
    assert read_reproduction(Path("paper/table3_no_fast_interconnect")).scale == "small"
    shutil.copytree("paper/table3_no_fast_interconnect", "paper/breakdown")
    assert command("reproduce", "table3_no_fast_interconnect", "breakdown", "scale=desk", "run_folder=paper") == 0
    out, err = capsys.readouterr()
    assert err == "gpipe reproduce: scale=desk is scale=small today\n"
    assert out.count("is done") == 2


@pytest.mark.parametrize("setting", ["cost=measured", "+cost=figures", "freeze=[taken]"])
def test_each_old_word_is_understood_on_the_command_line(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", "--cfg", "job", "model=resnet", setting) == 0
    out, err = capsys.readouterr()
    assert f"gpipe train: {setting} is " in err
    assert not any(f"{key}: {old}" in out.splitlines() for key, words in VALUES.items() for old in words)


def test_an_old_word_for_a_setting_that_the_command_lacks_is_refused_as_typed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was refused as `scale=small`, which nobody had typed."""
    assert command("train", "--cfg", "job", "scale=desk") == 2
    assert capsys.readouterr().err.startswith("gpipe train: scale=desk: no such setting")


def test_a_file_of_the_user_is_told_todays_word(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("defaults: [train, _self_]\ncost: figures\n", encoding="utf-8")
    assert command("train", "-cd", ".", "-cn", "mine") == 2
    assert "cost=datasheet" in capsys.readouterr().err


def test_a_recipe_with_old_words_is_read() -> None:
    old = {"recipe": {"desk": {"minutes": 1}, "values": {"desk": "desk"}}}
    new = {"recipe": {"small": {"minutes": 1}, "values": {"desk": "desk"}}}
    assert update_words(old) == new, "and nothing that is the user's own"
    assert not {*KEYS} & {*KEYS.values()}
