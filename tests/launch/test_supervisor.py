"""How the supervisor of a run ends, when its workers were asked to."""

import os
import signal
import sys
from pathlib import Path

import pytest
from plan_runs import traced
from training_runs import TINY, children, configure, libraries_of_the_server, spec_of, until_asked

from gpipe_cli.launch.fork_server import fork_server
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


def test_a_server_that_runs_imports_what_another_run_needs() -> None:
    """Each worker of a sweep or of a recipe's later run imported the libraries of its model and data by itself."""
    pytest.importorskip("transformers")
    digits, hugging_face = configure("dataset=digits"), configure("model=hf", "model.name=none")
    found: list[object] = []
    spec = spec_of(configure(*TINY, "partitions=1"), traced(*TINY))
    fork_server.kill()
    for config in (digits, hugging_face):
        number, _ = fork_server.start(config)
        assert run_task(libraries_of_the_server, spec, 60.0, found.append) is None
    assert fork_server.start()[0] == number, "the same server"
    assert found == [{"torchvision.transforms.v2"}, {"torchvision.transforms.v2", "transformers"}]
