"""How the supervisor of a run ends, when its workers were asked to."""

import os
import signal

from plan_runs import traced
from training_runs import TINY, configure, placement_of, until_asked

from gpipe_cli.launch.supervisor import run_task


def test_workers_that_end_as_they_were_asked_to_have_done_their_task() -> None:
    """Their supervisor took the end of the last one for an end before the first step. Under torchrun it then told the
    other supervisors that it had failed, and the run was a failed one if their workers had not ended yet."""
    placement = placement_of(configure(*TINY), traced(*TINY))

    def on_message(message: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    assert run_task(until_asked, placement, 60.0, on_message, stoppable=True) is None
