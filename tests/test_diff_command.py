"""`gpipe diff`: of two real runs, what differs and nothing else."""

import json
import re
from pathlib import Path

import pytest
from training_runs import TINY, command

from gpipe_cli.results.files import read_result, write_result

SHORT = [*TINY, "logger=[tensorboard]", "hardware=cpu", "executor=in_process", "max_steps=2", "model.drop_path=0"]


def shown(capsys: pytest.CaptureFixture[str], *runs: Path) -> dict[str, list[str]]:
    """The rows of all tables, and lines, by their first cell."""
    capsys.readouterr()
    assert command("diff", *map(str, runs)) == 0
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines() if line]
    return {first: cells for first, *cells in rows}


def test_what_differs_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for run, settings in ((one, ["partitions=1"]), (two, ["partitions=2"]), (three, ["partitions=2", "seed=1"])):
        assert command("train", *SHORT, *settings, f"run_folder={run}") == 0
    rows = shown(capsys, one, two)
    names = list(rows)
    assert names[names.index("setting") : names.index("result")][2:] == ["partitions"]
    assert rows["partitions"] == ["1", "2"]
    assert rows["test loss"][2] == "none"
    assert re.fullmatch(r"[+-][\d,.]+ %", rows["samples/s"][2])
    assert rows["the same"] == ["versions, code and hardware"]
    assert rows["train loss"] == ["the same bits in all 2 steps"]

    assert command("diff", str(one), str(two), "format=json") == 0
    entries = {(entry["kind"], entry["name"]): entry for entry in json.loads(capsys.readouterr().out)}
    assert [name for kind, name in entries if kind == "setting"] == ["partitions"]
    setting = entries["setting", "partitions"]
    assert [setting[key] for key in ("first", "second", "difference")] == [1, 2, None]
    speeds = [read_result(run)["samples_per_second"] for run in (one, two)]
    speed = entries["result", "samples_per_second"]
    assert [speed[key] for key in ("first", "second", "difference")] == [*speeds, speeds[1] - speeds[0]]
    assert [entries["curve", "train/loss"][key] for key in ("first", "second", "difference")] == [2, 2, None]

    assert command("diff", str(two), str(three), "format=csv") == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("kind,name,first,second,difference", "curve,train/loss,2,2,1")

    rows = shown(capsys, two, three)
    assert rows["seed"] == ["0", "1"]
    assert "partitions" not in rows
    assert rows["train loss"] == ["differs from step 1 on"]

    result = read_result(two)
    result["versions"]["torch"] = "2.9.0"
    result["starts"][-1]["code"]["gpipe"] = {"commit": "0123456789abcdef", "changed": True}
    result["test"]["top1"] += 0.125
    write_result(two, result)
    rows = shown(capsys, two, one)
    assert rows["torch"][0] == "2.9.0"
    assert rows["commit of gpipe"][0] == "0123456789ab, changed"
    assert rows["test top-1"][2] == "-12.50 points"
