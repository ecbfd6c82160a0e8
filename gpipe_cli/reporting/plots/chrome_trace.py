"""timeline_trace.json: steps in the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing open.

A group of rows for each step, a row for each stage: its actions, what it waits for, set-up and update; arrows from each
action to the one of another stage that needs its result; above the rows the bytes that each stage holds, as counters.

The format is Google's "Trace Event Format" (Duca and Sinclair, 2016). What its readers make of it beyond that was read
in the JSON importer of Perfetto's trace processor: times are kept in whole nanoseconds, and an arrow belongs to the
slice that was last begun on its row.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from gpipe_cli.pipeline.schedule.held import Held, bytes_around
from gpipe_cli.pipeline.schedule.schedules import Action, Schedule
from gpipe_cli.pipeline.schedule.timeline import Event, EventKind, Span, Timeline
from gpipe_cli.units import MIB

# Actions of a step; with arrows, counters and waits the file of a longer one would have hundreds of megabytes.
MOST_DETAILED = 20_000
SET_UP = "set-up"

# Names that chrome://tracing reserves for colours (tr.b.ColorScheme of the Catapult project); it knows no others, and
# Perfetto chooses colours of its own.
_COLOURS = ("thread_state_running", "rail_response", "rail_animation", "rail_load", "thread_state_runnable",
            "thread_state_iowait", "olive", "startup")  # fmt: skip
_EVENT_COLOURS = {EventKind.WAITING: "white", EventKind.TRANSFER: "grey", EventKind.UPDATE: "black"}

TraceEvent = dict[str, Any]


@dataclass(frozen=True)
class TracedStep:
    name: str  # `measured`, `predicted`
    timeline: Timeline
    begin_seconds: float  # on the timeline's clock
    step_seconds: float  # duration of the whole step, update and set-up included
    samples: int  # samples of all replicas
    stored_bytes: Sequence[int]  # per stage, of weights, gradients and the optimizer's state: always there
    held: Sequence[Sequence[Held]]  # per stage and micro-batch


def chrome_trace(steps: Sequence[TracedStep]) -> list[TraceEvent]:
    """What `json.dump` makes a trace file of. Every step begins at 0 on a clock of its own.

    Of the kinds of events (``ph``) there are X, a slice of a row; M, the name of a row or of a group of rows; s and f,
    both ends of an arrow; C, the value of a counter from then on.
    """
    arrows = count()
    return [event for number, step in enumerate(steps) for event in _Group(number, step, arrows).events()]


class _Group:
    """The events of a step; `pid` tells its group of rows, `tid` the stage. `arrows` are numbered over all groups."""

    def __init__(self, pid: int, step: TracedStep, arrows: Iterator[int]) -> None:
        self._pid, self._step, self._timeline, self._arrow_numbers = pid, step, step.timeline, arrows
        self._spans = {span.action: span for spans in self._timeline.stages for span in spans}
        schedule = Schedule(tuple(span.action for span in spans) for spans in self._timeline.stages)
        self._needed = {action: schedule.source(action) for action in self._spans}
        self._sent = set(self._needed.values())  # actions whose results others need
        self._detailed = sum(map(len, self._timeline.stages)) <= MOST_DETAILED
        self._rows: list[list[Span | Event]] = [
            [*spans, *filter(self._shown, beside)]
            for spans, beside in zip(self._timeline.stages, self._timeline.events, strict=True)
        ]
        starts = (piece.start_seconds for row in self._rows for piece in row)
        self._begin = min([step.begin_seconds, *starts])  # clocks of several machines differ a little

    def events(self) -> Iterator[TraceEvent]:
        yield from self._names()
        for stage, row in enumerate(self._rows):
            yield from (self._slice(stage, piece) for piece in row)
        yield from self._set_up()
        if self._step.step_seconds > 0:
            speed = {"samples/s": self._step.samples / self._step.step_seconds}
            yield self._counter("speed,", self._step.begin_seconds, speed)
        if self._detailed:
            yield from self._arrows()  # behind the slices: an end belongs to the one that begins at the same time
            for stage in range(len(self._rows)):
                yield from self._memory(stage)

    def _names(self) -> Iterator[TraceEvent]:
        device_of_stage = self._timeline.device_of_stage

        def describe(what: str, tid: int, **args: Any) -> TraceEvent:
            return {"name": what, "ph": "M", "pid": self._pid, "tid": tid, "args": args}

        yield describe("process_name", 0, name=self._step.name)
        yield describe("process_sort_index", 0, sort_index=self._pid)
        for stage in range(len(self._rows)):
            shared = f" on device {device_of_stage[stage]}" if len(set(device_of_stage)) < len(device_of_stage) else ""
            yield describe("thread_name", stage, name=f"stage {stage}{shared}")
            yield describe("thread_sort_index", stage, sort_index=stage)

    def _slice(self, stage: int, piece: Span | Event) -> TraceEvent:
        action = piece.action
        args: dict[str, Any] = {"stage": stage}
        if action is not None:
            args["kind"], args["micro_batch"] = action.kind, action.micro_batch
        category: str
        if isinstance(piece, Event):
            category, name, colour = piece.what, self._event_name(piece), _EVENT_COLOURS[piece.what]
        else:
            category, name = piece.action.kind, piece.action.kind + str(piece.action.micro_batch)
            colour = _COLOURS[piece.action.micro_batch % len(_COLOURS)]
        return self._complete(stage, name, category, colour, piece.start_seconds, piece.end_seconds, args)

    def _shown(self, event: Event) -> bool:
        """Clocks measure a moment, too, in which an action hands on what nobody needs. Of many actions the gaps between
        them say where a stage waits."""
        if event.what is EventKind.WAITING and not self._detailed:
            return False
        return event.what is not EventKind.TRANSFER or event.action is None or self._moved(event) in self._sent

    def _moved(self, transfer: Event) -> Action:
        """Whose result it is: on its receiver's row a transfer stands before the action that needs it, on its sender's
        behind it."""
        assert transfer.action is not None
        needed = self._needed[transfer.action]
        before = transfer.end_seconds <= self._spans[transfer.action].start_seconds
        return needed if before and needed is not None else transfer.action

    def _event_name(self, event: Event) -> str:
        if event.what is EventKind.UPDATE:
            return "update"
        if event.action is None:
            return "sum over replicas"
        if event.what is EventKind.TRANSFER:
            return f"transfer of {self._moved(event)}"
        needed = self._needed[event.action]
        return "waiting" if needed is None else f"waiting for {needed}"

    def _set_up(self) -> Iterator[TraceEvent]:
        """What is left of the step before the first action of all and after the last one, on each device's first row:
        what the breakdown of a step calls so."""
        end = self._step.begin_seconds + self._step.step_seconds
        window = self._timeline.start_seconds, self._timeline.end_seconds
        device_of_stage = self._timeline.device_of_stage or range(len(self._rows))
        for device in dict.fromkeys(device_of_stage):
            of_device = [
                piece for turn, row in zip(device_of_stage, self._rows, strict=True) if turn == device for piece in row
            ]
            times = [(p.start_seconds, p.end_seconds) for p in of_device]
            outside = [(start, stop) for start, stop in times if start < window[0] or stop > window[1]]
            free = self._step.begin_seconds
            for start, stop in [*sorted([window, *outside]), (end, end)]:
                for since, until in ((free, min(start, window[0])), (max(free, window[1]), start)):
                    if until > since:
                        args = {"stage": device_of_stage.index(device)}
                        yield self._complete(args["stage"], SET_UP, SET_UP, "grey", since, until, args)
                free = max(free, stop)

    def _arrows(self) -> Iterator[TraceEvent]:
        for spans in self._timeline.stages:
            for span in spans:
                if (needed := self._needed[span.action]) is None:
                    continue
                sent = self._spans[needed]
                shared = {"name": "result", "cat": "result", "pid": self._pid, "id": next(self._arrow_numbers)}
                inside = self._microseconds((sent.start_seconds + sent.end_seconds) / 2)
                at = self._microseconds(span.start_seconds)
                yield {**shared, "ph": "s", "ts": inside, "tid": needed.stage}
                yield {**shared, "ph": "f", "ts": at, "tid": span.action.stage, "bp": "e"}

    def _memory(self, stage: int) -> Iterator[TraceEvent]:
        spans = self._timeline.stages[stage]
        stored = {"weights, gradients and optimizer": self._step.stored_bytes[stage] / MIB}
        held = list(bytes_around([span.action for span in spans], self._step.held[stage]))
        points = [(self._step.begin_seconds, 0)]
        for span, (during, after) in zip(spans, held, strict=True):
            points += [(span.start_seconds, during), (span.end_seconds, after)]
        known = None
        for seconds, size in points:
            if size != known:
                yield self._counter(f"stage {stage}: MiB of", seconds, {"activations": size / MIB} | stored)
            known = size

    def _counter(self, name: str, seconds: float, values: Mapping[str, float]) -> TraceEvent:
        """Perfetto has a row for each of the values, named by both names; chrome://tracing piles them up."""
        ts = self._microseconds(seconds)
        return {"name": name, "ph": "C", "ts": ts, "pid": self._pid, "tid": 0, "args": dict(values)}

    def _complete(
        self, stage: int, name: str, category: str, colour: str, start: float, end: float, args: dict[str, Any]
    ) -> TraceEvent:
        since, until = self._nanoseconds(start), self._nanoseconds(end)
        return {"name": name, "cat": category, "ph": "X", "ts": since / 1000, "dur": (until - since) / 1000,
                "pid": self._pid, "tid": stage, "cname": colour, "args": args}  # fmt: skip

    def _microseconds(self, seconds: float) -> float:
        return self._nanoseconds(seconds) / 1000

    def _nanoseconds(self, seconds: float) -> int:
        """Whole ones: slices that touch each other must not overlap, as readers drop those that do."""
        return round((seconds - self._begin) * 1e9)
