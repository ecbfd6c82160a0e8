"""Law 8: whatever goes wrong ends the whole run, soon, and says what it was; nothing is left running."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from training_runs import (
    NAMED,
    SMALL,
    TINY,
    children,
    command,
    command_struck,
    configure,
    final_tensors,
    session_members,
    start_program,
    train_here,
    wait_until,
    workers_of,
)

from gpipe_cli.launch.fork_server import fork_server, temporary_folder
from gpipe_cli.planner import model_profile
from gpipe_cli.reporting.run.lines import LOG
from gpipe_cli.results.files import read_result
from gpipe_cli.training.milestones import DivergedError

BOUND = 20  # seconds; it takes 2 to 3, the rest is for a machine that does other things too
ENDLESS = [*SMALL, "epochs=10000", "partitions=2", "executor=distributed", "checkpoint.every_steps=1", "hardware=cpu"]

# what stage 1 was doing, at whatever moment of a run that writes a checkpoint after every step
DOING = r"(in 1[FRB]\d \(input (\(\d+, \d+, \d+, \d+\)(, )?)+\)|waiting for a checkpoint to be written)"

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@linux
@pytest.mark.parametrize(
    ("of_loader", "number", "settings", "cause"),
    [
        # its neighbour waits for it, and was once said to be lost; itself it outlived the run
        (False, signal.SIGSTOP, ["timeout_seconds=2", "partition.balance=[3,5]"],
         rf"stage 1 has been silent for [2-9] s {DOING}, longer than timeout_seconds=2;"),
        # it held up a run of one partition for ever, and survived others
        (True, signal.SIGSTOP, ["timeout_seconds=2", "partitions=1", "data_workers=1"],
         "stage 0 has been silent for [2-9] s waiting for a mini-batch, longer than timeout_seconds=2"),
        (True, signal.SIGKILL, ["partitions=1", "data_workers=1"], "a data loading process died: .*data_workers=0"),
    ],
    ids=["stage stopped", "loader stopped", "loader killed"],
)  # fmt: skip
def test_a_process_that_is_killed_or_stopped_ends_the_run_and_is_named(
    of_loader: bool, number: int, settings: list[str], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A stage, or the data loader of the first one, after the first checkpoint of an endless run."""
    loaders: list[int] = []

    def strike() -> None:
        wait_until((tmp_path / "checkpoints" / "last").exists, 120, "the first checkpoint")
        workers = workers_of(os.getpid())
        if of_loader:
            loaders.extend(children(workers[0]))
        os.kill(loaders[0] if of_loader else workers[1], number)

    assert command_struck(strike, "train", *ENDLESS, *settings, f"run_folder={tmp_path}") == 1
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
def test_ctrl_c_ends_everything_and_the_checkpoint_stays(tmp_path: Path) -> None:
    program = start_program("train", *ENDLESS, "data_workers=1", f"run_folder={tmp_path / 'run'}")

    def is_running() -> bool:
        assert program.poll() is None, program.communicate()
        # the workers may be ahead of their parent, which has yet to import TensorBoard and to say so
        begun, log = tmp_path / "run" / "checkpoints" / "last", tmp_path / "run" / LOG
        return begun.exists() and log.exists() and "parameters" in log.read_text()

    try:
        wait_until(is_running, 120, "the first checkpoint, and the banner")
        os.killpg(program.pid, signal.SIGINT)  # the terminal sends it to all of them
        output, errors = program.communicate(timeout=BOUND)
    finally:
        program.kill()  # and with it all that it has started
    assert program.returncode == 130
    assert errors == ""
    assert "interrupted" in output
    wait_until(lambda: not session_members(program.pid), BOUND, "the end of every process")
    result = read_result(tmp_path / "run")
    assert (result["status"], result["error"]) == ("interrupted", None)
    assert all(tensor.isfinite().all() for tensor in final_tensors(tmp_path / "run").values())


@linux
def test_an_interrupt_while_workers_start_ends_everything(tmp_path: Path) -> None:
    """SIGTERM is in launch/test_supervisor.py."""

    def interrupt() -> None:
        wait_until(lambda: workers_of(os.getpid()), 120, "the worker")
        os.kill(os.getpid(), signal.SIGINT)

    assert command_struck(interrupt, "train", *ENDLESS, f"run_folder={tmp_path / 'run'}") == 130
    wait_until(lambda: not workers_of(os.getpid()), BOUND, "the end of every worker")


@linux
def test_the_temporary_folder_stays_until_the_last_process_has_ended() -> None:
    """It went with the parent; a data loader that ended a moment later did not find its sockets: two tracebacks."""
    number, _ = fork_server.start()

    def pipes(folder: Path) -> set[str]:
        return {link for file in folder.iterdir() if (link := os.readlink(file)).startswith("pipe:")}

    (remover,) = children(os.getpid(), str(temporary_folder()))
    assert os.readlink(f"/proc/{remover}/fd/0") in pipes(Path(f"/proc/{number}/fd"))


@linux
def test_the_temporary_folder_stays_until_multiprocessing_has_removed_its_own_folder_in_it() -> None:
    """A command whose own process had a data loader ended with a traceback of multiprocessing's exit handler."""
    program = """
import multiprocessing.util, tempfile
from gpipe_cli.launch.fork_server import temporary_folder
tempfile.tempdir = str(temporary_folder())
print(multiprocessing.util.get_temp_dir())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert not Path(ended.stdout.strip()).parent.exists()


def test_a_broken_image_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (20, 20)).save(tmp_path / "images" / folder / f"{number}.png")
    broken = tmp_path / "images" / "train" / "dog" / "5.png"
    broken.write_bytes(b"this is no image")
    code = command(
        "train", *TINY[:2], "dataset=image_folder", f"dataset.root={tmp_path / 'images'}",
        "dataset.image_size=16", "batch_size=8", "partitions=1", "threads=1", "device=cpu",
        "data_workers=1", f"run_folder={tmp_path / 'run'}",
    )  # fmt: skip
    assert code == 2
    error = read_result(tmp_path / "run")["error"]
    assert str(broken) in error
    assert "\n" not in error
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err


def refused_in_one_line(capsys: pytest.CaptureFixture[str], folder: Path, line: str) -> None:
    """Before that only what is asked for and being done is named, no folder that is never made."""
    captured = capsys.readouterr()
    assert all(", K = " in shown or shown.endswith(" ...") for shown in captured.out.splitlines())
    assert "outputs/" not in captured.out
    assert captured.err.partition(": ")[2].startswith(line)
    assert captured.err.count("\n") == 1
    assert not list(folder.glob("outputs/*"))


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("train partitions=20 micro_batches=auto", "partitions=20: the model has only 10 layers"),
        ("train device=cuda partitions=auto", "device=cuda: there is no CUDA device here; use device=cpu"),
        ("train batch_size=5000 micro_batches=auto", "batch_size=5000: the training set has only 1437 samples"),
        ("train dataset.num_classes=3", "dataset.num_classes=3: digits has 10 classes"),
        ("train dataset.augmentation.cutout=24", "dataset.augmentation.cutout=24: the images are only 24 pixels wide"),
        ("train dataset=imagenet partitions=auto", "dataset.root=data/imagenet: "),
        ("train dataset=image_folder dataset.root=. dataset.num_classes=2", "dataset.root=.: 'train' cannot be read"),
        ("train dataset=image_masks dataset.root=. dataset.num_classes=2 model=unet", "dataset.root=.: "),
        ("train model=transformer_lm dataset=text_files dataset.root=gone batch_size=auto", "dataset.root=gone: "),
        ("train model=transformer_nmt dataset=parallel_text dataset.root=.", "text file 'train.tsv': "),
        ("train model=transformer_nmt dataset.vocabulary=300", "dataset.vocabulary=300: "),
        ("bench dataset=cifar10", "dataset.root=data: "),
        ("check dataset=oxford_pets", "dataset.root=data: "),
        ("check against=torch dataset=cifar100", "dataset.root=data: "),
    ],
)
def test_data_devices_and_ranges_are_looked_at_before_layers(
    line: str, refusal: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that is not there was reported after half a minute, in which layers were traced and timed."""
    monkeypatch.setattr(model_profile, "_profile", lambda *_: pytest.fail("layers were traced"))
    monkeypatch.setattr("gpipe_cli.planner.data_sheet.usable_gpus", tuple)  # also where there are some
    assert command(*line.split()) == 2
    refused_in_one_line(capsys, tmp_path, refusal)


def test_what_one_worker_of_two_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second has a layer that cannot be pipelined."""
    model = ["model=custom", "model.target=custom_models:halves_unseen", "partition.balance=[1,4]"]
    assert command("train", *TINY[2:], "dataset.image_size=8", *model, "partitions=2") == 2
    refused_in_one_line(capsys, tmp_path, "model=custom")


def test_a_finished_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = SMALL
    train_here(configure(*settings, "partitions=1", "executor=in_process", "epochs=1"), tmp_path / "done")
    assert command("train", "resume=done", NAMED, "partitions=2") == 2
    refused_in_one_line(capsys, tmp_path, "resume=done: that run has done 3 steps, and epochs allows 3;")
    # a position in the data means something else with other mini-batches or another order; layers were timed before
    for setting in ("batch_size=4", "seed=9"):
        assert command("train", "resume=done", NAMED, "epochs=2", "cost=measured_anew", setting) == 2
        assert "timing" not in (captured := capsys.readouterr()).out
        assert f": {setting}: the run that is resumed has " in captured.err


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    settings = [*SMALL, "partitions=2", "executor=in_process", "learning_rate.per_sample=1e30"]
    line = r"step 2 .* it has diverged at learning rate .* use a smaller learning_rate.per_sample"
    with pytest.raises(DivergedError, match=line):
        train_here(configure(*settings, "checkpoint.every_steps=2"), tmp_path)
    assert not list(tmp_path.glob("checkpoints/step_*")), "saved after a step without numbers"
