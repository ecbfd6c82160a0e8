"""Schedules as files: ours and those of torch.distributed.pipelining, and what is said of files that are none."""

import itertools
import os
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

from gpipe_cli.pipeline.schedule.dependencies import ScheduleError, check, linearize
from gpipe_cli.pipeline.schedule.named_schedules import SCHEDULES
from gpipe_cli.pipeline.schedule.schedule import RECOMPUTE, Schedule
from gpipe_cli.pipeline.schedule.schedule_file import csv_of, read_schedule


def read(file: Path, partitions: int, micro_batches: int) -> Schedule:
    """Whatever was read before."""
    read_schedule.cache_clear()
    return read_schedule(str(file), partitions, micro_batches)


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for recompute, k, m in itertools.product(RECOMPUTE, (1, 4, 5), (1, 5)):
        schedule = build(name, k, m, recompute)
        file.write_text(csv_of(schedule), encoding="utf-8")
        assert read(file, k, m) == schedule
        # rows that share a device are one row, in the order in which the device performs them
        rows = [row // 2 for row in schedule.row_of_stage]
        file.write_text(csv_of(schedule, rows), encoding="utf-8")
        merged = read(file, k, m)
        assert merged.row_of_stage == tuple(rows)
        for number, row in enumerate(merged):
            assert row == tuple(a for a in linearize(schedule, rows) if rows[a.stage] == number)


def test_idle_ticks_are_empty_cells() -> None:
    assert csv_of(build("1f1b", 2, 2, "never")) == "0F0,0F1,,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n"


@pytest.fixture(params=[1, 3])
def devices(request: pytest.FixtureRequest) -> Iterator[int]:
    """As many processes as torch's own schedules believe that there are."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def their_stages(devices: int, partitions: int) -> list[PipelineStage]:
    cpu = torch.device("cpu")
    return [PipelineStage(nn.Identity(), stage, partitions, cpu) for stage in range(0, partitions, devices)]


def test_files_of_torch_are_read(devices: int, tmp_path: Path) -> None:
    """All of its schedules of devices with several stages; those that cut backwards in two, and one whose devices have
    the first and the last stage. What they do is what is read."""
    file = tmp_path / "schedule.csv"
    looped = tuple(range(devices)) * 2
    for kind, rows in (
        (theirs.ScheduleLoopedBFS, looped),
        (theirs.ScheduleInterleaved1F1B, looped),
        (theirs.ScheduleInterleavedZeroBubble, looped),
        (theirs.ScheduleInterleavedZeroBubble, tuple(range(devices))),
        (theirs.ScheduleZBVZeroBubble, (*range(devices), *reversed(range(devices)))),
    ):
        for micro_batches in (devices, 3 * devices):
            made = kind(their_stages(devices, len(rows)), micro_batches, loss_fn=nn.MSELoss())
            made._dump_csv(str(file), format="compute_only")
            found = read(file, len(rows), micro_batches)
            assert found.row_of_stage == rows
            assert bool(found.split) == ("ZeroBubble" in kind.__name__)
            actions = [[str(a) for a in made.pipeline_order[rank] if a is not None] for rank in range(devices)]
            assert [[str(a) for a in row] for row in found] == actions
            for fewer in range(1, micro_batches):
                check(found.first(fewer))


def test_torch_reads_our_files(devices: int, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for name, each, micro_batches in itertools.product(SCHEDULES, (1, 2), (1, 5)):
        schedule = build(name, each * devices, micro_batches, "never")
        rows = tuple(range(devices)) * each
        file.write_text(csv_of(schedule, rows), encoding="utf-8")
        made = theirs._PipelineScheduleRuntime(their_stages(devices, len(rows)), micro_batches, loss_fn=nn.MSELoss())
        made._load_csv(str(file))
        for rank, row in enumerate(read(file, len(rows), micro_batches)):
            assert [str(a) for a in made.pipeline_order[rank] if a is not None] == [str(a) for a in row]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0F0,0F1,,0B0,0B1\n1F0,1B0,1G1", "line 2, cell 3 is '1G1'; a cell is empty, or a stage, one of F R B I W"),
        ("0F0,0SEND_F0", "line 1, cell 2 is '0SEND_F0'"),  # with communication, as torch writes it unless told
        ("-1F0", "line 1, cell 1 is '-1F0'"),
        ("0F0,0F1,0B1\n1F0,1F1,1B1,1B0", "0B0 is missing; add it to stage 0\nstage 0 > F0 F1"),
        ("0F0,0F1,0F1,0B0,0B1\n1F0,1F1,1B0,1B1", "0F1 is there twice; remove one\nstage 0 > F0  F1! F1!"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n0F0", "0F0 is in row 2, and stage 0 in row 0; put all actions of a stage"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "deadlock (0B0 waits for 1B0; 1F1 waits for 0F1)"),
        ("0F0,0F1\n1F0,1F1", "has no backward; add a B, or an I and a W, for every F"),
        ("0F0,0B0,0F1,0B1", "has 1 partitions, and partitions=2; use partitions=1"),
        ("0F0,0B0\n1F0,1B0", "has 1 micro_batches, and micro_batches=2; use micro_batches=1"),
        ("999999F999999", "has 1000000 partitions, and partitions=2; use partitions=1000000"),
        (",,\n\n", "has no action"),
        ("\u0660F\u0660", "line 1, cell 1 is '\u0660F\u0660'"),  # zeros, of Arabic
        ("", "has no action"),
    ],
)
def test_a_file_that_is_no_schedule_of_the_training(text: str, line: str, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ScheduleError, match=f"^schedule: {re.escape(line)}"):
        read(file, 2, 2)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    for make in (
        lambda: None,
        lambda: file.write_bytes(b"\xff\xfe\x00"),
        lambda: file.write_text(f'"{"0F0" * 2**16}"'),  # more than a cell of a CSV file may have
        lambda: (file.unlink(), os.mkfifo(file)),
        lambda: (file.unlink(), file.mkdir()),
    ):
        make()
        with pytest.raises(ScheduleError, match=r"^schedule: cannot be read: .*; gpipe plan write_schedule="):
            read(file, 2, 2)


def test_an_action_a_hundred_thousand_times_is_shown_twice(tmp_path: Path) -> None:
    """The grid of a file of 32 MB was drawn for minutes, and then printed."""
    file = tmp_path / "schedule.csv"
    for cell in ("0F0,", "0F0\n"):
        file.write_text(100_000 * cell, encoding="utf-8")
        with pytest.raises(ScheduleError, match=r"0F0 is (there twice|in row 1)") as error:
            read(file, 1, 1)
        assert str(error.value).count("F0!") == 2


def test_a_mark_of_the_encoding_is_no_cell(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text("\N{BOM}0F0,0B0\n", encoding="utf-8")  # as spreadsheets write it
    assert read(file, 1, 1) == build("gpipe", 1, 1, "never")


def test_only_the_part_of_a_wide_grid_that_is_marked_is_shown(tmp_path: Path) -> None:
    """An error is one line on the console."""
    file, text = tmp_path / "schedule.csv", csv_of(build("1f1b", 4, 64, "never"))
    for damaged, line in (
        (text.replace("2F30", "2F29"), "2F29 is there twice"),
        (text.replace("3B63", ""), "3B63 is missing"),
    ):
        file.write_text(damaged, encoding="utf-8")
        with pytest.raises(ScheduleError, match=line) as error:
            read(file, 4, 64)
        assert len(str(error.value).splitlines()) == 5
