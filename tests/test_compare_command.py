"""`gpipe compare` as its users type it, over real runs."""

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from training_runs import TINY, command

from gpipe_cli.results.files import read_result, write_result

Compare = Callable[..., tuple[int, str, str]]

RUN = [*TINY, "logger=[tensorboard]", "executor=in_process", "hardware=cpu", "max_steps=2", "checkpoint.every_epochs=0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `outputs`, in which lie a sweep of K = 1, 2 and a run that failed."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for k in (1, 2):
            assert command("train", *RUN, f"partitions={k}", f"run_folder=outputs/sweep/K{k}") == 0
        failed = folder / "outputs" / "failed"
        failed.mkdir()
        (failed / "config.yaml").write_text((folder / "outputs/sweep/K2/config.yaml").read_text(encoding="utf-8"))
        result = read_result(folder / "outputs/sweep/K2")
        write_result(failed, {**result, "status": "failed", "error": "boom", "test": None, "best": None})
        yield folder


@pytest.fixture
def compare(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """`gpipe compare`, called in `place`: its exit code, and what it wrote to stdout and stderr."""
    monkeypatch.chdir(place)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = command("compare", *map(str, arguments))
        return code, *capsys.readouterr()

    return run


def rows(table: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(table)))


def test_a_sweep_is_compared(compare: Compare) -> None:
    code, shown, error = compare("outputs/sweep", "outputs/sweep/K2")
    assert (code, error) == (0, "")
    assert "2 runs, completed" in shown  # K = 2 is named twice and shown once
    assert "train/loss is identical to the last bit" in " ".join(shown.split())
    assert shown.splitlines()[-1].split() == ["curves", "tensorboard", "--logdir", str(Path("outputs/sweep").resolve())]
    table = compare("outputs/sweep", "format=csv")[1]
    for row, k in zip(rows(table), (1, 2), strict=True):
        result = read_result(Path(f"outputs/sweep/K{k}"))
        assert row["partitions"] == str(k)
        assert float(row["samples_per_second"]) == result["samples_per_second"]
        assert float(row["bubble_measured"]) == result["bubble"]["measured"]
    for found, k in zip(json.loads(compare("outputs/sweep", "format=json")[1]), (1, 2), strict=True):
        result = read_result(Path(f"outputs/sweep/K{k}"))
        assert (found["partitions"], found["steps"], found["bubble_ideal"]) == (k, 2, result["bubble"]["ideal"])
        assert found["samples_per_second"] == result["samples_per_second"]


def test_of_two_runs_all_that_differs_is_shown(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    runs = [tmp_path / name for name in ("one", "two")]
    for run, k in zip(runs, (1, 2), strict=True):
        shutil.copytree(f"outputs/sweep/K{k}", run)

    def differing() -> tuple[dict[str, list[str]], str]:
        """The rows of the table and the facts below by their first cell, and all that is shown."""
        shown = compare(*runs)[1]
        lines = [re.split(r"  +", line.strip()) for line in shown.splitlines() if line]
        return {first: cells for first, *cells in lines}, shown

    found, shown = differing()
    assert found["differs"] == ["one", "two", "difference"], "the names that were given"
    assert found["partitions"] == ["1", "2"]
    assert re.fullmatch(r"[+-][\d,.]+ %", found["samples/s"][2])
    assert "test loss " in found["the same"][0]
    assert not {"micro_batches", "torch", "test loss", "commit of gpipe"} & found.keys()
    assert "differs from step" not in shown

    result = read_result(runs[0])
    result["versions"]["timm"] = "0.0.1"
    result["starts"][-1]["code"]["gpipe"] = {"commit": "0123456789abcdef", "changed": True}
    result["test"]["top1"] += 0.125
    write_result(runs[0], result)
    found, _ = differing()
    assert found["version of timm"][0] == "0.0.1"
    assert found["commit of gpipe"][0] == "0123456789ab, changed"
    assert found["test top-1"][2] == "-12.50 points"
    first, second = rows(compare(*runs, "format=csv")[1])
    assert (first["version of timm"], first["partitions"], second["partitions"]) == ("0.0.1", "1", "2")


def test_a_resumed_run_is_compared_without_a_warning(place: Path, tmp_path: Path) -> None:
    """TensorBoard's reader warned of the steps that were repeated, and a run that began later than another one was said
    to differ from its first step on."""
    first, resumed, later = (tmp_path / name for name in ("first", "resumed", "later"))
    given = [*RUN, "partitions=1", "epochs=2", "checkpoint.every_steps=1"]
    assert command("train", *given, f"run_folder={first}") == 0
    shutil.copytree(first, resumed, symlinks=True)
    shutil.rmtree(resumed / "checkpoints/step_00000002")
    assert command("train", f"resume={resumed}", f"run_folder={resumed}", "max_steps=4") == 0
    assert command("train", f"resume={first}", f"run_folder={later}", "max_steps=4") == 0
    program = Path(sys.executable).with_name("gpipe")
    for other in (first, later):
        ended = subprocess.run([program, "compare", resumed, other], capture_output=True, text=True, check=True)
        assert ended.stderr == ""
        assert "differs from step" not in ended.stdout
        assert "\nepochs " not in ended.stdout.replace("epochs done", ""), "the name of a setting"


def test_runs_that_differ_in_the_seed_only_get_means_and_a_table_for_papers(compare: Compare, tmp_path: Path) -> None:
    for seed, top1 in ((1, 0.25), (2, 0.5), (3, 0.75)):
        shutil.copytree("outputs/sweep/K1", run := tmp_path / "seeds" / f"{seed}")
        result = read_result(run)
        result["config"]["seed"], result["test"]["top1"] = seed, top1
        write_result(run, result)
    shown = " ".join(compare(tmp_path / "seeds")[1].split())
    assert "over seeds mean +- deviation: test top-1 50.0 +- 25.0 %" in shown
    lines = compare(tmp_path / "seeds", "format=latex")[1].splitlines()
    assert (lines[1], lines[-2:]) == (r"\toprule", [r"\bottomrule", r"\end{tabular}"])
    assert len({line.count(" & ") for line in lines if line.endswith(r"\\")}) == 1
    assert r" & top-1 \% & " in lines[2]
    assert lines[-3].startswith(r"mean $\pm$ deviation & ")
    assert r" & 50.0 $\pm$ 25.0 & " in lines[-3]
    assert "over seeds" not in compare("outputs/sweep")[1]


def test_a_terminal_obeys_no_run(compare: Compare, tmp_path: Path) -> None:
    """Names in a foreign result.json reached it as they were, with control sequences."""
    run = tmp_path / "run"
    shutil.copytree("outputs/sweep/K2", run)
    write_result(run, {**read_result(run), "model": "Amoeba\x1b]0;changed\x07Net", "dataset": "\x9b2Jdigits"})
    code, shown, error = compare("outputs/sweep/K1", run)
    assert code == 0
    assert "Amoeba]0;changedNet" in shown + error
    assert not {"\x1b", "\x07", "\x9b"} & {*shown, *error}


def test_what_a_sweep_was_refused_is_named(compare: Compare, tmp_path: Path) -> None:
    """Two rows of three were shown without a word."""
    sweep = tmp_path / "sweep"
    for name in ("partitions=1", "by_hand"):
        shutil.copytree("outputs/sweep/K2" if name == "by_hand" else "outputs/sweep/K1", sweep / name)
    done = {"run": 1, "round": 1, "name": "partitions=1", "folder": "partitions=1", "exit_code": 0}
    name = "micro_batches=64"
    refused = {"run": 2, "round": 1, "name": name, "folder": name, "exit_code": 2, "error": f"{name}: a mini-batch has"}
    saved = {"command": "train", "arguments": [], "runs": [done, refused]}
    write_result(sweep, saved, "sweep.json")
    why = f"{name} ended before its first step: {name}: a mini-batch has"
    for folders in ((sweep,), (tmp_path,), (sweep, sweep / "partitions=1")):
        code, table, error = compare(*folders, "format=csv")
        assert code == 0
        assert error.splitlines()[0] == f"gpipe compare: left out: {sweep}: {why}"
        shown = [Path(row["folder"]).name for row in rows(table)]
        assert shown == ["by_hand", "partitions=1"], "what somebody put there is compared as well"


def test_all_of_outputs_and_what_is_wrong_with_it(
    compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torn = tmp_path / "outputs" / "torn"
    shutil.copytree("outputs", torn.parent, symlinks=True)
    monkeypatch.chdir(tmp_path)
    torn.mkdir()
    (torn / "config.yaml").touch()
    (torn / "result.json").write_text('{"status": ', encoding="utf-8")
    code, shown, wrong = compare("outputs", "nowhere")
    named = [line.partition(": left out: ")[2].partition(":")[0] for line in wrong.splitlines()]
    assert (code, named) == (0, ["outputs/torn/result.json", "nowhere"])
    assert "3 runs" in shown
    assert "failed: boom" in shown


@pytest.mark.usefixtures("compare")
def test_csv_imports_no_torch() -> None:
    code = "import sys; from gpipe_cli.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    arguments = [sys.executable, "-c", code, "compare", "outputs/sweep", "format=csv"]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "run,partitions," in answer.stdout
    assert not {"torch", "tensorboard", "matplotlib"} & set(answer.stderr.split())
