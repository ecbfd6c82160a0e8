"""Results as types: what an earlier version has written is read, and no other room knows where a number stands."""

import json
from pathlib import Path

import pytest
from training_runs import NAMED, SMALL, command

from gpipe_cli.results.files import as_json
from gpipe_cli.results.run import read_run_result, write_run

OLDER = (Path(__file__).parent / "older_result.json").read_text(encoding="utf-8")


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A run that an earlier version has written: some keys are missing, others are unknown by now."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("partitions: 2\n", encoding="utf-8")
        (tmp_path / name / "result.json").write_text(OLDER, encoding="utf-8")
    return tmp_path


def test_an_older_run_is_listed_and_compared(
    older: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(older)
    expected = {"test_top1": 0.875, "samples_per_second": 512.0, "step_seconds": 0.0625}
    for line in (["list", "runs", "."], ["compare", "one", "two"]):
        assert command(*line, "format=json") == 0
        for row in json.loads(capsys.readouterr().out):
            assert {key: row[key] for key in expected} == expected
            assert row.get("memory_bytes_fullest", 2**21) == 2**21, "of the fullest stage"


def test_an_older_run_is_resumed_and_exported() -> None:
    short = [*SMALL, "partitions=1", "executor=in_process", "checkpoint.every_steps=1"]
    assert command("train", *short, "max_steps=1", "run_folder=run") == 0
    written = json.loads(Path("run/result.json").read_text(encoding="utf-8"))
    Path("run/result.json").write_text(json.dumps(json.loads(OLDER) | {"config": written["config"]}), encoding="utf-8")
    assert command("train", *short, "max_steps=2", "resume=run", "run_folder=further") == 0
    assert read_run_result(Path("further")).steps == 2
    assert command("export", "run=run", NAMED) == 0
    assert Path("run/model.safetensors").exists()


def test_a_result_is_written_as_it_was_read(older: Path, tmp_path: Path) -> None:
    result = read_run_result(older / "one")
    write_run(tmp_path, result)
    assert read_run_result(tmp_path) == result
    written, known = json.loads((tmp_path / "result.json").read_text(encoding="utf-8")), json.loads(OLDER)
    assert {*known} - {*written} == {"a_key_of_another_version"}
    assert not {"tokens_per_second", "unigram_perplexity"} & {*written}, "which only runs of text have"
    assert as_json(known["config"]) == as_json(written["config"])


# `gpipe reproduce` and its tables read the files of commands as any program would.
