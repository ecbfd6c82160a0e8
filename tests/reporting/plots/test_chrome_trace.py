"""Trace files, held against the rules of the Trace Event Format and of Perfetto's reader of it."""

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from reporting_runs import shares

from gpipe_cli.reporting.plots import chrome_trace, timeline
from gpipe_cli.reporting.plots.picture import DPI
from gpipe_cli.reporting.plots.timeline_values import TimelineView
from gpipe_cli.schedule.named_schedules import build
from gpipe_cli.schedule.schedule import Action, Kind
from gpipe_cli.schedule.simulator import EdgeCost, StageCost, simulate
from gpipe_cli.schedule.timeline import Event, EventKind, Span, Timeline

Trace = list[dict[str, Any]]


def measured() -> TimelineView:
    """Two stages; the step begins at 99 s on some clock, its first action a second later. Stage 1 has waited for its
    input since before that."""
    f, g = Action(Kind.F, 0, 0), Action(Kind.F, 1, 0)
    spans = (
        (Span(f, 100.0, 101.0), Span(Action(Kind.R, 0, 0), 101.5, 102.0), Span(Action(Kind.B, 0, 0), 104.0, 106.0)),
        (Span(g, 101.0, 102.0), Span(Action(Kind.B, 1, 0), 102.0, 104.0)),
    )
    between = (
        (Event(EventKind.TRANSFER, 101.0, 101.5, f), Event(EventKind.UPDATE, 107.0, 107.5, None)),
        (Event(EventKind.WAITING, 98.0, 101.0, g),),
    )
    return TimelineView("", "measured", Timeline(spans, between), 99.0, 9.0, {})


def predicted(
    name: str = "zero_bubble", stages: int = 3, device_of_stage: Any = (), micro_batches: int = 6
) -> TimelineView:
    """Simulated, with odd times, transfers and updates."""
    schedule = build(name, stages, micro_batches, "except_last")
    costs = [StageCost(k / 7, k / 7, k / 3, k / 5, k / 9, update_seconds=0.01) for k in range(1, stages + 1)]
    edges = {(k, k + 1): EdgeCost(1 / 30, 1 / 31) for k in range(stages - 1)}
    simulated = simulate(schedule, costs, edges, device_of_stage=device_of_stage)
    return TimelineView("", "predicted", simulated, 0.0, simulated.step_seconds, {})


def read(*steps: TimelineView) -> Trace:
    """The events of a file, of which every one keeps to the format."""
    events: Trace = json.loads(json.dumps(chrome_trace.chrome_trace(steps), allow_nan=False))
    needed = {"X": {"ts", "dur", "tid", "cat"}, "M": {"args"}, **{end: {"ts", "tid", "id", "cat"} for end in "sf"}}
    assert all({"name", "ph", "pid"} | needed[event["ph"]] <= event.keys() for event in events)
    _rows_do_not_overlap(events)
    _arrows_have_two_ends(events)
    return events


def _rows_do_not_overlap(events: Trace) -> None:
    """Readers take what overlaps for nested, or drop it; times are whole nanoseconds."""
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            ends = event["ts"] * 1000, (event["ts"] + event["dur"]) * 1000
            assert ends == pytest.approx([*map(round, ends)], abs=1e-3), event
            rows[event["pid"], event["tid"]].append((*map(round, ends), event["name"]))
    for row in rows.values():
        before = 0
        for start, end, name in sorted(row):
            assert before <= start <= end, name
            before = end


def _arrows_have_two_ends(events: Trace) -> None:
    """An `id` has one s and one f, not before it; each belongs to the slice of its row that was last begun, which is an
    action, and an f to one that begins there."""
    ends = {end: {event["id"]: event for event in events if event["ph"] == end} for end in "sf"}
    assert len(ends["s"]) == len(ends["f"]) == sum(event["ph"] == "s" for event in events)
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for event in sorted((event for event in events if "ts" in event), key=lambda event: event["ts"]):  # as readers do
        if event["ph"] == "X":
            last[event["pid"], event["tid"]] = event
        else:
            event["owner"] = last[event["pid"], event["tid"]]
            assert event["owner"]["cat"] in tuple("FBI"), event
    for number, sent in ends["s"].items():
        needed = ends["f"][number]
        assert sent["ts"] <= needed["ts"] == needed["owner"]["ts"]
        assert sent["owner"]["name"][1:] == needed["owner"]["name"][1:], "the same micro-batch"
        assert abs(sent["tid"] - needed["tid"]) == 1


def test_a_step_is_shown_from_its_beginning_and_several_share_a_file() -> None:
    events = read(measured(), predicted())
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        0: "measured",
        1: "predicted",
    }
    assert {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}[1] == "stage 1"
    found = sorted(
        (e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if (e["ph"], e["pid"]) == ("X", 0)
    )
    assert found == [
        (0, "B0", 6, 2), (0, "F0", 2, 1), (0, "R0", 3.5, 0.5), (0, "transfer (0F0)", 3, 0.5), (0, "update", 9, 0.5),
        (1, "B0", 4, 2), (1, "F0", 3, 1), (1, "waiting (1F0)", 0, 3),
    ]  # fmt: skip
    arrows = [(e["tid"], e["ts"] / 1e6) for e in events if e["ph"] in "sf" and e["pid"] == 0]
    assert arrows == [(1, 5), (0, 6), (0, 2.5), (1, 3)]
    assert len({(e["name"][1:], e["cname"]) for e in events if e.get("cat") in ("F", "R", "B", "W")}) == 6, "colours"


@pytest.mark.parametrize(
    ("name", "stages", "device_of_stage"),
    [("1f1b", 3, (0, 0, 1)), ("interleaved", 4, (0, 1, 0, 1)), ("zero_bubble", 3, ())],
)
def test_whatever_is_simulated_makes_a_valid_trace(name: str, stages: int, device_of_stage: Any) -> None:
    step = predicted(name, stages, device_of_stage)
    events = read(step)
    assert sum(e["ph"] == "s" for e in events) == 2 * (stages - 1) * 6  # a forward and a backward over every edge
    assert sum(e["ph"] == "X" and e["cat"] in "FRBIW" for e in events) == sum(map(len, step.timeline.stages))


def test_of_a_step_of_30_000_actions_a_window_is_shown_that_can_be_read() -> None:
    """The file had 40 MB and neither waiting nor arrows, and the picture bars of less than a pixel."""
    step = predicted("1f1b", stages=64, micro_batches=160)
    assert sum(map(len, step.timeline.stages)) > 30_000
    events = read(step)
    (said,) = (e["args"]["name"] for e in events if e["name"] == "process_name")
    assert said.startswith("predicted, a window, 312 of 320 actions")
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["tid"] for e in slices} == {*range(64)}
    assert {"waiting", "F", "R", "B"} < {e["cat"] for e in slices}
    assert len(slices) > 10_000
    first = min(e["ts"] for e in slices if e["cat"] == "B" and e["tid"] == 63)
    assert 0 < first < max(e["ts"] for e in slices)
    height, _, _ = timeline.draw([replace(step, breakdown=shares(0.1))]).shape
    inches = timeline.TITLE_INCHES + timeline.PANEL_INCHES + timeline.AXIS_INCHES + timeline.LEGEND_INCHES  # of 16 rows
    assert height == pytest.approx(DPI * inches, abs=2)
