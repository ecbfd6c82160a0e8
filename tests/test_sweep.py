"""Sweeps: names, forks, failures, going on, the table."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from training_runs import command

from gpipe_cli.commands import folders
from gpipe_cli.commands.command_line import parse_command_line
from gpipe_cli.commands.command_runner import CommandResult, fork_command, wait_for
from gpipe_cli.commands.compose_config import combinations
from gpipe_cli.commands.sweep import find_sweep
from gpipe_cli.commands.sweep_folder import SWEEP_FILE, SweepFolder
from gpipe_cli.commands.sweep_plan import describe_differences
from gpipe_cli.errors import InputError, NothingFitsError
from gpipe_cli.reporting.tables.sweep import Run
from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.results.metrics import METRICS
from gpipe_cli.system.source_code import commit_of

ODD = [
    "model=custom", "model.target=custom_models:told", "dataset=synthetic_images", "dataset.image_size=8",
    "dataset.num_classes=4", "dataset.train_samples=16", "dataset.test_samples=4", "batch_size=4", "hardware=cpu",
    "data_workers=0", "threads=1", "device=cpu", "partitions=1", "checkpoint.every_steps=1", "recompute=never",
    "logger=[]",
]  # fmt: skip
TARGET = Path(__file__).parent / "custom_models.py"


def test_runs_are_named_by_what_differs() -> None:
    two = [["partitions=2", "micro_batches=4"], ["partitions=4", "micro_batches=8"]]
    for jobs, same, names in (
        ([["partitions=2", "micro_batches=4"]], ["micro_batches"], ["partitions=2"]),
        (two, [], ["micro_batches=4,partitions=2", "micro_batches=8,partitions=4"]),
        ([["++steps=5", "model=resnet"], ["++steps=9", "model=resnet"]], [], ["steps=5", "steps=9"]),
    ):
        assert [name for name, _ in describe_differences(jobs, same)] == names
    assert describe_differences(two, [])[1] == ("micro_batches=8,partitions=4", {"partitions": 4, "micro_batches": 8})


def test_a_sweep_is_a_product_in_which_the_last_setting_varies_fastest() -> None:
    line = parse_command_line(
        "train", ["-m", "seed=range(1,3)", "hardware=glob(a100*)", "+steps=5", "batch_size=choice(8,16)"]
    )
    fixed = "+steps=5"
    assert combinations(line, {"epochs": "3", "seed": "7"}) == [
        ("epochs=3", f"seed={seed}", f"hardware={name}", fixed, f"batch_size={size}")
        for seed in (1, 2) for name in ("a100_40", "a100_80") for size in (8, 16)
    ]  # fmt: skip


def test_folders_are_new_and_safe(tmp_path: Path) -> None:
    unused_folder = SweepFolder("train", [], tmp_path).unused_folder
    first = unused_folder("partition.balance=[4,8],dataset.root='/a b/../c'")
    assert first == tmp_path / "partition.balance=[4,8],dataset.root=_a_b_.._c"
    first.mkdir()
    assert unused_folder("partition.balance=[4,8],dataset.root=/a b/../c") == tmp_path / f"{first.name}-2"
    assert unused_folder("..").parent == tmp_path
    assert unused_folder("..").name == "run"
    assert len(unused_folder("x" * 1000).name) <= 255


def test_what_no_command_expects_ends_one_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert wait_for(fork_command(lambda: 1 // 0)) == CommandResult(
        1, "ZeroDivisionError: integer division or modulo by zero"
    )
    assert "Traceback" in capfd.readouterr().err
    assert wait_for(fork_command(lambda: sys.exit(3))) == CommandResult(3, "exit code 3")

    def refuse() -> NoReturn:
        raise NothingFitsError("hardware.memory_gib=8: no cut fits")

    refused = wait_for(fork_command(refuse))
    assert (refused.exit_code, refused.error) == (2, "hardware.memory_gib=8: no cut fits")
    assert isinstance(refused.input_error, NothingFitsError)


def test_failing_runs_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One is refused, and one ends the process that it is in."""
    (tmp_path / "seven.yaml").write_text("defaults:\n  - train\n  - _self_\nepochs: 7\n")
    options = ["-cd", str(tmp_path), "-cn", "seven", "-m", f"hydra.sweep.dir={tmp_path}/sweep"]
    ways = "+model.arguments.way=wrong,exits,fine"
    monkeypatch.setenv("COLUMNS", "120")  # on a busy machine times are longer words
    assert command("train", *options, *ODD, ways, "dry_run=true") == 1
    output = capfd.readouterr().out
    statuses = {"wrong": "impossible", "exits": "failed (7)", "fine": "dry_run"}
    for number, (way, status) in enumerate(statuses.items(), start=1):
        assert re.search(rf"(?m)^ *{number} +[\d-]+ +[\d-]+ +model.arguments.way={way} +{re.escape(status)} ", output)
    assert re.search(r"\nimpossible model.arguments.way=wrong: .*: way=wrong: cannot be", output), "at once"
    assert re.search(r"\nrun 1: .*: way=wrong: cannot be", output), "and below the table"
    assert "\nrun 2: exit code 7\n" in output
    fine = tmp_path / "sweep" / "model.arguments.way=fine"
    assert read_result(fine)["status"] == "dry_run"
    assert "epochs: 7\n" in (fine / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["train", "bench"])
def test_an_impossible_cell_is_a_row_and_no_failure(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """gpipe train ended with 1 and proposed to resume the sweep, gpipe bench with 0."""
    settings = ["+model.arguments.way=fine", "hydra.sweep.dir=sweep", "partitions=20,1"]
    settings += ["max_steps=1"] if name == "train" else ["steps=1", "warm_up_steps=0", "rounds=1"]
    given = [
        setting for setting in ODD if not setting.startswith(("partitions=", "checkpoint" if name == "bench" else "-"))
    ]
    assert command(name, "-m", *given, *settings) == 0
    table = capfd.readouterr().out.partition("sweep sweep")[2]
    assert re.search(r"(?m)^.*\b20 .* impossible ", table)
    assert re.search(r"(?m): partitions=20: the model has only \d+ layer.*; use partitions=", table)
    assert "resume" not in table


def test_the_table_marks_speeds_that_are_no_pipelines_and_has_the_times_of_the_runs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The time was that of the fork, with the start of its processes, and `gpipe compare` had another one."""
    monkeypatch.setenv("COLUMNS", "120")
    given = [*(setting for setting in ODD if setting != "partitions=1"), "+model.arguments.way=fine", "max_steps=1"]
    two = ["partitions=2", "executor=in_process", "hydra.sweep.dir=sweep", "seed=1,2"]
    assert command("train", "-m", *given, *two) == 0
    table = capfd.readouterr().out.partition("sweep sweep")[2]
    for seed in (1, 2):
        seconds = METRICS["seconds"].text(read_result(Path(f"sweep/seed={seed}")))
        assert re.search(rf"(?m)seed={seed} .* measured_one_device .*{re.escape(seconds)}$", table), table
    assert "threads" not in table


def test_scores_that_differ_by_the_number_of_threads_are_not_taken_for_those_of_a_setting(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By default K = 1 has all cores and K = 2 half of them: a sweep over K seemed to show that K changes the loss."""
    given = [*(setting for setting in ODD if setting != "threads=1"), "+model.arguments.way=fine", "max_steps=1"]
    assert command("train", "-m", *given, "hydra.sweep.dir=sweep", "threads=1,2") == 0
    table = capfd.readouterr().out.partition("sweep sweep")[2]
    assert command("compare", "sweep") == 0
    for shown in (table, capfd.readouterr().out):
        assert re.search("threads .* .*: results differ .* threads=1 ", " ".join(shown.split())), shown
    assert re.search(r"(?m)^ *2 .* 2 +[\d.]+ m?s$", table), "the number of threads of the second run"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("train -m micro_batches=64,128", "micro_batches=64: a mini-batch has only batch_size=32 samples"),
        ("train -m partitions=20,30 dry_run=true", "partitions=20: the model has only 10 layers; use partitions=10"),
    ],
)
def test_a_sweep_in_which_nothing_can_run_is_one_line(
    arguments: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor one with a value that is wrong whatever the others are; the last one is known to the runs only."""
    assert command(*arguments.split()) == 2
    captured = capfd.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert line in captured.err
    assert list(tmp_path.iterdir()) == []


INTERRUPT = """
import glob, os, signal, sys, time
while not glob.glob(sys.argv[1]):
    time.sleep(0.05)
time.sleep(0.5)  # until the run is held in its third step
os.kill(os.getppid(), signal.SIGINT)
"""


def test_an_interrupted_sweep_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C comes when its second run is under way."""
    arguments = ["-m", *ODD, "+model.arguments.way=held", f"+model.arguments.until={tmp_path}/go"]
    held_run = f"{tmp_path}/*_sweep/micro_batches=2/checkpoints/step_00000002/index.json"
    with subprocess.Popen([sys.executable, "-c", INTERRUPT, held_run]) as interrupts:
        code = command("train", *arguments, "micro_batches=1,2,8", "max_steps=4", f"output={tmp_path}")
        interrupts.kill()
    (folder,) = tmp_path.glob("*_sweep")
    assert code == 130
    output = capfd.readouterr().out
    (rest,) = re.findall(r"1 of 3 not run; resume with  gpipe (.*)\n", output)
    goes_on = rest.split()
    assert goes_on == ["train", f"resume={folder}", "model.target=custom_models:told"]
    assert not re.search(r"(?m)^(look|change|prove) ", output), "as a single run has them"
    first, held = folder / "micro_batches=1", folder / "micro_batches=2"
    assert read_result(first)["status"] == "completed"
    assert read_result(held)["status"] == "interrupted"
    before = (first / "result.json").read_bytes(), (first / "result.json").stat().st_mtime_ns
    (tmp_path / "go").touch()
    assert command(*goes_on) == 0, "the third run is impossible"
    output = capfd.readouterr().out
    assert "run 1 of 3: micro_batches=1: completed before, skipped\n" in output
    assert len(re.findall(r"(?m)^ *[12] +\d +[12] +completed ", output)) == 2, "both are in the table"
    assert "resume with" not in output
    assert ((first / "result.json").read_bytes(), (first / "result.json").stat().st_mtime_ns) == before
    result = read_result(held)
    assert (result["status"], result["steps"], result["resumed_from"]) == ("completed", 4, str(held))
    begun, gone_on = result["starts"]
    assert begun["command"].startswith("gpipe train -m model=custom ")
    assert (begun["code"]["model"], gone_on["command"]) == (commit_of(TARGET), f"gpipe {rest}")


@pytest.mark.parametrize(
    ("arguments", "text", "line"),
    [
        ("train resume=sweep epochs=3", "", "epochs=3: resume=sweep is a sweep, whose runs would then differ in more"),
        ("train resume=sweep", '{"command": "train"}', "sweep/sweep.json: cannot be read as a sweep"),
        ("train hydra.sweep.dir=foo", "", "hydra.sweep.dir=foo: the folder of a run is given by run_folder=foo"),
    ],
)
def test_a_sweep_that_cannot_go_on_or_a_folder_without_effect_is_refused(arguments: str, text: str, line: str) -> None:
    Path("sweep").mkdir()
    Path("sweep", SWEEP_FILE).write_text(text or '{"command": "train", "arguments": ["-m", "seed=1,2"], "runs": []}')
    name, *given = arguments.split()
    with pytest.raises(InputError, match=re.escape(line)):
        find_sweep(parse_command_line(name, given))
    assert [path.name for path in Path("sweep").iterdir()] == [SWEEP_FILE]


def test_a_sweep_at_work_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that went on with one sweep measured everything twice, at the same time."""
    monkeypatch.setattr(folders, "RUN_EXIT_TIMEOUT_SECONDS", 0)
    path = tmp_path / "12-00-00_sweep"
    first, second, resumed = (SweepFolder("bench", ["-m"], path) for _ in range(3))
    with first.lock(resumes=False):
        assert first.path == path
        with second.lock(resumes=False):
            assert second.path == tmp_path / "12-00-00_sweep-2", "another of the same second"
        used = r"12-00-00_sweep: process .* is using this folder; wait"
        with pytest.raises(InputError, match=used), resumed.lock(resumes=True):
            pass
    path.mkdir(exist_ok=True)
    with resumed.lock(resumes=True):
        assert resumed.path == path

    (path / SWEEP_FILE).write_text("{}")
    typed = SweepFolder("train", ["-m", "seed=1,2", f"hydra.sweep.dir={path}"], path)
    there = r"hydra\.sweep\.dir=.*: a sweep is there already; resume it with resume="
    with pytest.raises(InputError, match=there), typed.lock(resumes=False):
        pass
    assert [file.name for file in path.iterdir()] == [SWEEP_FILE]


def test_what_begins_again_leaves_nothing_that_is_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "sweep"
    path.mkdir()
    ours = SweepFolder("train", ["-m"], path)
    ours.record()
    (tmp_path / "notes.txt").touch()
    (path / "refused").mkdir()  # there was never a run
    (path / "refused" / "notes.txt").touch()
    ours.discard(Run(9, 1, "refused", "refused"))
    ends = {"killed": "running", "stopped": "interrupted", "wrong": "failed", "kept": "interrupted"}
    ends |= {"noted": "running", "linked": "running"}
    (tmp_path / "elsewhere").mkdir()
    (path / "linked").symlink_to(tmp_path / "elsewhere")
    for number, (name, status) in enumerate(ends.items(), start=1):
        (path / name).mkdir(exist_ok=True)
        (path / name / "config.yaml").touch()
        write_result(path / name, {"status": status})
        if name == "kept":
            (path / name / "checkpoints" / "step_00000002").mkdir(parents=True)
        if name == "noted":
            (path / name / "notes.txt").touch()
        run = Run(number, 1, name, name)
        ours.discard(run)
        ours.record(replace(run, folder=f"{name}-2"))
    assert sorted(file.name for file in path.iterdir()) == ["kept", "linked", "noted", "refused", SWEEP_FILE, "wrong"]
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "elsewhere" / "config.yaml").exists()


@pytest.mark.parametrize(("name", "kind"), [(SWEEP_FILE, "train"), ("bench.csv", "bench")])
def test_a_sweep_replaces_no_file_of_the_user(
    name: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A link that led nowhere was taken for no file, and removed with the refused runs."""
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / name).symlink_to("mine")
    settings = [setting for setting in ODD if not setting.startswith("checkpoint")]
    assert command(kind, *settings, "-m", "seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep") == 2
    assert re.search(r"hydra\.sweep\.dir=.*/sweep: .* is there already; ", capfd.readouterr().err)
    assert (tmp_path / "sweep" / name).is_symlink()
