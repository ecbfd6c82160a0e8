"""Which process is to blame for a run that stands still."""

import signal

import pytest
from reporting_runs import spec

from gpipe_cli.distributed.control_group import Activity, BlockedOn
from gpipe_cli.launch import supervisor
from gpipe_cli.launch.job import Failure, Reason
from gpipe_cli.launch.supervisor import SilenceTimer, Supervisor, first_cause

WORKS = Activity(7, BlockedOn.NOTHING, 1, 0, 0, 8, 0, 0)
WAITS = WORKS._replace(blocked_on=BlockedOn.PROCESS)
COMPILES = WORKS._replace(blocked_on=BlockedOn.COMPILER)
READS = WORKS._replace(blocked_on=BlockedOn.DATA)
PREPARES = Activity(0, BlockedOn.NOTHING, 0, 0, 0, 0, 0, 0)


def test_a_process_that_nccl_has_ended_lost_another_one_or_failed_itself() -> None:
    """Which sends its own failure later, or is found silent; if all others lost a process, it has failed itself. On
    CPUs nothing aborts a process but a fault of it."""
    on_gpus, on_cpus = (
        Supervisor(spec(devices=(device,) * 3, rank_of_stage=(0, 0, 1)), 5)._exit_failure(0, -signal.SIGABRT)
        for device in ("cuda:0", "cpu")
    )
    later = Failure(1, "the cause", on_gpus.seconds + 1)
    lost_it = Failure(1, "no neighbour", on_gpus.seconds - 1, Reason.PEER)
    assert (on_gpus.reason, on_cpus.reason) == (Reason.ABORTED, Reason.LOST)
    assert first_cause([on_gpus, later, lost_it]) is later
    assert first_cause([lost_it, on_gpus]) is on_gpus
    assert first_cause([on_cpus, later]) is on_cpus
    assert first_cause([on_gpus]) is on_gpus
    assert "NCCL_DEBUG=WARN" in on_gpus.text
    assert on_cpus.text.startswith("the process of stages 0 and 1 was killed by signal 6 (SIGABRT)")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    ("processes", "stopped", "whole", "blamed"),
    [
        ({0: WAITS, 1: WORKS, 2: WAITS}, [], True, 1),
        ({0: WAITS, 1: WORKS}, [0], True, 1),  # both; it has been silent for longer
        ({0: READS, 1: WAITS}, [], True, 0),
        ({1: WAITS}, [], False, None),  # for one on another machine
        ({0: PREPARES, 1: WAITS}, [], True, None),  # it may learn a vocabulary
        ({0: COMPILES, 1: WAITS}, [], True, None),
    ],
)
def test_who_is_silent_and_waits_for_no_other_is_to_blame(
    processes: dict[int, Activity], stopped: list[int], whole: bool, blamed: int | None, clock: list[float]
) -> None:
    watched = SilenceTimer(5, whole)
    assert (
        watched.find(processes | {0: processes.get(0, WAITS)._replace(progress_counter=1)}, stopped.__contains__)
        is None
    )
    found = []
    for _ in range(7):
        clock[0] += 1
        found.append(watched.find(processes, stopped.__contains__))
    assert found[:5] == [None] * 5, "5 s are not too long"
    assert (found[-1] and found[-1][0]) == blamed


def test_a_sign_of_life_counts_and_time_that_nobody_saw_does_not(clock: list[float]) -> None:
    watched = SilenceTimer(5, True)
    alive = WORKS._replace(progress_counter=8)
    an_hour = 3600  # Ctrl-Z, and fg
    for doing, passed in ((WORKS, 1.9), (WORKS, 1.9), (WORKS, 1.9), (alive, 1.9), (WORKS, an_hour), (WORKS, 1.9)):
        assert watched.find({0: doing}, [].__contains__) is None
        clock[0] += passed
    assert watched.find({0: WORKS}, [].__contains__) is None
    clock[0] += 1.9
    assert watched.find({0: WORKS}, [].__contains__) == (0, pytest.approx(5.8))
