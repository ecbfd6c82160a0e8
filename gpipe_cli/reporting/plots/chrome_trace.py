"""timeline_trace.json: steps in the Trace Event Format of Chrome, which ui.perfetto.dev and chrome://tracing open.

Each step is a group of rows; each stage is a row with its actions, waiting, transfers and update. Arrows lead from an
action to the action of another stage that needs its result.

The format is Google's "Trace Event Format" (Duca and Sinclair, 2016). Two more rules come from the JSON importer of
Perfetto's trace processor: times are whole nanoseconds, and an arrow belongs to the slice begun last on its row.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from gpipe_cli.reporting.plots.timeline_values import MAX_ACTIONS, TimelineView, last_stages_and_actions
from gpipe_cli.schedule.schedule import Schedule
from gpipe_cli.schedule.timeline import Event, EventKind, Span
from gpipe_cli.system.files import write_atomic

TRACE = "timeline_trace.json"

# Names of colours in chrome://tracing (tr.b.ColorScheme of Catapult), which knows no others; Perfetto ignores them.
_COLOURS = ("thread_state_running", "rail_response", "rail_animation", "rail_load", "thread_state_runnable",
            "thread_state_iowait", "olive", "startup")  # fmt: skip
_EVENT_COLOURS = {EventKind.WAITING: "white", EventKind.TRANSFER: "grey", EventKind.UPDATE: "black"}

TraceEvent = dict[str, Any]


def write_trace(folder: Path, steps: Sequence[TimelineView]) -> None:
    """Writes the file atomically. Raises OSError."""
    write_atomic(folder / TRACE, json.dumps(chrome_trace(steps)))


def chrome_trace(steps: Sequence[TimelineView]) -> list[TraceEvent]:
    """The events of the file, with times in microseconds since the start of their step, or of the window of it that is
    shown: a file of a whole large step would have 100 MB and more.

    Phases (``ph``): X, a slice of a row; M, the name of a row or of a group of rows; s and f, the start and end of an
    arrow. `pid` is the position of the step, `tid` the stage.
    """
    numbers = count()
    return [event | {"pid": pid} for pid, step in enumerate(steps) for event in _events(step, numbers)]


def _events(step: TimelineView, numbers: Iterator[int]) -> Iterator[TraceEvent]:
    stages = len(step.timeline.stages)
    step = last_stages_and_actions(step, stages, MAX_ACTIONS // stages)
    timeline = step.timeline
    spans = {span.action: span for row in timeline.stages for span in row}
    rows: list[list[Span | Event]] = [
        [*row, *events] for row, events in zip(timeline.stages, timeline.events, strict=True)
    ]
    # the clocks of several machines differ a little, so a piece may begin before its step
    begin = min([step.begin_seconds, *(piece.start_seconds for row in rows for piece in row)])

    def microseconds(seconds: float) -> float:
        """Rounded to nanoseconds, so that adjacent slices do not overlap: readers drop slices that do."""
        return round((seconds - begin) * 1e9) / 1000

    yield {"name": "process_name", "ph": "M", "args": {"name": ", ".join(filter(None, (step.kind, step.window)))}}
    for stage, row in enumerate(rows):
        yield {"name": "thread_name", "ph": "M", "tid": stage, "args": {"name": f"stage {stage}"}}
        for piece in row:
            start, end = microseconds(piece.start_seconds), microseconds(piece.end_seconds)
            duration = round(1000 * (end - start)) / 1000
            if duration or isinstance(piece, Span):  # an arrow would end at a wait of no length, not at its action
                yield {"ph": "X", "tid": stage, "ts": start, "dur": duration, "args": {"stage": stage}} | _slice_style(
                    piece
                )
    schedule = Schedule(tuple(span.action for span in row) for row in timeline.stages)
    for action, span in spans.items():  # arrows follow the slices, to which readers attach them
        if (needed := schedule.source(action)) is not None and (source := spans.get(needed)) is not None:
            arrow = {"name": "result", "cat": "result", "id": next(numbers)}
            middle = microseconds((source.start_seconds + source.end_seconds) / 2)
            yield {**arrow, "ph": "s", "ts": middle, "tid": needed.stage}
            yield {**arrow, "ph": "f", "ts": microseconds(span.start_seconds), "tid": action.stage, "bp": "e"}


def _slice_style(piece: Span | Event) -> TraceEvent:
    """Name, category and colour of a slice."""
    if isinstance(piece, Event):
        name = f"{piece.what} ({piece.action})" if piece.action else piece.what
        return {"name": name, "cat": piece.what, "cname": _EVENT_COLOURS[piece.what]}
    kind, micro_batch = piece.action.kind, piece.action.micro_batch
    return {"name": f"{kind}{micro_batch}", "cat": kind, "cname": _COLOURS[micro_batch % len(_COLOURS)]}
