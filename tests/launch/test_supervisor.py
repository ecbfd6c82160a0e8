"""How the supervisor of a run ends, when its workers were asked to."""

import os
import signal
import sys
from pathlib import Path

import pytest
from plan_runs import traced
from training_runs import TINY, children, configure, spec_of, until_asked

from gpipe_cli.launch.supervisor import run_task


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_workers_that_end_as_they_were_asked_to_have_done_their_task() -> None:
    """Their supervisor took the end of the last one for an end before the first step. Under torchrun it then told the
    other supervisors that it had failed, and the run was a failed one if their workers had not ended yet.

    Nor does a run need its fork server once it has begun: for one that was stopped, and could not say how the workers
    ended, it waited for ever.
    """
    spec = spec_of(configure(*TINY), traced(*TINY))
    servers: list[int] = []

    def on_message(message: object) -> None:
        if not servers:  # it is the first worker's
            servers.extend(children(os.getpid(), "fork_server"))
            os.kill(servers[0], signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)

    assert run_task(until_asked, spec, 60.0, on_message, stoppable=True) is None
    (server,) = servers
    assert not Path("/proc", str(server)).exists()
