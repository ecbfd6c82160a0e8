"""Law 8: whatever goes wrong ends the whole run, soon, and says what it was; nothing is left running."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from image_files import opened, picture_settings
from training_runs import (
    NAMED,
    SMALL,
    TINY,
    assert_same_tensors,
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

from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.readers import ImageFiles
from gpipe_cli.launch.fork_server import fork_server, temporary_folder
from gpipe_cli.planner import model_profile
from gpipe_cli.reporting.run.lines import LOG
from gpipe_cli.results.files import read_result
from gpipe_cli.training.checkpoint.files import list_checkpoints, step_of
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
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.readers import Files
from gpipe_cli.launch.fork_server import temporary_folder
tempfile.tempdir = str(temporary_folder())
print(multiprocessing.util.get_temp_dir())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert not Path(ended.stdout.strip()).parent.exists()


def test_files_that_are_no_images_are_all_named_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training ended at the step that read the first of them, after the banner had counted one image less."""
    settings = picture_settings(tmp_path / "images")
    broken = {
        tmp_path / "images" / split / name: content
        for split in ("train", "val", "test")
        for name, content in (("cat/1.jpg", b""), ("dog/2.jpg", b"this is no image"))
    }
    for path, content in broken.items():
        whole = path.read_bytes()
        path.write_bytes(content)
    assert command("train", *settings, "partitions=1", "run_folder=run", "max_steps=1") == 2
    captured = capsys.readouterr()
    assert "6 of 24 image files" in captured.err
    assert all(f"{path} (" in captured.err for path in broken)
    assert captured.err.count("\n") == 1
    assert not Path("run").exists()
    for path in broken:
        path.write_bytes(whole)
    one_step = ["partitions=1", "max_steps=1"]
    assert command("train", *settings, *one_step, "run_folder=run") == 0, "a fault is not remembered"
    next(iter(broken)).write_bytes(b"")
    assert command("train", *settings, *one_step, "run_folder=other") == 2, "nor what is an image no more"


@pytest.mark.parametrize(
    ("split", "executor", "step"), [("train", "distributed", 2), ("val", "distributed", 4), ("test", "in_process", 8)]
)
def test_a_picture_that_only_decoding_shows_to_be_broken_ends_a_training_that_then_goes_on(
    split: str, executor: str, step: int, tmp_path: Path
) -> None:
    """Nothing was kept of the steps before it, and the exit code was that of a wrong setting. Of the training pictures
    it is one of the third step's, of the others the last one."""
    settings = [*picture_settings(tmp_path / "images"), "partitions=2", f"executor={executor}", "data_workers=1"]
    assert command("train", *settings, "run_folder=whole") == 0
    data = opened("image_folder", tmp_path / "images", num_classes=4, validation="val").training
    read = MiniBatches(data.split_index, batch_size=2, seed=configure(*settings).seed, shuffle=True).indices(0, 2)
    assert isinstance(data.samples.pixels, ImageFiles)
    broken = Path(data.samples.pixels.paths[read[1]]) if split == "train" else tmp_path / "images" / split / "hen/2.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-100])
    assert command("train", *settings, "run_folder=run") == 1
    result = read_result(Path("run"))
    assert result["status"] == "failed"
    assert str(broken) in result["error"]
    assert (result["steps"], step_of(list_checkpoints(Path("run"))[-1])) == (step, step)
    broken.write_bytes(whole)
    if split == "test":
        assert command("evaluate", "run=run", NAMED) == 0
        return
    assert command("train", "resume=run", "run_folder=run", NAMED) == 0
    assert_same_tensors(final_tensors(Path("run")), final_tensors(Path("whole")))


def check_failed_in_one_line(capsys: pytest.CaptureFixture[str], folder: Path, line: str) -> None:
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
    check_failed_in_one_line(capsys, tmp_path, refusal)


def test_what_one_worker_of_two_refuses_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second has a layer that cannot be pipelined."""
    model = ["model=custom", "model.target=custom_models:halves_unseen", "partition.balance=[1,4]"]
    assert command("train", *TINY[2:], "dataset.image_size=8", *model, "partitions=2") == 2
    check_failed_in_one_line(capsys, tmp_path, "model=custom")


def test_a_finished_run_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = SMALL
    train_here(configure(*settings, "partitions=1", "executor=in_process", "epochs=1"), tmp_path / "done")
    assert command("train", "resume=done", NAMED, "partitions=2") == 2
    check_failed_in_one_line(capsys, tmp_path, "resume=done: that run has done 3 steps, and epochs allows 3;")
    # a position in the data means something else with other mini-batches or another order; layers were timed before
    for setting in ("batch_size=4", "seed=9"):
        assert command("train", "resume=done", NAMED, "epochs=2", "cost=reprofile", setting) == 2
        assert "timing" not in (captured := capsys.readouterr()).out
        assert f": {setting}: the run that is resumed has " in captured.err


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    settings = [*SMALL, "partitions=2", "executor=in_process", "learning_rate.per_sample=1e30"]
    line = r"step 2 .* it has diverged at learning rate .* use a smaller learning_rate.per_sample"
    with pytest.raises(DivergedError, match=line):
        train_here(configure(*settings, "checkpoint.every_steps=2"), tmp_path)
    assert not list(tmp_path.glob("checkpoints/step_*")), "saved after a step without numbers"
