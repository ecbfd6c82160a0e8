"""Checkpoints that are written while the training continues: what a step waits for, and what it does not."""

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from training_runs import NAMED, SMALL, assert_same_tensors, command, configure, final_tensors, of_type, train_here

from gpipe_cli.assembly.build import build_model
from gpipe_cli.distributed.control_group import BlockedOn
from gpipe_cli.results.files import read_result
from gpipe_cli.training import events
from gpipe_cli.training.checkpoint import background_writer
from gpipe_cli.training.checkpoint.background_writer import Snapshot
from gpipe_cli.training.checkpoint.files import list_checkpoints, read_index, staging_dir

RUN = [*SMALL, "checkpoint.keep=9"]


def odd_file(run: Path, step: int, name: str) -> Path:
    """Where a file of the checkpoint of `step` will be written to, so that something else can be put there before.

    The staging folder is a link, as a folder would be removed when the run begins.
    """
    elsewhere = run.with_name(f"{run.name}_{step}")
    elsewhere.mkdir()
    staging = staging_dir(run, step)
    staging.parent.mkdir(parents=True, exist_ok=True)
    staging.symlink_to(elsewhere)
    return elsewhere / name


def steps_in(run: Path) -> list[int]:
    return [read_index(found).progress.step for found in list_checkpoints(run)]


def test_a_snapshot_keeps_its_memory_and_what_it_has_seen() -> None:
    snapshot, weight = Snapshot(), torch.arange(24.0).reshape(2, 3, 2, 2).to(memory_format=torch.channels_last)
    copies, wait_for_copies = snapshot.copy_to_host({"a": weight, "b": weight, "step": torch.tensor(1)})
    wait_for_copies()
    expected = weight.clone()
    weight.zero_()
    for name in ("a", "b"):
        assert copies[name].is_contiguous()
        assert torch.equal(copies[name], expected)
    places = {name: copy.data_ptr() for name, copy in copies.items()}
    again, _ = snapshot.copy_to_host({"a": weight, "b": weight, "step": torch.tensor([1, 2])})
    assert not again["a"].any()
    assert {name: copy.data_ptr() for name, copy in again.items()} == places | {"step": again["step"].data_ptr()}
    assert again["step"].tolist() == [1, 2]


def test_page_locked_memory_is_hardly_more_than_the_state() -> None:
    """torch rounds each allocation up to a power of two: by 30 to 50 % in all, for a block of each tensor."""
    model = build_model(configure("model=resnet", "model.depth=101", "dataset=imagenet"))
    state = [tensor.nbytes for tensor in model.state_dict().values()] * 2
    blocks, _ = background_writer.pack_into_blocks(state)
    assert all(size.bit_count() == 1 for size in blocks)
    assert sum(blocks) < 1.02 * sum(state)
    assert sum(1 << (size - 1).bit_length() for size in state) > 1.25 * sum(state)


def test_steps_are_done_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Its file is a pipe, which is written to when somebody reads. That is when the training waits for it, three steps
    later: what is read are the bytes of the checkpoint of a run that nothing held up.

    A pipe cannot be flushed, so this best checkpoint fails, and a score that is not better is the best after it.
    """
    settings = configure(*RUN, "partitions=1", "executor=in_process", "epochs=3", "checkpoint.every_epochs=2",
                         "learning_rate.per_sample=1e-6")  # fmt: skip
    whole, run = tmp_path / "whole", tmp_path / "run"
    evaluated = of_type(train_here(settings, whole), events.Evaluated)
    first, second, third = (one.scores.top1 for one in evaluated)
    assert [one.is_best for one in evaluated] == [True, second > first, third > max(first, second)]
    assert steps_in(whole) == [3, 6, 9]
    pipe, awaited = odd_file(run, 3, "stage_0.safetensors"), threading.Event()
    os.mkfifo(pipe)

    @contextmanager
    def blocked_on(what: BlockedOn) -> Iterator[None]:
        if what is BlockedOn.DISK:
            awaited.set()
        yield

    def read() -> bytes:
        awaited.wait(60)
        threading.Event().wait(0.6)  # longer than waits that are not reported
        return pipe.read_bytes()

    with ThreadPoolExecutor(1) as pool:
        content = pool.submit(read)
        messages = train_here(settings, run, blocked_on=blocked_on)
    assert content.result() == (whole / "checkpoints" / "step_00000003" / "stage_0.safetensors").read_bytes()
    (failed,) = (one for one in of_type(messages, events.CheckpointEnded) if one.failure)
    line = next(one for one in of_type(messages, events.CheckpointStalled) if one.stalled_step == 3)
    assert (failed.step, line.step) == (3, 6)
    assert line.seconds >= 0.6
    step_6 = next(one for one in of_type(messages, events.StepDone) if one.step == 6)
    assert messages.index(step_6) < messages.index(failed)
    assert steps_in(run) == [6, 9]
    bests = [True, second > first, second <= first or third > second]  # the first one could not be written
    assert [one.is_best for one in of_type(messages, events.Evaluated)] == bests
    assert (run / "checkpoints" / "best").readlink() == Path("step_00000009" if bests[2] else "step_00000006")
    assert_same_tensors(final_tensors(run), final_tensors(whole))


def test_a_process_that_cannot_write_holds_up_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First the disk of one of two processes is full: all continue without this checkpoint. Then it never answers: the
    run ends while it writes, names the disk, and is resumed from the checkpoint before with the bits of a whole run.
    """
    run, whole, alone = tmp_path / "run", tmp_path / "whole", ("partitions=1", "executor=in_process")
    train_here(configure(*RUN, *alone, "checkpoint.every_steps=1", "max_steps=1"), run)
    full = odd_file(run, 2, "stage_1.safetensors")
    full.symlink_to("/dev/full")
    resume = ["train", f"resume={run}", NAMED, f"run_folder={run}"]
    pair = ["partitions=2", "executor=distributed"]
    assert command(*resume, *pair, "max_steps=3") == 0
    captured = capsys.readouterr()
    why = f"{run}/checkpoints/step_00000002: the checkpoint cannot be written (No space left on device)"
    assert captured.err.startswith(f"warning: {why}; ")
    assert re.search("not written +1 checkpoint ", captured.out)
    result = read_result(run)
    assert (result["status"], result["failed_checkpoints"], steps_in(run)) == ("completed", 1, [1, 3])

    staging_dir(run, 2).rename(staging_dir(run, 5))
    full.unlink()
    os.mkfifo(full)
    assert command(*resume, *pair, "max_steps=6", "timeout_seconds=2") == 1
    assert (full.with_name("stage_0.safetensors")).exists()
    error = str(read_result(run)["error"])
    assert re.match(r"stage 1 has been silent for \d s waiting for a checkpoint to be written, longer than", error)
    assert steps_in(run) == [1, 3, 4]
    staging_dir(run, 5).unlink()
    train_here(configure(*RUN, *alone, "max_steps=6", f"resume={run}"), run)
    train_here(configure(*RUN, *alone, "max_steps=6"), whole)
    assert_same_tensors(final_tensors(run), final_tensors(whole))
