"""What each stage did when in a training step: Figure 2(c) of the paper with a time axis.

The simulator makes a `Timeline` from a schedule and costs, a measurement from clocks, so that numbers and plots of a
prediction and its measurement can be compared directly.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gpipe_cli.schedule.schedule import Action


class Span(NamedTuple):
    """When an action ran; times count from the same zero on every stage."""

    action: Action
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class EventKind(StrEnum):
    """What a stage does between its actions."""

    WAITING = "waiting"  # for a neighbour to compute
    TRANSFER = "transfer"  # for computed tensors to arrive or to be sent
    UPDATE = "update"  # update of the weights


class Event(NamedTuple):
    """When a stage waited, transferred or updated; times as in `Span`."""

    what: EventKind
    start_seconds: float
    end_seconds: float
    action: Action | None  # the action that waited or sent its outputs; None for updates and sums over replicas

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def gap(action: Action, free_seconds: float, start_seconds: float, sent_seconds: float | None) -> tuple[Event, ...]:
    """The events between ``free_seconds``, when the stage became free, and ``start_seconds``, when ``action`` started.

    Until ``sent_seconds``, when the neighbour finished what the action needs (None if it needs nothing from a
    neighbour), the stage was waiting; the rest is an exposed transfer.
    """
    waited_until = start_seconds if sent_seconds is None else max(free_seconds, min(sent_seconds, start_seconds))
    parts = ((EventKind.WAITING, free_seconds, waited_until), (EventKind.TRANSFER, waited_until, start_seconds))
    return tuple(Event(what, start, end, action) for what, start, end in parts if end > start)


@dataclass(frozen=True)
class Timeline:
    """``stages[k]`` has the actions of stage k in order of time, ``events[k]`` what was between them,
    ``device_of_stage[k]`` is its device; if it is empty, each stage has its own. Spans of a device do not overlap."""

    stages: tuple[tuple[Span, ...], ...]
    events: tuple[tuple[Event, ...], ...]
    device_of_stage: tuple[int, ...] = ()

    @property
    def start_seconds(self) -> float:
        """When the first action of any stage began; 0 without any."""
        return min((spans[0].start_seconds for spans in self.stages if spans), default=0.0)

    @property
    def end_seconds(self) -> float:
        """When the last action of any stage ended; 0 without any."""
        return max((spans[-1].end_seconds for spans in self.stages if spans), default=0.0)

    @property
    def step_end_seconds(self) -> float:
        """When the last action or event of any stage ended."""
        return max([self.end_seconds, *(event.end_seconds for events in self.events for event in events)])

    @property
    def step_seconds(self) -> float:
        """Seconds from the beginning of the first action to the end of the last."""
        return self.end_seconds - self.start_seconds
