"""Who did what when in one training step: what Figure 2(c) of the paper shows, with a time axis.

The simulator makes one from a schedule and costs, a measurement makes one from clocks; both are this class, so that
a prediction and what became of it are compared number by number and picture by picture.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from gpipe_cli.pipeline.schedule.schedules import Action


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
    UPDATE = "update"  # of the weights


class Event(NamedTuple):
    """When a stage waited or did something else than an action; times as in a span."""

    what: EventKind
    start_seconds: float
    end_seconds: float
    action: Action | None  # that had to wait, or whose outputs were handed on; None: of updates and sums over replicas

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def gap(action: Action, free_seconds: float, start_seconds: float, sent_seconds: float | None) -> tuple[Event, ...]:
    """What lies before an action that starts when its stage had been free for a while.

    Until the neighbour ended what the action needs (at ``sent_seconds``; None if it needs nothing from a neighbour)
    it is waiting, from then on it is a transfer that nothing hides. The same rule serves simulation and measurement.
    """
    came = start_seconds if sent_seconds is None else max(free_seconds, min(sent_seconds, start_seconds))
    parts = ((EventKind.WAITING, free_seconds, came), (EventKind.TRANSFER, came, start_seconds))
    return tuple(Event(what, start, end, action) for what, start, end in parts if end > start)


@dataclass(frozen=True)
class Timeline:
    """``stages[k]`` is what stage k did, in order of time; ``events[k]`` what was between; ``turns[k]`` the number of
    its device. It has one of its own if ``turns`` is empty.

    Spans of a device do not overlap. A Timeline's own numbers are about actions: its window reaches from the first
    action's beginning to the last one's end.
    """

    stages: tuple[tuple[Span, ...], ...]
    events: tuple[tuple[Event, ...], ...]
    turns: tuple[int, ...] = ()

    @property
    def start_seconds(self) -> float:
        """When the first action of any stage began; 0 without any."""
        return min((span.start_seconds for spans in self.stages for span in spans), default=0.0)

    @property
    def end_seconds(self) -> float:
        """When the last action of any stage ended; 0 without any."""
        return max((span.end_seconds for spans in self.stages for span in spans), default=0.0)

    @property
    def step_seconds(self) -> float:
        """From the beginning of the first action to the end of the last."""
        return self.end_seconds - self.start_seconds

    def chrome_trace(self, name: str, pid: int = 0) -> list[dict[str, Any]]:
        """Events of the Chrome trace format (a row per stage), which Perfetto and ``chrome://tracing`` open.

        ``json.dump`` of this list is a complete trace file; so are several of them joined, such as a measured and a
        predicted one, if each has its own ``pid``. Times are microseconds, as the format asks for, since
        the first of all that is shown began. A complete event has ``ph`` X, the name of a row or a group of rows
        ``ph`` M. Actions are coloured by micro-batch where the viewer follows ``cname``; Perfetto chooses colours of
        its own.
        """
        rows: list[list[Span | Event]] = [
            [*spans, *beside] for spans, beside in zip(self.stages, self.events, strict=True)
        ]
        begin = min((piece.start_seconds for row in rows for piece in row), default=0.0)
        result: list[dict[str, Any]] = []

        def describe(what: str, tid: int, **args: Any) -> None:
            result.append({"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args})

        describe("process_name", 0, name=name)
        describe("process_sort_index", 0, sort_index=pid)
        for stage, row in enumerate(rows):
            shared = f" on device {self.turns[stage]}" if len(set(self.turns)) < len(self.turns) else ""
            describe("thread_name", stage, name=f"stage {stage}{shared}")
            describe("thread_sort_index", stage, sort_index=stage)
            for piece in row:
                args: dict[str, Any] = {"stage": stage}
                if (action := piece.action) is not None:
                    args = {"kind": action.kind.name, "stage": stage, "micro_batch": action.micro_batch}
                if isinstance(piece, Event):
                    text, category, colour = piece.what.value, piece.what.value, _EVENT_COLOURS[piece.what]
                else:
                    text, category = str(piece.action), piece.action.kind.name
                    colour = _COLOURS[piece.action.micro_batch % len(_COLOURS)]
                times = {"ts": (piece.start_seconds - begin) * 1e6, "dur": piece.seconds * 1e6}
                result.append({"name": text, "cat": category, "ph": "X", **times, "pid": pid, "tid": stage,
                               "cname": colour, "args": args})  # fmt: skip
        return result


# Names that chrome://tracing reserves for colours (tr.b.ColorScheme of the Catapult project); it knows no others.
_COLOURS = ("thread_state_running", "rail_response", "rail_animation", "rail_load", "thread_state_runnable",
            "thread_state_iowait", "olive", "startup")  # fmt: skip
_EVENT_COLOURS = {EventKind.WAITING: "white", EventKind.TRANSFER: "grey", EventKind.UPDATE: "black"}
