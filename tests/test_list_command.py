"""`gpipe list`: tables of what there is, made from the files that hold it."""

import csv
import json
import re
from pathlib import Path

import pytest
from training_runs import command

from gpipe_cli.config.comments import CONF_DIR
from gpipe_cli.results.files import write_result


@pytest.mark.parametrize(("topic", "group"), [("models", "model"), ("datasets", "dataset"), ("hardware", "hardware")])
def test_a_row_for_each_choice(topic: str, group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", topic) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1].islower()}
    for name in ("gpipe", group):
        rows.pop(name, None)
    assert {file.stem for file in (CONF_DIR / group).glob("*.yaml")} == rows.keys()
    assert command("list", topic, "format=json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry[group] for entry in found] == list(rows)
    if group == "hardware":
        (v100,) = (entry for entry in found if entry["hardware"] == "v100")
        assert (v100["peak_tflops"], v100["bfloat16_tflops"], v100["memory_gb_per_second"]) == (15.7, None, 720.0)


def test_chains_of_timm(capsys: pytest.CaptureFixture[str]) -> None:
    """And not those of the same name that are none."""
    assert command("list", "models", "test_[bre]*") == 0
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.startswith("test_resnet "))
    assert row[1] == "ResNet"
    assert "\ntest_byobnet" not in printed


def test_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one that left nothing but its settings, those of a sweep, and those whose result.json was damaged."""
    damaged = ['{"status": "comp', "[1]"]
    for name in ("one", "sweep/two", *map(str, range(len(damaged)))):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
    result = {"status": "completed", "model": "M", "dataset": "digits", "config": {"partitions": 2, "micro_batches": 4}}
    result["starts"] = [{"started": "2026-01-31T12:00:00+01:00"}]
    for name, text in enumerate(damaged):
        (tmp_path / str(name) / "result.json").write_text(text)
    write_result(tmp_path / "one", result | {"test": {"top1": 0.5}, "samples_per_second": 123.4})
    assert command("list", "runs", ".") == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["one"] == ["2", "4", "completed", "2026-01-31", "12:00", "50.0", "%", "123.4", "digits", "M"]
    assert rows["sweep/two"][:4] == ["-", "-", "no", "result"]
    for name in range(len(damaged)):
        assert (rows[str(name)][:3], rows[str(name)][5:]) == (["-", "-", "damaged"], ["-"] * 4)
    assert command("list", "runs", str(tmp_path / "sweep"), "format=json") == 0
    (two,) = json.loads(capsys.readouterr().out)
    assert (two["run"], two["status"]) == (str(tmp_path / "sweep/two"), "no result"), "the whole path"
    assert command("list", "runs", ".", "format=csv") == 0
    (one,) = (row for row in csv.DictReader(capsys.readouterr().out.splitlines()) if row["run"] == "one")
    assert (one["samples_per_second"], one["test_top1"], one["test_perplexity"]) == ("123.4", "0.5", "")


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list", "recipes") == 0
    assert re.search(r"\nfigure3_resnet101 +3 min  Throughput of ResNet-101", capsys.readouterr().out)
