"""What lies between the actions of a timeline."""

import pytest

from gpipe_cli.pipeline.schedule.schedules import Action, Kind
from gpipe_cli.pipeline.schedule.timeline import Event, EventKind, gap


@pytest.mark.parametrize(
    ("sent", "waiting", "transfer"),
    [
        (3, (1, 3), (3, 5)),
        (0, None, (1, 5)),  # sent before the stage was free: all of it is transfer
        (9, (1, 5), None),  # clocks that differ a little
        (None, (1, 5), None),
    ],
)
def test_what_lies_before_an_action(
    sent: float | None, waiting: tuple[float, float] | None, transfer: tuple[float, float] | None
) -> None:
    """Of a stage that is free at 1 and begins the action at 5."""
    action = Action(Kind.F, 1, 0)
    kinds = ((EventKind.WAITING, waiting), (EventKind.TRANSFER, transfer))
    expected = [Event(kind, *times, action) for kind, times in kinds if times is not None]
    assert list(gap(action, 1, 5, sent)) == expected
    assert not list(gap(action, 5, 5, sent))
