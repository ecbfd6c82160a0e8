"""How the supervisor of a run ends, when its workers were asked to."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from plan_runs import traced
from reporting_runs import spec
from training_runs import TINY, children, configure, spec_of, until_asked
from worker_tasks import SIZES, fail_twice, nothing, report_sizes, stop_within_a_message

from gpipe_cli.launch.job import Reason
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.training.engine import WorkerProcess


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_workers_that_end_as_they_were_asked_to_have_done_their_task() -> None:
    """Their supervisor took the end of the last one for an end before the first step. Under torchrun it then told the
    other supervisors that it had failed, and the run was a failed one if their workers had not ended yet.

    Nor does a run need its fork server once it has begun: for one that was stopped, and could not report how the
    workers ended, it waited for ever.
    """
    run_settings = spec_of(configure(*TINY), traced(*TINY))
    servers: list[int] = []

    def on_message(message: object) -> None:
        if not servers:  # it is the first worker's
            servers.extend(children(os.getpid(), "fork_server"))
            os.kill(servers[0], signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)

    assert run_task(until_asked, run_settings, 60.0, on_message, stops=[signal.SIGTERM]) is None
    (server,) = servers
    assert not Path("/proc", str(server)).exists()


ONE_PROCESS = spec(devices=("cpu",) * 3, rank_of_stage=(0, 0, 0))


def test_the_first_failure_is_reported_whatever_fails_after_it() -> None:
    """The run is then started again: only where a process or its device was lost can that help."""
    messages: list[object] = []
    failure = run_task(fail_twice, ONE_PROCESS, 60.0, messages.append)
    assert failure is not None
    assert "unspecified launch failure" in failure.text
    assert failure.reason is Reason.LOST
    assert messages == ["the last checkpoint"]


def test_a_process_that_stops_within_a_message_is_silent() -> None:
    """Its parent waited for the rest of the message, and noticed nothing else."""
    messages: list[object] = []
    failure = run_task(stop_within_a_message, ONE_PROCESS, 1.0, messages.append)
    assert failure is not None
    assert failure.text.startswith("the process of stages 0 to 2 has been silent for ")
    assert (failure.reason, messages) == (Reason.LOST, ["begun"])


def test_messages_of_every_size_arrive_whole_and_in_order() -> None:
    received: list[object] = []
    assert run_task(report_sizes, ONE_PROCESS, 60.0, received.append) is None
    assert [len(str(message)) for message in received] == SIZES


@pytest.mark.skipif(sys.platform != "linux", reason="finds descriptors in /proc")
@pytest.mark.parametrize("task", [nothing, fail_twice])
def test_tasks_leave_no_descriptors(task: Callable[[WorkerProcess], None]) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    counted = []
    for _ in range(3):
        run_task(task, ONE_PROCESS, 60.0, lambda message: None)
        counted.append(opened())
    assert counted[0] == counted[-1]
