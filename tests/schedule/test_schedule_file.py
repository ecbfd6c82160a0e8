"""Schedules as files: ours and torch.distributed.pipelining's, and the errors for files that are not schedules."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from schedule_runs import build
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

from gpipe_cli.schedule.dependencies import ScheduleError, check, topological_order
from gpipe_cli.schedule.named_schedules import SCHEDULES
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Kind, Schedule
from gpipe_cli.schedule.schedule_file import read_schedule, schedule_to_csv


def read(file: Path, partitions: int, micro_batches: int) -> Schedule:
    """Whatever was read before."""
    read_schedule.cache_clear()
    return read_schedule(str(file), partitions, micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for recompute, k, m in itertools.product(RECOMPUTE_MODES, (1, 4, 5), (1, 5)):
        schedule = build(name, k, m, recompute)
        file.write_text(schedule_to_csv(schedule), encoding="utf-8")
        assert read(file, k, m) == schedule
        # rows that share a device are one row, in the order in which the device performs them
        rows = [row // 2 for row in schedule.row_of_stage]
        file.write_text(schedule_to_csv(schedule, rows), encoding="utf-8")
        merged = read(file, k, m)
        assert merged.row_of_stage == tuple(rows)
        for number, row in enumerate(merged):
            assert row == tuple(a for a in topological_order(schedule, rows) if rows[a.stage] == number)


def test_idle_ticks_are_empty_cells() -> None:
    assert schedule_to_csv(build("1f1b", 2, 2, "never")) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


@pytest.fixture(params=[1, 3])
def devices(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many processes as torch's own schedules believe that there are."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def their_stages(devices: int, partitions: int) -> list[PipelineStage]:
    cpu = torch.device("cpu")
    return [PipelineStage(nn.Identity(), stage, partitions, cpu) for stage in range(0, partitions, devices)]


def in_turns(action: theirs._Action) -> tuple[theirs._Action, ...]:
    """What torch does for an action of a schedule without a program that overlaps two."""
    return action.sub_actions or (action,)


def test_files_of_torch_are_read(devices: int, tmp_path: Path) -> None:
    """All of its schedules of devices with several stages; those that cut backwards in two, and those whose devices
    have the first and the last stage. What they do is what is read, with and without communication."""
    file = tmp_path / "schedule.csv"
    looped, v = tuple(range(devices)) * 2, (*range(devices), *reversed(range(devices)))
    for kind, rows in (
        (theirs.ScheduleLoopedBFS, looped),
        (theirs.ScheduleInterleaved1F1B, looped),
        (theirs.ScheduleInterleavedZeroBubble, looped),
        (theirs.ScheduleInterleavedZeroBubble, tuple(range(devices))),
        (theirs.ScheduleZBVZeroBubble, v),
        (theirs.ScheduleDualPipeV, v),
    ):
        for micro_batches in (2 * devices, 2 * devices + 1, 6 * devices):
            if "Interleaved" in kind.__name__ and micro_batches % devices:
                continue  # they need groups of as many
            made = kind(their_stages(devices, len(rows)), micro_batches, loss_fn=nn.MSELoss())
            actions = [
                [str(one) for a in made.pipeline_order[rank] if a is not None for one in in_turns(a)]
                for rank in range(devices)
            ]
            # torch 2.9 writes communication for some schedules only
            written = isinstance(made, theirs._PipelineScheduleRuntime)
            for form in (["compute_only"], ["compute_comms"]) if written else ([],):
                made._dump_csv(str(file), *form)
                found = read(file, len(rows), micro_batches)
                assert [[str(a) for a in row] for row in found] == actions
                assert found.row_of_stage == rows
            for stage in found.stages:  # gradients are summed as in gpipe or in 1f1b, and have the same bits
                sums = [a.micro_batch for a in stage if a.kind in (Kind.B, Kind.W)]
                assert sums == sorted(sums, reverse=kind is theirs.ScheduleLoopedBFS)
            assert bool(found.split) == (kind.__name__.endswith(("ZeroBubble", "V")))
            for fewer in range(1, micro_batches):
                check(found.first(fewer))


def test_torch_reads_our_files(devices: int, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for name, each, micro_batches in itertools.product(SCHEDULES, (1, 2, "v"), (1, 5)):
        rows = tuple(range(devices)) * each if each != "v" else (*range(devices), *reversed(range(devices)))
        schedule = build(name, len(rows), micro_batches, "never")
        file.write_text(schedule_to_csv(schedule, rows), encoding="utf-8")
        made = theirs._PipelineScheduleRuntime(their_stages(devices, len(rows)), micro_batches, loss_fn=nn.MSELoss())
        made._load_csv(str(file))
        for rank, row in enumerate(read(file, len(rows), micro_batches)):
            assert [str(a) for a in made.pipeline_order[rank] if a is not None] == [str(a) for a in row]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0F0,0F1,,0B0,0B1\n1F0,1B0,1G1", "line 2, cell 3 is '1G1'; a cell is empty, or a stage, one of F R B I W"),
        ("0F0,0F1,0B1\n1F0,1F1,1B1,1B0", "0B0 is missing; add it to stage 0\nstage 0 > F0 F1"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock (0B0 waits for 1B0; 1F1 waits for 0F1)"),
        ("0F0,0F1\n1F0,1F1", "has no backward; add a B, or an I and a W, for every F"),
        ("0F0,0B0,0F1,0B1", "has 1 partitions, and partitions=2; use partitions=1"),
        ("", "has no action"),
    ],
)
def test_a_file_that_is_no_schedule_of_the_training(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleError, match=f"^schedule: {re.escape(line)}"):
        read(file, 2, 2)
