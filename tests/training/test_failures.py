"""Law 8: whatever goes wrong ends the whole run, soon, and says what it was; nothing is left running."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image
from training_runs import (
    TINY,
    children,
    command,
    configure,
    final_tensors,
    placement_of,
    session_members,
    start_program,
    train_here,
    wait_until,
    workers_of,
)

from gpipe_cli.commands.training_run import find_source
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import fork_server, temporary_folder
from gpipe_cli.results.files import RESULT, read_result
from gpipe_cli.training.milestones import starting_point

BOUND = 20  # seconds; it takes 2 to 3, the rest is for a machine that does other things too
ENDLESS = [*TINY, "epochs=10000", "partitions=3", "executor=distributed", "checkpoint.every_steps=1", "hardware=cpu"]

# what stage 1 was doing, at whatever moment of a run that writes a checkpoint after every step
DOING = r"(in 1[FRB]\d \(input (\(\d+, \d+, \d+, \d+\)(, )?)+\)|waiting for a checkpoint to be written)"

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a training that does not end by itself, and wait for its first checkpoint."""
    started = []

    def launch(*settings: str) -> "subprocess.Popen[str]":
        program = start_program("train", *ENDLESS, *settings, f"run_folder={tmp_path / 'run'}")
        started.append(program)

        def is_running() -> bool:
            assert program.poll() is None, program.communicate()
            # on a busy machine the workers may be ahead of their parent, which has yet to say that the run has begun
            return all((tmp_path / "run" / name).exists() for name in ("checkpoints/last", RESULT))

        wait_until(is_running, 120, "the first checkpoint, and result.json")
        return program

    yield launch
    for program in started:
        for process in [program.pid, *session_members(program.pid)]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        program.communicate()


@linux
@pytest.mark.parametrize(
    ("of_worker", "number", "settings", "cause"),
    [
        # not its neighbours, which only lost their connection, at whatever point of a step they were
        (False, signal.SIGKILL, [],
         rf"stage 1 was killed by signal 9 \(SIGKILL\) {DOING}; the machine may be out of memory: "),
        # its neighbours wait for it, and were once said to be lost; itself it outlived the run
        (False, signal.SIGSTOP, ["timeout_seconds=5"],
         rf"stage 1 has been silent for [5-9] s {DOING}, longer than timeout_seconds=5;"),
        # it held up a run of one partition for ever, and survived others
        (True, signal.SIGSTOP, ["timeout_seconds=5", "partitions=1", "data_workers=1"],
         "stage 0 has been silent for [5-9] s waiting for a mini-batch, longer than timeout_seconds=5"),
        (True, signal.SIGKILL, ["partitions=1", "data_workers=1"], "a data loading process died;"),
    ],
    ids=["stage killed", "stage stopped", "loader stopped", "loader killed"],
)  # fmt: skip
def test_a_process_that_is_killed_or_stopped_ends_the_run_and_is_named(
    of_worker: bool, number: int, settings: list[str], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A stage, or the data loader of the first one, after the first checkpoint of an endless run."""
    loaders: list[int] = []

    def strike() -> None:
        wait_until((tmp_path / "checkpoints" / "last").exists, 60, "the first checkpoint")
        workers = workers_of(os.getpid())
        if of_worker:
            loaders.extend(children(workers[0]))
        os.kill(loaders[0] if of_worker else workers[1], number)

    with ThreadPoolExecutor(1) as pool:
        struck = pool.submit(strike)
        assert command("train", *ENDLESS, *settings, f"run_folder={tmp_path}") == 1
        struck.result()
    wait_until(lambda: not workers_of(os.getpid()), BOUND, "the end of every worker")
    wait_until(lambda: not any(Path("/proc", str(one)).exists() for one in loaders), BOUND, "the end of the loaders")
    result = read_result(tmp_path)
    assert result["status"] == "failed"
    assert re.match(cause, result["error"]), result["error"]
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert result["error"].split(" (input")[0] in " ".join(said.split())
    assert "Traceback" not in said


@linux
def test_ctrl_c_ends_everything_and_the_checkpoint_stays(
    start: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    program = start("data_workers=1", "partitions=2")
    os.killpg(program.pid, signal.SIGINT)  # the terminal sends it to all of them
    output, errors = program.communicate(timeout=BOUND)
    assert program.returncode == 130
    assert errors == ""
    assert "interrupted" in output
    wait_until(lambda: not session_members(program.pid), BOUND, "the end of every process")
    result = read_result(tmp_path / "run")
    assert (result["status"], result["error"]) == ("interrupted", None)
    assert all(tensor.isfinite().all() for tensor in final_tensors(tmp_path / "run").values())


@linux
def test_ctrl_c_while_workers_start_ends_everything(tmp_path: Path) -> None:
    program = start_program("train", *ENDLESS, "partitions=2", f"run_folder={tmp_path / 'run'}")
    wait_until(lambda: len(session_members(program.pid)) > 2, 120, "the first worker")
    os.killpg(program.pid, signal.SIGINT)
    program.communicate(timeout=BOUND)
    assert program.returncode == 130
    assert not (tmp_path / "run").exists()
    wait_until(lambda: not session_members(program.pid), BOUND, "the end of every process")


@linux
def test_a_killed_parent_leaves_nothing(
    start: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its workers, and the server they come from, are stopped and cannot end themselves."""
    with tempfile.TemporaryDirectory() as folder:  # the path of a test is too long for it
        temporary = Path(folder)
        monkeypatch.setenv("TMPDIR", folder)
        program = start("data_workers=1", "partitions=2")
        assert list(temporary.glob("gpipe_*/pymp-*")), "the data loader's"
        for process in session_members(program.pid).keys() - {program.pid}:
            os.kill(process, signal.SIGSTOP)
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        wait_until(lambda: not session_members(program.pid), BOUND, "the end of every process")
        # torchinductor_* is torch's cache
        wait_until(lambda: not list(temporary.glob("[!t]*")), BOUND, "an empty folder")


@linux
def test_the_temporary_folder_stays_until_the_last_process_has_ended() -> None:
    """It went with the parent; a data loader that ended a moment later did not find its sockets: two tracebacks."""
    number, _ = fork_server.start()

    def pipes(folder: Path) -> set[str]:
        return {link for file in folder.iterdir() if (link := os.readlink(file)).startswith("pipe:")}

    (remover,) = children(os.getpid(), str(temporary_folder()))
    assert os.readlink(f"/proc/{remover}/fd/0") in pipes(Path(f"/proc/{number}/fd"))


@linux
def test_a_run_needs_its_fork_server_no_more_once_it_has_begun(tmp_path: Path) -> None:
    """One that was stopped could not say how the workers ended, and the run waited for that for ever."""

    def stop() -> int:
        wait_until(lambda: workers_of(os.getpid()), 60, "the worker")
        (server,) = children(os.getpid(), "fork_server")
        os.kill(server, signal.SIGSTOP)
        return server

    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(stop)
        settings = [*TINY, "partitions=1", "epochs=2", f"run_folder={tmp_path}"]
        assert command("train", *settings) == 0
        server = stopped.result()
    assert not Path("/proc", str(server)).exists()


def test_a_broken_image_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (20, 20)).save(tmp_path / "images" / folder / f"{number}.png")
    broken = tmp_path / "images" / "train" / "dog" / "5.png"
    broken.write_bytes(b"this is no image")
    code = command(
        "train", *TINY[:2], "dataset=image_folder", f"dataset.root={tmp_path / 'images'}",
        "dataset.image_size=16", "batch_size=8", "partitions=2", "threads=1", "device=cpu",
        "data_workers=1", f"run_folder={tmp_path / 'run'}",
    )  # fmt: skip
    assert code == 2
    error = read_result(tmp_path / "run")["error"]
    assert str(broken) in error
    assert "\n" not in error
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert "gone or silent" not in captured.out + captured.err


def test_what_a_plan_refuses() -> None:
    for setting in ("partition.balance=[3,3]", *([] if torch.cuda.is_available() else ["device=cuda"])):
        with pytest.raises(InputError, match=f"^{re.escape(setting)}: "):
            placement_of(configure(*TINY, setting))


def refused_in_one_line(capsys: pytest.CaptureFixture[str], folder: Path, line: str) -> None:
    """And nothing is left in the folder."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"gpipe train: {line}")
    assert captured.err.count("\n") == 1
    assert not list(folder.glob("outputs/*"))


IMAGES = ["dataset.image_size=8", "dataset.num_classes=4", *TINY[-5:], "partitions=2"]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["dataset=image_folder", "dataset.root=nowhere"], "dataset.root=nowhere"),
        # the other worker: a layer that cannot be pipelined
        ([*TINY[2:3], *TINY[5:7], "model=custom", "model.target=custom_models:tracks", "partition.balance=[1,4]"],
         "model=custom"),
    ],
)  # fmt: skip
def test_what_one_worker_of_two_refuses_is_one_line(
    settings: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))  # where custom_models.py is
    assert command("train", *IMAGES, *settings) == 2
    refused_in_one_line(capsys, tmp_path, line)


def test_a_finished_run_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train_here(configure(*TINY, "partitions=1", "executor=in_process", "epochs=1"), tmp_path / "done")
    assert command("train", "resume=done", "partitions=2") == 2
    refused_in_one_line(capsys, tmp_path, "resume=done: that run has done 3 steps, and epochs allows 3;")
    # a position in the data means something else with other mini-batches or another order
    source = find_source(configure("resume=done", *TINY, "epochs=2"))
    for setting in ("batch_size=4", "seed=9"):
        with pytest.raises(InputError, match=f"^{setting}: the run that is resumed has "):
            starting_point(configure("resume=done", *TINY, setting), source)
    more = tmp_path / "more"
    assert command("train", "resume=done", "epochs=2", "executor=in_process", "run_folder=more") == 0
    assert read_result(more)["steps"] == 6
    # what was best stays known, and the new folder can be evaluated by itself
    assert (more / "checkpoints" / "best").resolve().is_dir()
    assert (more / "checkpoints" / "last").resolve().name == "step_00000006"


def test_a_run_that_diverges_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        *TINY,
        "partitions=2",
        "executor=distributed",
        "learning_rate.per_sample=1e30",
        "checkpoint.every_steps=2",
    ]
    assert command("train", *settings, f"run_folder={tmp_path / 'run'}") == 1
    result = read_result(tmp_path / "run")
    assert result["status"] == "failed"
    assert "it has diverged at learning rate" in result["error"]
    assert "use a smaller learning_rate.per_sample" in result["error"]
    assert "step 2 " in result["error"]
    assert not list((tmp_path / "run").glob("checkpoints/step_*")), "saved after a step without numbers"
