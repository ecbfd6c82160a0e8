"""Who did what when in one training step: what Figure 2(c) of the paper shows, with a time axis.

The simulator makes one from a schedule and costs, a measurement makes one from clocks; both are this class, so that
a prediction and what became of it are compared number by number and picture by picture.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gpipe_cli.pipeline.schedule.schedule import Action


class Span(NamedTuple):
    """When an action ran; both times count from the same zero on every stage."""

    action: Action
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


class EventKind(StrEnum):
    """What a stage does beside its actions."""

    WAITING = "waiting"  # for a neighbour to compute
    TRANSFER = "transfer"  # for tensors to arrive that have been computed, or to be handed on
    UPDATE = "update"  # update of the weights


class Event(NamedTuple):
    """When a stage waited or did something else than an action; times as in a span."""

    what: EventKind
    start_seconds: float
    end_seconds: float
    action: Action | None  # the action that waited, or handed its outputs on; None for updates and sums over replicas

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def gap(action: Action, free_seconds: float, start_seconds: float, sent_seconds: float | None) -> tuple[Event, ...]:
    """What lies before an action that starts when its stage had been free for a while.

    Until the neighbour ended what the action needs (at ``sent_seconds``; None if it needs nothing from a neighbour)
    it is waiting, from then on it is a transfer that nothing hides.
    """
    came = start_seconds if sent_seconds is None else max(free_seconds, min(sent_seconds, start_seconds))
    parts = ((EventKind.WAITING, free_seconds, came), (EventKind.TRANSFER, came, start_seconds))
    return tuple(Event(what, start, end, action) for what, start, end in parts if end > start)


@dataclass(frozen=True)
class Timeline:
    """``stages[k]`` is what stage k did, in order of time; ``events[k]`` what was between; ``device_of_stage[k]`` the
    number of its device, which it has for itself if ``device_of_stage`` is empty. Spans of a device do not overlap."""

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
