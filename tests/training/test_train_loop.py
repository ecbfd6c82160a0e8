"""Laws 1 and 3 of the whole program: neither the number of partitions nor an interruption changes a bit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training_runs import (
    LIVELY,
    LIVELY_SMALL,
    NAMED,
    SMALL,
    TINY,
    assert_same_tensors,
    command,
    configure,
    final_tensors,
    of_type,
    steps_of,
    train_here,
)

from gpipe_cli.assembly.loss import Totals
from gpipe_cli.config.settings import read_config
from gpipe_cli.results.files import read_result
from gpipe_cli.results.run import CONTENDED_SHARE
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.training.checkpoint.files import find_checkpoint, read_index
from gpipe_cli.training.events import Evaluated, StepDone
from gpipe_cli.training.milestones import Milestones, initial_progress, is_best, score_of

SETTINGS = [*TINY, *LIVELY, "model.auxiliary_head=true", "epochs=2", "checkpoint.keep=9"]
QUICK = [*SMALL, *LIVELY_SMALL]
STEPS = 6


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[object]]:
    """The run that all others must equal: one partition, one process, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole")
    messages = train_here(configure(*SETTINGS, "partitions=1", "executor=in_process"), folder)
    return folder, messages


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by the command, with two processes and a loader process. The first one also sends the auxiliary head's
    logits, but not in evaluation."""
    folder = tmp_path_factory.mktemp("distributed")
    settings = [*SETTINGS, "partitions=2", "partition.balance=[5,3]", "executor=distributed", "data_workers=1"]
    assert command("train", *settings, f"run_folder={folder}") == 0
    return folder


def test_what_is_compared_has_everything_in_it(whole: tuple[Path, list[object]]) -> None:
    """The laws would hold trivially for a run in which nothing random or stateful happened."""
    folder, messages = whole
    tensors = final_tensors(folder)
    names = set(tensors)
    for part in ("model/stem.", "ema/stem.", "optimizer/stem.", "running_var", "/square_avg", "/momentum_buffer"):
        assert any(part in name for name in names), part
    average = torch.cat([tensors[name].flatten() for name in sorted(names) if name.startswith("ema/")])
    live = torch.cat([tensors[name.replace("ema/", "model/")].flatten() for name in sorted(names) if "ema/" in name])
    assert not torch.equal(average, live)
    steps = of_type(messages, StepDone)
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    assert [step.samples for step in steps] == [8, 8, 6] * 2
    assert any(step.gradient_norm > 0.5 for step in steps), "clipping never acted"


def test_three_partitions_in_one_process_make_the_same_run(whole: tuple[Path, list[object]], tmp_path: Path) -> None:
    messages = train_here(configure(*SETTINGS, "partitions=3", "executor=in_process", "recompute=always"), tmp_path)
    assert_same_tensors(final_tensors(tmp_path), final_tensors(whole[0]))
    # gathered in another order or not at all: the numbers that people see do not know the cut either
    timeless = ("step", "loss", "cross_entropy", "top1", "top5", "learning_rate", "gradient_norm")
    for one, other in zip(of_type(messages, StepDone), of_type(whole[1], StepDone), strict=True):
        assert all(getattr(one, key) == getattr(other, key) for key in timeless)
    assert of_type(messages, Evaluated) == of_type(whole[1], Evaluated)


def test_two_processes_make_the_same_run(whole: tuple[Path, list[object]], distributed: Path) -> None:
    assert_same_tensors(final_tensors(distributed), final_tensors(whole[0]))
    scores = of_type(whole[1], Evaluated)[-1].scores
    test = read_result(distributed)["test"]
    assert (test["loss"], test["top1"], test["top5"]) == (scores.loss, scores.top1, scores.top5)


def test_all_schedules_that_sum_upwards_make_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages that are not adjacent in each of two processes; stopped within an epoch, and resumed with another cut,
    other processes and split backwards. The evaluation is the same, and so are the printed means of the epoch, which
    were only over the steps since the resume."""
    one = [*QUICK, "epochs=2", "schedule=1f1b", "partitions=1", "executor=in_process"]
    expected = train_here(configure(*one), tmp_path / "whole")
    whole = final_tensors(tmp_path / "whole")
    interleaved = [*QUICK, "epochs=2", "schedule=interleaved", "partitions=4", "stages_per_process=2"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert command("train", *interleaved, "executor=distributed", "max_steps=2", f"run_folder={first}") == 0
    assert [part["process"] for part in read_result(first)["partitions"]] == [0, 1, 0, 1]
    others = ["schedule=zero_bubble", "partitions=3", "stages_per_process=null"]
    capsys.readouterr()
    assert command("train", f"resume={first}", NAMED, *others, f"run_folder={second}") == 0
    assert_same_tensors(final_tensors(second), whole)
    of_first_epoch = of_type(expected, StepDone)[2]
    printed = f"{of_first_epoch.epoch_cross_entropy:.4f} {100 * of_first_epoch.epoch_top1:.1f} %"
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("1/2 "))
    assert " ".join(line.split()).startswith(f"1/2 {printed} ")
    scores, result = of_type(expected, Evaluated)[-1].scores, read_result(second)
    assert (result["test"]["loss"], result["test"]["top1"]) == (scores.loss, scores.top1)
    assert (result["steps"], result["resumed_from"]) == (STEPS, str(first))
    assert read_index(find_checkpoint(second, "last", "run")).progress.ema_updates == STEPS
    assert (second / "checkpoints" / "best").resolve().is_dir(), "the new folder can be evaluated by itself"


# of torch's ScheduleZBVZeroBubble and ScheduleDualPipeV; the first as torch writes it unless told `compute_only`
ZBV = """\
0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,0F2,0SEND_F2,3F0,3RECV_F1,3I0,3SEND_B0,3W0,3F1,3I1,3SEND_B1,\
0RECV_B0,3W1,0F3,0SEND_F3,3RECV_F2,0I0,0W0,3F2,3I2,3SEND_B2,0RECV_B1,3W2,0I1,3RECV_F3,0W1,3F3,3I3,3SEND_B3,0RECV_B2,\
3W3,3REDUCE_GRAD,0RECV_B3,3RESHARD,0I2,0W2,0I3,0W3,0REDUCE_GRAD,0RESHARD
1UNSHARD,2UNSHARD,1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1RECV_F2,1F1,2F1,2SEND_F1,2RECV_B0,2I0,2W0,1F2,2RECV_B1,1I0,\
1SEND_B0,1W0,1RECV_F3,2F2,2SEND_F2,2I1,2W1,1F3,2RECV_B2,1I1,1SEND_B1,1W1,2F3,2SEND_F3,2I2,2W2,2RECV_B3,1I2,1SEND_B2,\
2I3,1I3,1SEND_B3,1W2,2W3,2REDUCE_GRAD,2RESHARD,1W3,1REDUCE_GRAD,1RESHARD
"""
DUAL_PIPE_V = """\
0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3
1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3
"""


def test_placements_files_of_torch_and_searched_orders_make_the_same_run(tmp_path: Path) -> None:
    """One run of three parts, each over two processes: in a V, by a schedule of torch, by an order that is searched;
    and two in this process, where all stages take turns: by torch's other schedule for a V, and by a searched order."""
    settings = [*QUICK, "epochs=1", "micro_batches=4", "schedule=1f1b"]
    train_here(configure(*settings, "partitions=1", "executor=in_process"), tmp_path / "whole")
    for name, text in (("zbv", ZBV), ("dual", DUAL_PIPE_V)):
        Path(f"{name}.csv").write_text(text, encoding="utf-8")
    settings.append("partitions=4")
    for name, schedule in (("dual", "dual.csv"), ("auto", "auto")):
        here = configure(*settings, "executor=in_process", f"schedule={schedule}", "recompute=always")
        train_here(here, tmp_path / name)
    begun = [*settings, "executor=distributed"]
    for steps, given, processes in (
        (1, ["placement=v", "stages_per_process=2"], [0, 1, 1, 0]),
        (2, ["placement=null", "stages_per_process=null", "schedule=zbv.csv"], [0, 1, 1, 0]),
        (3, ["schedule=auto", "stages_per_process=2", "recompute=always", "hardware=h100"], [0, 1, 0, 1]),
    ):
        folder = tmp_path / f"{steps}"
        assert command("train", *begun, *given, f"max_steps={steps}", f"run_folder={folder}") == 0
        assert [part["process"] for part in read_result(folder)["partitions"]] == processes
        begun = [f"resume={folder}", NAMED]
    for name in ("dual", "auto", "3"):
        assert_same_tensors(final_tensors(tmp_path / name), final_tensors(tmp_path / "whole"))


def test_threads_are_kept_whatever_k_would_get(tmp_path: Path) -> None:
    """Each process gets its share of the cores, so K = 1 has twice the threads of K = 2, which sum in another order:
    a run of K = 2 that was resumed as K = 1, all else unchanged, ended with other bits."""
    defaults = [*(setting for setting in SMALL if setting != "threads=1"), "partitions=2", "max_steps=1"]
    defaults.append("hardware=cpu")  # else it may be one thread that is chosen
    assert command("train", *defaults, f"run_folder={tmp_path}") == 0
    used = read_result(tmp_path)["hardware"]["threads_per_process"]
    assert used == max(1, usable_cores() // 2)
    assert read_config(tmp_path).threads == used, "which a resumed run keeps"


def test_a_run_is_resumed_in_its_own_folder_from_an_earlier_checkpoint(tmp_path: Path) -> None:
    """At the end of an epoch, with another cut. What was done after the checkpoint, and reported, is done again: same
    bits, and one curve."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    settings = [*QUICK, "epochs=2", "checkpoint.keep=9", "executor=in_process"]
    train_here(configure(*settings, "partitions=1"), whole)
    settings += ["partitions=2", "checkpoint.every_steps=2", "logger=[csv]"]
    assert command("train", *settings, "max_steps=5", f"run_folder={folder}") == 0
    assert read_result(folder)["samples_per_second_kind"] == "measured_one_device"  # its stages take turns
    for step in (4, 5):  # as if the run had been killed after step 5, having written its checkpoint of step 3
        shutil.rmtree(folder / "checkpoints" / f"step_{step:08d}")
    assert command("train", f"resume={folder}", NAMED, f"run_folder={folder}", "partitions=1") == 0
    assert_same_tensors(final_tensors(folder), final_tensors(whole))
    assert steps_of(folder) == list(range(1, STEPS + 1))


def test_result_json_and_config_of_a_run(distributed: Path) -> None:
    result = read_result(distributed)
    assert (result["status"], result["error"], result["steps"], result["epochs"]) == ("completed", None, STEPS, 2)
    assert result["model_parameters"] == sum(part["parameters"] for part in result["partitions"])
    assert [part["device"] for part in result["partitions"]] == ["cpu", "cpu"]
    contended = result["cpu_starved_share"] > CONTENDED_SHARE  # the machine may be busy
    assert result["samples_per_second_kind"] == ("measured_contended" if contended else "measured")
    for stage, peak in zip(result["memory"], result["memory_bytes"], strict=True):
        assert peak == stage.pop("peak") == sum(part for key, part in stage.items() if key != "stage")
        assert stage["libraries"] > 100 * 2**20 > stage["activations"] > stage["weights"] > 0
    assert len(result["memory_bytes"]) == 2
    assert min(result["memory_bytes"]) > 2**20
    assert result["config"]["optimizer"]["epsilon"] == 0.1
    assert "partitions: 2\n" in (distributed / "config.yaml").read_text()
    parameters = sum(
        tensor.numel()
        for name, tensor in final_tensors(distributed).items()
        if name.startswith("model/") and not name.endswith(("running_mean", "running_var", "num_batches_tracked"))
    )
    assert parameters == result["model_parameters"]


def test_evaluate_gives_the_numbers_of_the_training(distributed: Path) -> None:
    """Another cut, the same micro-batches: not close, equal."""
    assert command("evaluate", f"run={distributed}", "checkpoint=last", "partitions=3", "executor=in_process") == 0
    evaluated = json.loads((distributed / "evaluate.json").read_text())
    test = read_result(distributed)["test"]
    assert evaluated["samples"] == 10
    for key in ("loss", "top1", "top5", "averaged"):
        assert evaluated[key] == test[key], key


def test_what_is_due_after_which_step() -> None:
    settings = [*TINY, "epochs=4", "max_steps=11", "evaluate_every_epochs=2", "checkpoint.every_steps=4"]
    found = Milestones(configure(*settings, "checkpoint.every_epochs=1"), 3)
    assert (found.total_steps, found.end_step) == (12, 11)
    assert [step for step in range(1, 13) if found.evaluates_after(step)] == [6, 11, 12]
    assert [step for step in range(1, 13) if found.saves_after(step)] == [3, 4, 6, 8, 9, 11, 12]
    never = Milestones(configure(*settings, "checkpoint.every_epochs=0"), 3, only_steps=True)
    assert not any(never.evaluates_after(step) or never.saves_after(step) for step in range(1, 13))


def test_more_is_better_and_what_is_no_number_is_never_the_best() -> None:
    begin = initial_progress(configure(*TINY), None)
    assert is_best(0.1, begin)
    assert [is_best(score, replace(begin, best_score=0.5)) for score in (0.4, 0.5, 0.6)] == [False, False, True]
    assert not is_best(float("nan"), begin)
    totals = Totals(4, 12.0, 8.0, 2.0, 3.0)
    assert (score_of(totals, text=False), score_of(totals, text=True)) == (0.5, -3.0)
