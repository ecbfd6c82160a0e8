import resource
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard.summary import scalar

from gpipe_cli.reporting.run.tensorboard_file import EventFile


def test_events_that_cannot_be_written_are_written_later(tmp_path: Path) -> None:
    """SummaryWriter's thread ended with the first error: a disk that was full for a moment cost all curves after it."""
    events = EventFile(tmp_path, 1)
    for step in range(1, 51):
        events.add(scalar("loss", 1.0), step)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # in the middle of an event
    try:
        with pytest.raises(OSError, match=r"events\.out\.tfevents"):
            events.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size == 1000
    events.add(scalar("loss", 2.0), 51)
    events.flush()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == [
        *((n, 1.0) for n in range(1, 51)),
        (51, 2.0),
    ]
