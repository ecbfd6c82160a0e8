"""Sweeps: names, processes, failures, the table."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import command, wait_until

from gpipe_cli.cli import main
from gpipe_cli.commands import child, sweep_folder
from gpipe_cli.commands.child import error_line, run_process
from gpipe_cli.commands.sweep_folder import SweepFolder
from gpipe_cli.commands.sweep_names import differences, free_folder, varied_settings
from gpipe_cli.commands.sweep_record import SWEEP, Attempt, abandoned_runs
from gpipe_cli.reporting.run.result import read_result, write_result
from gpipe_cli.reporting.tables.sweep import Run, show_sweep

CAN_TRAIN = importlib.util.find_spec("gpipe_cli.launch.training_run") is not None


def gpipe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpipe_cli", "train", *arguments]
    environment = {**os.environ, "COLUMNS": "160"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


def test_runs_are_named_by_what_differs() -> None:
    task = ["micro_batches=1,4", "epochs=2"]
    jobs = [["micro_batches=1", "epochs=2"], ["micro_batches=4", "epochs=2"]]
    assert differences(jobs, task) == ["micro_batches=1", "micro_batches=4"]
    assert differences([["partitions=2", "micro_batches=4"]], ["partitions=2,4", "micro_batches=4"]) == ["partitions=2"]
    two = [["partitions=2", "micro_batches=4"], ["partitions=4", "micro_batches=8"]]
    assert differences(two, []) == ["micro_batches=4,partitions=2", "micro_batches=8,partitions=4"]
    assert differences([["epochs=2"]], ["epochs=2"]) == ["run"]
    assert differences([["epochs=2", "dry_run=True"]], ["epochs=2", "dry_run=true"]) == ["run"]  # as Hydra writes it
    twice = ["seed=3", "seed=1,2"]  # the last one counts
    assert differences([["seed=3", "seed=1"], ["seed=3", "seed=2"]], twice) == ["seed=1", "seed=2"]
    added = [["++steps=5", "model=resnet"], ["++steps=9", "model=resnet"]]
    assert differences(added, []) == ["steps=5", "steps=9"]
    assert varied_settings(added, []) == [{"steps": 5}, {"steps": 9}]
    assert varied_settings(jobs, task) == [{"micro_batches": 1}, {"micro_batches": 4}]


def test_folders_are_new_and_safe(tmp_path: Path) -> None:
    first = free_folder(tmp_path, "partition.balance=[4,8],dataset.root='/a b/../c'")
    assert first == tmp_path / "partition.balance=[4,8],dataset.root=_a_b_.._c"
    first.mkdir()
    assert free_folder(tmp_path, "partition.balance=[4,8],dataset.root=/a b/../c") == tmp_path / f"{first.name}-2"
    assert free_folder(tmp_path, "..").parent == tmp_path
    assert free_folder(tmp_path, "..").name == "run"
    assert len(free_folder(tmp_path, "x" * 1000).name) <= 255


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("", ""),
        ("warning\ngpipe train: partitions=0: no\nleaked\n", "partitions=0: no"),
        ("Traceback\n  File\nRuntimeError: boom\nmore of it\n", "RuntimeError: boom"),
        ("torch.OutOfMemoryError: 3 GiB\n", "torch.OutOfMemoryError: 3 GiB"),
        ("killed\n", "killed"),
    ],
)
def test_the_line_that_says_what_went_wrong(stderr: str, line: str) -> None:
    assert error_line(stderr) == line


def test_a_process_reports_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('out'); print('ValueError: bad', file=sys.stderr); sys.exit(3)"
    assert run_process([sys.executable, "-c", code]) == (3, "ValueError: bad", False)
    captured = capfd.readouterr()
    assert captured.out == "out\n"
    assert captured.err == "ValueError: bad\n"  # shown as well as kept


def test_an_interrupt_ends_the_whole_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.3)
    code = (
        "import pathlib, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"  # neither it nor its child wants to end
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(tmp_path)!r}, 'new').write_text(str(child.pid))\n"
        f"pathlib.Path({str(tmp_path)!r}, 'new').rename({str(tmp_path / 'pid')!r})\n"
        "time.sleep(60)\n"
    )

    def interrupt_when_running() -> None:
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_when_running, daemon=True).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        exit_code, _, interrupted = run_process([sys.executable, "-c", code])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (exit_code, interrupted) == (130, True)
    state = Path("/proc", (tmp_path / "pid").read_text(), "stat")

    def alive() -> bool:
        try:
            return state.read_text().rpartition(")")[2].split()[0] != "Z"  # dead, perhaps not yet reaped
        except OSError:
            return False

    until = time.monotonic() + 10  # a signal takes its time on a busy machine
    while alive() and time.monotonic() < until:
        time.sleep(0.02)
    assert not alive()


def test_the_table_shows_results_and_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result: dict[str, object] = {
        "status": "completed",
        "test": {"top1": 0.9306},
        "samples_per_second": 123.4,
        "step_seconds": 0.25,
    }
    runs = [
        Run("micro_batches=1", tmp_path / "a", 0, 12.0, result),
        Run("micro_batches=8", tmp_path / "c", 130, 1.0, {"status": "interrupted"}, number=3),
        Run("partition.balance=[4,8]", tmp_path / "b", 2, 1.0, {}, number=2, error="partition.balance=[4,8]: [no]"),
    ]
    show_sweep(runs)
    *lines, reason = capsys.readouterr().out.splitlines()
    assert reason == "run 2: partition.balance=[4,8]: [no]"
    assert all(len(line) <= 80 for line in lines)
    rows = lines[-len(runs) :]  # a line for each: no name is broken
    assert re.split(r"  +", rows[0].strip()) == [
        *("1", "micro_batches=1", "completed", "93.1 %", "123.4", "250.0 ms", "12.0 s")
    ]
    assert "partition.balance=[4,8]" in rows[1]
    assert "failed (2)" in rows[1]
    assert "interrupted" in rows[2]


def row_cells(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


@pytest.mark.parametrize("images_too", [False, True])
def test_text_is_compared_by_perplexity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], images_too: bool
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    common: dict[str, object] = {"samples_per_second": 96.4, "step_seconds": 0.25}
    text = common | {"task": "language_model", "test": {"perplexity": 41.3}, "tokens_per_second": 12_345.0}
    diverged = common | {"task": "translation", "test": {"perplexity": None}, "tokens_per_second": 12_345.0}
    images = common | {"task": "classification", "test": {"top1": 0.5}}
    last = images if images_too else diverged
    runs = [Run(f"seed={n}", tmp_path / "a", 0, 12.0, result) for n, result in enumerate((text, last, {}))]
    show_sweep(runs)
    lines = capsys.readouterr().out.splitlines()
    heading = next(line for line in lines if "what differs" in line).split()
    if images_too:
        assert heading[4:] == ["top-1", "perplexity", "samples/s", "tokens/s", "step", "time"]
        assert row_cells(lines[-3])[3:] == ["-", "41.3", "96.4", "12,345", "250.0 ms", "12.0 s"]
        assert row_cells(lines[-2])[3:] == ["50.0 %", "-", "96.4", "-", "250.0 ms", "12.0 s"]
    else:
        assert heading[4:] == ["perplexity", "tokens/s", "step", "time"]
        assert row_cells(lines[-3])[3:] == ["41.3", "12,345", "250.0 ms", "12.0 s"]
        assert row_cells(lines[-2])[3:] == ["-", "12,345", "250.0 ms", "12.0 s"]


def test_a_failing_run_does_not_stop_the_others(tmp_path: Path) -> None:
    result = gpipe(tmp_path, "-m", "micro_batches=64,4,128", "seed=3", "dry_run=true", "device=cpu")
    assert (result.returncode, result.stderr) == (1, "")
    for number, count in ((1, 64), (3, 128)):
        line = f"micro_batches={count}: a mini-batch has only batch_size=32 samples"
        assert f"failed (2) micro_batches={count}: {line}" in result.stdout  # at once, with its line
        assert f"\nrun {number}: {line}" in result.stdout  # and below the table
    assert result.stdout.index("dry run:") > result.stdout.index("failed (2) micro_batches=128"), "the last one is next"
    assert re.findall(r"(?m)^ *([123]) +micro_batches=\d+ +(?:failed \(2\)|dry_run)", result.stdout) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("train -m partitions=1,abc", "partitions=abc: must be a whole number"),
        ("bench -m seed=1,2 partitions=1,0", "partitions=0: must be 1 or more"),
        ("train -m seed=1,2 model.dropout=2", "model.dropout=2.0: must be 0 or more and below 1"),
        ("train -m micro_batches=64,128", "micro_batches=64: a mini-batch has only batch_size=32 samples"),
        ("bench -m dataset=digits,cifar10 dataset.download=1", "dataset.download=1: the chosen dataset has no such"),
    ],
)
def test_a_sweep_with_a_bad_member_does_not_begin(
    arguments: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`partitions=1,abc` once trained the good one for as long as it took, and then refused the other."""
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *arguments.split()) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert line in captured.err
    assert list(tmp_path.iterdir()) == []


def test_what_only_the_runs_can_tell_is_refused_once(tmp_path: Path) -> None:
    """A setting that is wrong in all runs and known to be so by none before it has looked: two are enough."""
    missing = ["dataset=image_folder", "dataset.root=nowhere", "dataset.num_classes=2", "device=cpu"]
    result = gpipe(tmp_path, "-m", *missing, "seed=1,2,3,4")
    assert result.returncode == 2
    assert result.stderr.startswith("gpipe train: dataset.root=nowhere: no such folder")
    assert len(result.stderr.splitlines()) == 1
    assert re.findall(r"(?m)^run (\d) of 4", result.stdout) == ["1", "4"]
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_cannot_be_composed_does_not_begin(tmp_path: Path) -> None:
    result = gpipe(tmp_path, "-m", "dataset=digits,cifr10")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("gpipe train: dataset=cifr10: there is no such choice; choose one of birdsnap,")


@pytest.mark.skipif(not CAN_TRAIN, reason="there is no training yet")
def test_runs_lie_side_by_side_in_the_sweep(tmp_path: Path) -> None:
    text = "defaults:\n  - train\n  - _self_\nepochs: 7\n"
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "seven.yaml").write_text(text)
    options = ("-cd", "recipes", "-cn", "seven", "-m", "micro_batches=1,4", "dry_run=true", "device=cpu")
    result = gpipe(tmp_path, *options)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "outputs").glob("*_sweep")
    for count in (1, 4):
        written = json.loads((folder / f"micro_batches={count}" / "result.json").read_text())
        assert written["status"] == "dry_run"
        assert "epochs: 7\n" in (folder / f"micro_batches={count}" / "config.yaml").read_text()


HELD = [
    "model=custom", "model.target=bench_models:odd", "dataset=synthetic_images", "dataset.image_size=8",
    "dataset.num_classes=4", "dataset.train_samples=16", "dataset.test_samples=4", "batch_size=4",
    "data_workers=0", "threads=1", "device=cpu", "partitions=1", "checkpoint.every_steps=1", "recompute=never",
]  # fmt: skip


def environment_of(output: Path) -> dict[str, str]:
    """Where runs find the model, and the model what lets it go."""
    return {"PYTHONPATH": str(Path(__file__).parent), "HELD_UNTIL": str(output / "go")}


def train_again(folder: Path) -> int:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment_of(folder.parent).items():
            patch.setenv(name, value)
        return command(patch, "train", f"resume={folder}")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """A sweep whose second run was under way when Ctrl-C came: its folder, its exit code, what it said."""
    output = tmp_path_factory.mktemp("interrupted")
    arguments = ["-m", *HELD, "+model.arguments.way=held", "micro_batches=1,2,8", "max_steps=4", f"output={output}"]
    started = [sys.executable, "-m", "gpipe_cli", "train", *arguments]
    environment = os.environ | environment_of(output)
    pipe = subprocess.PIPE
    with subprocess.Popen(started, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        held = "*_sweep/micro_batches=2/checkpoints/step_00000002/index.json"
        wait_until(lambda: list(output.glob(held)) or process.poll() is not None, 120, "the second run")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    (folder,) = output.glob("*_sweep")
    return folder, process.returncode, said


def test_an_interrupted_sweep_goes_on(interrupted: tuple[Path, int, str], capfd: pytest.CaptureFixture[str]) -> None:
    folder, exit_code, said = interrupted
    assert exit_code == 130
    assert f"1 of 3 not run; go on with  gpipe train resume={folder}\n" in said
    first, held = folder / "micro_batches=1", folder / "micro_batches=2"
    assert [read_result(run)["status"] for run in (first, held)] == ["completed", "interrupted"]
    before = (first / "result.json").read_bytes(), (first / "result.json").stat().st_mtime_ns
    (folder.parent / "go").touch()
    assert train_again(folder) == 1, "the third run is impossible"
    output = capfd.readouterr().out
    assert "run 1 of 3: micro_batches=1: completed before, skipped\n" in output
    assert len(re.findall(r"(?m)^ *[12] +micro_batches=\d +completed ", output)) == 2, "both are in the table"
    assert f"\ngo on with  gpipe train resume={folder}\n" in output
    assert ((first / "result.json").read_bytes(), (first / "result.json").stat().st_mtime_ns) == before
    result = read_result(held)
    assert (result["status"], result["steps"], result["resumed_from"]) == ("completed", 4, str(held))


@pytest.mark.parametrize(
    ("command_name", "more", "line"),
    [
        ("train", "epochs=3", "epochs=3: resume={} is a sweep, whose runs would then differ in more than it says"),
        ("train", "-cn other", "-cn other: resume={} is a sweep"),
        ("train", "--cfg job", "--cfg job: resume={} is a sweep"),
        ("bench", "", "resume={}: is a sweep of gpipe train; go on with it by gpipe train resume="),
        ("train", "damaged", "{}/sweep.json: cannot be read as a sweep"),
        ("train", "no json", "{}/sweep.json: not valid JSON"),
    ],
)
def test_what_cannot_be_resumed_is_one_line(
    command_name: str,
    more: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = {"damaged": '{"command": "train"}', "no json": "{"}.get(more)
    Path("sweep").mkdir()
    Path("sweep", SWEEP).write_text(text or '{"command": "train", "arguments": ["-m", "seed=1,2"], "runs": []}')
    arguments = [] if text else more.split()
    assert command(monkeypatch, command_name, "resume=sweep", *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"gpipe {command_name}: {line.format('sweep')}")
    assert len(said.splitlines()) == 1
    assert [path.name for path in Path("sweep").iterdir()] == [SWEEP]


def test_a_sweep_does_not_begin_where_another_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SWEEP).write_text("{}")
    assert command(monkeypatch, "train", "-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}") == 2
    said = capsys.readouterr().err
    assert said.startswith(f"gpipe train: hydra.sweep.dir={tmp_path}: a sweep lies there already; go on with it by ")
    assert [path.name for path in tmp_path.iterdir()] == [SWEEP]


@pytest.mark.parametrize("arguments", ["train -m seed=1,2", "bench -m seed=1,2 steps=3", "train resume=sweep"])
def test_a_sweep_under_torchrun_is_refused(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of its processes once ran the whole sweep, all in the same folder."""
    monkeypatch.chdir(tmp_path)
    Path("sweep").mkdir()
    Path("sweep", SWEEP).write_text('{"command": "train", "arguments": ["-m", "seed=1,2"], "runs": []}')
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments.split()) == 2
    name = arguments.split()[0]
    said = capsys.readouterr().err
    assert said.startswith(
        f"gpipe {name}: torchrun: each of its processes would run the whole sweep; call gpipe {name}"
    )
    assert len(said.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("train -m seed=1,2 run_folder=foo", "run_folder=foo: the folder of a sweep, in which those of its runs lie, "),
        ("bench -m seed=1,2 run_folder=foo", "is given by hydra.sweep.dir=foo\n"),
        ("train hydra.mode=MULTIRUN run_folder=foo", "is given by hydra.sweep.dir=foo\n"),
        ("train hydra.sweep.dir=foo", "hydra.sweep.dir=foo: the folder of a run is given by run_folder=foo\n"),
        ("bench hydra.run.dir=foo", "hydra.run.dir=foo: the folder of a run is given by run_folder=foo\n"),
    ],
)
def test_a_folder_that_would_have_no_effect_is_refused(
    arguments: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, *arguments.split()) == 2
    said = capsys.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_at_work_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that went on with one sweep measured everything twice, at the same time."""
    monkeypatch.setattr(sweep_folder, "_ENDING_SECONDS", 0)
    path = tmp_path / "12-00-00_sweep"
    first = SweepFolder("bench", ["-m"])
    assert first.choose(path) == path
    assert SweepFolder("bench", ["-m"]).choose(path) == tmp_path / "12-00-00_sweep-2", "another of the same second"
    resumed = SweepFolder("bench", ["-m"], path)
    with pytest.raises(ValueError, match=r"12-00-00_sweep: process .* is at work there; wait"):
        resumed.choose(path)
    first.discard()
    path.mkdir(exist_ok=True)
    assert resumed.choose(path) == path
    resumed.discard()


def test_what_begins_again_leaves_nothing_that_is_of_no_use(tmp_path: Path) -> None:
    sweep = SweepFolder("train", ["-m"])
    path = sweep.choose(tmp_path / "sweep")
    sweep.begin([])
    (tmp_path / "notes.txt").touch()
    (path / "refused").mkdir()  # there was never a run
    (path / "refused" / "notes.txt").touch()
    sweep.give_up(Attempt(9, 1, "refused", "refused"))
    ends = {"killed": "running", "stopped": "interrupted", "wrong": "failed", "kept": "interrupted", "..": "running"}
    for number, (name, status) in enumerate(ends.items(), start=1):
        (path / name).mkdir(exist_ok=True)
        (path / name / "config.yaml").touch()
        write_result(path / name, {"status": status})
        if name == "kept":
            (path / name / "checkpoints" / "step_00000002").mkdir(parents=True)
        attempt = Attempt(number, 1, name, name)
        sweep.give_up(attempt)
        sweep.record(replace(attempt, folder=f"{name}-2"))
    sweep.discard()
    assert sorted(file.name for file in path.iterdir()) == ["kept", "refused", SWEEP, "wrong"]
    assert (tmp_path / "notes.txt").exists()
    assert abandoned_runs(path) == abandoned_runs(tmp_path) == {path / name for name in ("kept", "refused", "wrong")}


def read_one_line(*arguments: str) -> tuple[int, str]:
    """`gpipe ... | head -1`: its exit code, and what it said on stderr."""
    pipe = subprocess.PIPE
    started = [sys.executable, "-m", "gpipe_cli", *arguments]
    with subprocess.Popen(started, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        return process.wait(60), process.stderr.read()


def test_a_table_that_nobody_reads_any_more_is_written(tmp_path: Path) -> None:
    """Once there was no bench.json, and exit code 1 without a word."""
    settings = ["-m", "micro_batches=99,1", "steps=1", f"hydra.sweep.dir={tmp_path}"]
    assert read_one_line("bench", *settings) == (141, "")
    (row,) = read_result(tmp_path, "bench.json")["rows"]
    assert (row["settings"], row["status"]) == ({"micro_batches": 99}, "impossible")


def test_a_run_that_nobody_reads_any_more_ends_its_sweep(tmp_path: Path) -> None:
    tiny = ["model.normal_cells=3", "model.filters=4", "partitions=1", "device=cpu", "dry_run=true"]
    assert read_one_line("train", "-m", *tiny, "seed=1,2", f"hydra.sweep.dir={tmp_path}") == (141, "")
    (run,) = read_result(tmp_path, SWEEP)["runs"]
    assert (run["folder"], run["exit_code"]) == ("seed=1", 141)


def test_what_was_measured_before_stays_in_the_table(tmp_path: Path) -> None:
    """A sweep that went on and was stopped at its first cell wrote a table without those that were finished later."""
    ends = {"seed=1": None, "seed=2": 0}
    runs = [
        {"run": number, "round": 1, "name": name, "folder": name, "exit_code": code}
        for number, (name, code) in enumerate(ends.items(), start=1)
    ]
    given = ["-m", "seed=1,2", "micro_batches=99"]
    write_result(tmp_path, {"command": "bench", "arguments": given, "runs": runs}, SWEEP)
    (tmp_path / "seed=2").mkdir()
    write_result(tmp_path / "seed=2", {"status": "completed", "samples_per_second": 5.0, "config": {"seed": 2}})
    code, _ = read_one_line("bench", f"resume={tmp_path}")
    assert code == 141
    rows = read_result(tmp_path, "bench.json")["rows"]
    assert ("measured", 5.0) in [(row["status"], row["samples_per_second"]) for row in rows]


def test_a_cell_that_was_cut_off_is_measured_in_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Going on with a sweep that was killed once left `seed=1` beside `seed=1-2`, for TensorBoard too."""
    run = {"run": 1, "round": 1, "name": "seed=1", "folder": "seed=1", "exit_code": None}
    given = ["-m", "seed=1,2", "micro_batches=99"]
    write_result(tmp_path, {"command": "bench", "arguments": given, "runs": [run]}, SWEEP)
    (tmp_path / "seed=1").mkdir()
    (tmp_path / "seed=1" / "config.yaml").touch()
    write_result(tmp_path / "seed=1", {"status": "running"})
    with pytest.MonkeyPatch.context() as patch:
        assert command(patch, "bench", f"resume={tmp_path}") == 1, "nothing could be measured"
    assert "run 1 of 2: seed=1 " in capfd.readouterr().out
    assert not (tmp_path / "seed=1").exists()
    saved = read_result(tmp_path, SWEEP)
    assert ([run["folder"] for run in saved["runs"]], saved["abandoned"]) == (["seed=1", "seed=2"], [])
