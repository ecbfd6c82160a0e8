"""`gpipe compare` as its users type it, over real runs."""

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_runs import TINY, command

from gpipe_cli.reporting.run.result import read_result, write_result
from gpipe_cli.system.files import FolderLock

FILES = {"comparison.csv", "comparison.html", "curves.png", "bars.png"}
RUN = [*TINY, "executor=in_process", "hardware=cpu", "max_steps=2", "checkpoint.every_epochs=0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `outputs`, in which lie a sweep of K = 1, 2 and a run that failed."""
    folder = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for k in (1, 2):
            assert command(patch, "train", *RUN, f"partitions={k}", f"run_folder=outputs/sweep/K{k}") == 0
        failed = folder / "outputs" / "failed"
        failed.mkdir()
        (failed / "config.yaml").write_text((folder / "outputs/sweep/K2/config.yaml").read_text(encoding="utf-8"))
        result = read_result(folder / "outputs/sweep/K2")
        write_result(failed, {**result, "status": "failed", "error": "boom", "test": None, "best": None})
        yield folder


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def test_a_sweep_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(monkeypatch, "compare", "outputs/sweep", "outputs/sweep/K2", "--output", str(tmp_path / "new")) == 0
    captured = capsys.readouterr()
    shown = " ".join(captured.out.split())
    assert captured.err == ""
    assert "2 runs, completed" in shown  # K = 2 is named twice and shown once
    assert "train/loss is identical to the last bit: partitions=1, partitions=2" in shown
    files = {file.name: file for file in (tmp_path / "new").iterdir()}
    assert set(files) == FILES
    page = files["comparison.html"].read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert "identical to the last bit" in page
    assert command(monkeypatch, "compare", "outputs/sweep", "--csv") == 0
    captured = capsys.readouterr()
    assert captured.out == files["comparison.csv"].read_text(encoding="utf-8")
    one, two = csv.DictReader(io.StringIO(captured.out))
    for row, k in ((one, 1), (two, 2)):
        result = read_result(Path(f"outputs/sweep/K{k}"))
        assert row["partitions"] == str(k)
        assert float(row["samples_per_second"]) == result["samples_per_second"]
        assert float(row["test_top1"]) == result["test"]["top1"]
        assert float(row["memory_bytes_fullest"]) == max(result["memory_bytes"])
        assert float(row["bubble_measured"]) == result["bubble"]["measured"]


def test_what_a_sweep_was_refused_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It leaves no run, so that a comparison of the sweep once showed two rows of three without a word."""
    shutil.copytree("outputs/sweep", tmp_path / "sweep")  # two that were possible
    runs = [
        {"run": number, "round": 1, "name": name, "folder": name, "exit_code": 2, "error": f"{name}: a mini-batch has"}
        for number, name in enumerate(("micro_batches=64", "micro_batches=65"), start=1)
    ]
    write_result(tmp_path / "sweep", {"command": "train", "arguments": [], "runs": runs}, "sweep.json")
    for folder in (tmp_path / "sweep", tmp_path):
        assert command(monkeypatch, "compare", str(folder), "--csv") == 0
        captured = capsys.readouterr()
        assert [row["partitions"] for row in csv.DictReader(io.StringIO(captured.out))] == ["1", "2"]
        for size, line in zip((64, 65), captured.err.splitlines(), strict=True):
            name = f"micro_batches={size}"
            refused = f"gpipe compare: left out: {tmp_path / 'sweep'}: {name} ended before its first step: {name}: "
            assert line == f"{refused}a mini-batch has"


def test_what_a_sweep_began_again_counts_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A sweep killed in a cell and resumed once showed the cell twice, interrupted and completed."""
    sweep = tmp_path / "sweep"
    for name in ("partitions=1", "partitions=1-2", "by_hand"):
        shutil.copytree("outputs/sweep/K2" if name == "by_hand" else "outputs/sweep/K1", sweep / name)
    run = {"run": 1, "round": 1, "name": "partitions=1", "folder": "partitions=1-2", "exit_code": 0}
    saved = {"command": "train", "arguments": [], "runs": [run], "abandoned": ["partitions=1"]}
    write_result(sweep, saved, "sweep.json")

    def shown(*folders: Path) -> list[str]:
        assert command(monkeypatch, "compare", *map(str, folders), "--csv") == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return [Path(row["folder"]).name for row in csv.DictReader(io.StringIO(captured.out))]

    for folder in (sweep, tmp_path):
        assert shown(folder) == ["by_hand", "partitions=1-2"], "what somebody put there is compared as well"
    assert shown(sweep, sweep / "partitions=1") == ["by_hand", "partitions=1-2", "partitions=1"], "asked for"
    write_result(sweep, {**saved, "runs": [{**run, "folder": "partitions=1"}]}, "sweep.json")
    assert "partitions=1" in shown(sweep), "a folder that is in use again"


def test_files_are_written_for_who_reads_only_the_first_line(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    arguments = [sys.executable, "-m", "gpipe_cli", "compare", "outputs/sweep", "--output", str(tmp_path)]
    answer = subprocess.run(arguments, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (answer.returncode, answer.stderr) == (141, "")
    assert {file.name for file in tmp_path.iterdir()} == FILES


def test_all_of_outputs_and_what_is_wrong_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torn = tmp_path / "outputs" / "torn"
    shutil.copytree("outputs", torn.parent, symlinks=True)
    torn.mkdir()
    (torn / "config.yaml").touch()
    (torn / "result.json").write_text('{"status": ', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for number in range(2):  # of a comparison nothing is compared again
        assert command(monkeypatch, "compare", "outputs", "nowhere") == 0
        shown, wrong = capsys.readouterr()
        named = [line.partition(": left out: ")[2].partition(":")[0] for line in wrong.splitlines()]
        assert named == ["nowhere", "outputs/torn/result.json"]
        assert "3 runs" in shown
        assert "failed: boom" in shown
        made = sorted(Path("outputs").glob("*_compare"))
        assert len(made) in (1, number + 1)  # named by the second
        assert {file.name for file in made[0].iterdir()} == FILES


def test_a_folder_that_is_being_written_to_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = FolderLock(tmp_path)
    assert command(monkeypatch, "compare", "outputs/sweep", "--output", str(tmp_path)) == 2
    lock.release()
    assert f"--output {tmp_path}: process {os.getpid()} on" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_single_run_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("comparison.html", "curves.png"):  # of other runs; without the page they are not a comparison's
        (tmp_path / name).write_bytes(b"of other runs")
    assert command(monkeypatch, "compare", "outputs/failed", "--output", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "1 run\n" in shown
    assert "no run has curves" in shown
    assert sorted(file.name for file in tmp_path.iterdir()) == ["bars.png", "comparison.csv", "comparison.html"]


@pytest.mark.parametrize(
    ("arguments", "named", "remedy"),
    [
        ("", "RUN", "the newest runs are outputs/"),
        ("nowhere empty", "nowhere", "(and 1 more like it)"),
        ("outputs/sweep --csv --output x", "--output x", "leave one of them out"),
        ("outputs/sweep --output file/x", "--output file/x", "no folder can be made there"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Path, arguments: str, named: str,
    remedy: str,
) -> None:  # fmt: skip
    (place / "empty").mkdir(exist_ok=True)
    (place / "file").touch()
    before = sorted(place.rglob("*"))
    assert command(monkeypatch, "compare", *arguments.split()) == 2
    shown, error = capsys.readouterr()
    assert (shown, error.count("\n")) == ("", 1)
    assert error.startswith(f"gpipe compare: {named}")
    assert remedy in error
    assert sorted(place.rglob("*")) == before


def test_tab_completion_leaves_folders_to_the_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", "gpipe compare out")
    assert command(monkeypatch, "-sc", "query=bash") == 0
    assert capsys.readouterr() == ("", "")


def test_csv_imports_no_torch() -> None:
    code = "import sys; from gpipe_cli.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    arguments = [sys.executable, "-c", code, "compare", "outputs/sweep", "--csv"]
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "run,partitions," in answer.stdout
    assert not {"torch", "tensorboard", "matplotlib"} & set(answer.stderr.split())


def test_a_run_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pipes and devices were read for ever."""
    run = tmp_path / "run"
    shutil.copytree("outputs/sweep/K1", run)
    result, event = run / "result.json", run / "events.out.tfevents.1.x"

    def refused(file: Path) -> None:
        assert command(monkeypatch, "compare", str(run)) == 2
        shown, error = capsys.readouterr()
        assert (shown, error.count("\n")) == ("", 1)
        assert error.startswith(f"gpipe compare: {file}: ")

    os.mkfifo(event)
    refused(event)
    event.unlink()
    for content in ("{}", "[1]", "[" * 100_000):
        result.write_text(content)
        refused(result)
    result.unlink()
    result.symlink_to("/dev/zero")
    refused(result)
