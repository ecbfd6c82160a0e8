"""Trace files, held against the rules of the Trace Event Format and of Perfetto's reader of it."""

import json
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from gpipe_cli.pipeline.schedule.breakdown import breakdown
from gpipe_cli.pipeline.schedule.held import Held, peak_bytes
from gpipe_cli.pipeline.schedule.orders import build
from gpipe_cli.pipeline.schedule.schedules import Action, Kind
from gpipe_cli.pipeline.schedule.simulator import EdgeCost, StageCost, simulate
from gpipe_cli.pipeline.schedule.timeline import Event, EventKind, Span, Timeline
from gpipe_cli.reporting.plots import chrome_trace
from gpipe_cli.reporting.plots.chrome_trace import TracedStep
from gpipe_cli.units import MIB

HELD = Held(4 * MIB, 1 * MIB, 2 * MIB, 3 * MIB)
Trace = list[dict[str, Any]]


def measured() -> TracedStep:
    """Two stages of two samples; the step begins at 99 s on some clock, its first action a second later, and it ends
    at 110. Stage 1 waits 1 s for its input; stage 0 hands it on for half a second beside that, and its last
    backward, whose result nobody needs, for a tenth."""
    f, g, last = Action(Kind.F, 0, 0), Action(Kind.F, 1, 0), Action(Kind.B, 0, 0)
    timeline = Timeline(
        (
            (Span(f, 100.0, 101.0), Span(Action(Kind.R, 0, 0), 101.5, 102.0), Span(last, 104.0, 106.0)),
            (Span(g, 101.0, 102.0), Span(Action(Kind.B, 1, 0), 102.0, 104.0)),
        ),
        (
            (
                Event(EventKind.TRANSFER, 101.0, 101.5, f),
                Event(EventKind.TRANSFER, 106.0, 106.1, last),
                Event(EventKind.UPDATE, 107.0, 107.5, None),
            ),
            (Event(EventKind.WAITING, 99.5, 101.0, g),),
        ),
    )
    return TracedStep("measured", timeline, 99.0, 11.0, 2, [10 * MIB, 20 * MIB], [[HELD], [HELD]])


def predicted(
    name: str = "zero_bubble", stages: int = 3, micro_batches: int = 5, device_of_stage: Any = ()
) -> TracedStep:
    """Simulated, with odd times, transfers and updates."""
    schedule = build(name, stages, micro_batches, "except_last")
    costs = [StageCost(k / 7, k / 7, k / 3, k / 5, k / 9, update_seconds=0.01) for k in range(1, stages + 1)]
    timeline = simulate(schedule, costs, [EdgeCost(1 / 30, 1 / 31)] * (stages - 1), device_of_stage=device_of_stage)
    sizes = [[Held(*(part * (k + 1) for part in HELD))] * micro_batches for k in range(stages)]
    seconds = max(event.end_seconds for events in timeline.events for event in events) + 0.1
    return TracedStep("predicted", timeline, 0.0, seconds, 8, [MIB] * stages, sizes)


def read(*steps: TracedStep) -> Trace:
    """The events of a file, of which every one keeps to the format."""
    events: Trace = json.loads(json.dumps(chrome_trace.chrome_trace(steps), allow_nan=False))
    needed = {"X": {"ts", "dur", "tid", "cat"}, "C": {"ts", "args"}, "M": {"args", "tid"}}
    needed |= {end: {"ts", "tid", "id", "cat"} for end in "sf"}
    for event in events:
        assert {"name", "ph", "pid"} | needed[event["ph"]] <= event.keys(), event
        assert event.get("ts", 0) >= 0, event
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values()), event
        if event["ph"] == "M":
            argument = {"process_name": "name", "thread_name": "name"}.get(event["name"], "sort_index")
            assert event["args"].keys() == {argument}, event
    _rows_do_not_overlap(events)
    _arrows_have_two_ends(events)
    return events


def _nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """From, to; they are whole."""
    ends = event["ts"] * 1000, (event["ts"] + event["dur"]) * 1000
    assert ends == pytest.approx([*map(round, ends)], abs=1e-3), event
    return round(ends[0]), round(ends[1])


def _rows_do_not_overlap(events: Trace) -> None:
    """Readers take what overlaps for nested, or drop it."""
    rows = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].append((*_nanoseconds(event), event["name"]))
    for row in rows.values():
        before = 0
        for start, end, name in sorted(row):
            assert before <= start <= end, name
            before = end


def _arrows_have_two_ends(events: Trace) -> None:
    """An `id` has one s and one f, not before it; each belongs to the slice of its row that was last begun, which is an
    action, and an f to one that begins there."""
    ends = {end: {event["id"]: event for event in events if event["ph"] == end} for end in "sf"}
    assert ends["s"].keys() == ends["f"].keys()
    assert all(n == 2 for n in Counter(event["id"] for event in events if event["ph"] in "sf").values())
    in_order = sorted((event for event in events if "ts" in event), key=lambda event: event["ts"])  # as readers do
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for event in in_order:
        if event["ph"] == "X":
            last[event["pid"], event["tid"]] = event
        elif event["ph"] in "sf":
            owner = last[event["pid"], event["tid"]]
            assert owner["cat"] in tuple("FBI"), owner
            event["owner"] = owner
    for number, sent in ends["s"].items():
        needed = ends["f"][number]
        assert (sent["name"], sent["cat"]) == (needed["name"], needed["cat"])
        assert sent["ts"] <= needed["ts"] == needed["owner"]["ts"]
        assert needed["bp"] == "e"
        assert sent["owner"]["args"]["micro_batch"] == needed["owner"]["args"]["micro_batch"]
        assert abs(sent["tid"] - needed["tid"]) == 1


def slices(events: Trace, pid: int = 0) -> list[tuple[int, str, float, float]]:
    """Row, name, start and seconds."""
    return sorted(
        (e["tid"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X" and e["pid"] == pid
    )


def counted(events: Trace, name: str, series: str, pid: int = 0) -> list[tuple[float, float]]:
    found = (e for e in events if e["ph"] == "C" and e["name"] == name and e["pid"] == pid)
    return [(event["ts"] / 1e6, event["args"][series]) for event in found]


def test_a_step_is_shown_from_its_beginning_to_its_end() -> None:
    events = read(measured())
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {0: "stage 0", 1: "stage 1"}
    assert slices(events) == [
        (0, "B0", 5, 2),
        (0, "F0", 1, 1),
        (0, "R0", 2.5, 0.5),
        (0, "set-up", 0, 1),
        (0, "set-up", 7, 1),
        (0, "set-up", 8.5, 2.5),
        (0, "transfer of 0F0", 2, 0.5),
        (0, "update", 8, 0.5),
        (1, "B0", 3, 2),
        (1, "F0", 2, 1),
        (1, "set-up", 0, 0.5),
        (1, "set-up", 7, 4),
        (1, "waiting for 0F0", 0.5, 1.5),
    ]
    (backward,) = (e for e in events if e["ph"] == "X" and e["name"] == "B0" and e["tid"] == 0)
    assert backward["args"] == {"kind": "B", "stage": 0, "micro_batch": 0}
    arrows = [(e["tid"], e["ts"] / 1e6) for e in events if e["ph"] in "sf"]
    assert arrows == [(1, 4), (0, 5), (0, 1.5), (1, 2)]
    assert counted(events, "speed,", "samples/s") == [(0, pytest.approx(2 / 11))]
    # stage 0 keeps the input from its forward on, and all from the recomputation to the end of the backward
    assert counted(events, "stage 0: MiB of", "activations") == [(0, 0), (1, 1), (2.5, 4), (7, 0)]
    assert counted(events, "stage 1: MiB of", "activations") == [(0, 0), (2, 4), (5, 0)]
    always = "weights, gradients and optimizer"
    assert {value for _, value in counted(events, "stage 1: MiB of", always)} == {20}


@pytest.mark.parametrize(
    ("name", "stages", "device_of_stage"),
    [("gpipe", 4, ()), ("1f1b", 3, (0, 0, 1)), ("interleaved", 4, (0, 1, 0, 1)), ("zero_bubble", 3, ())],
)
def test_whatever_is_simulated_makes_a_valid_trace(name: str, stages: int, device_of_stage: Any) -> None:
    step = predicted(name, stages, 6, device_of_stage)
    events = read(step)
    actions = [span.action for spans in step.timeline.stages for span in spans]
    assert sum(e["ph"] == "s" for e in events) == sum(e["ph"] == "f" for e in events)
    assert sum(e["ph"] == "s" for e in events) == 2 * (stages - 1) * 6  # a forward and a backward over every edge
    assert sum(e["ph"] == "X" and e["cat"] in "FRBIW" for e in events) == len(actions)
    schedule = chrome_trace.Schedule(tuple(span.action for span in spans) for spans in step.timeline.stages)
    for stage, peak in enumerate(peak_bytes(schedule, step.held)):
        curve = counted(events, f"stage {stage}: MiB of", "activations")
        assert max(value for _, value in curve) * MIB == peak
        assert curve[-1][1] == 0
    shares = breakdown(step.timeline, 6, step.step_seconds)
    set_up = sum(seconds for _, name, _, seconds in slices(events) if name == "set-up")
    devices = len(set(device_of_stage or range(stages)))
    assert set_up == pytest.approx(shares.set_up * devices * step.step_seconds, abs=1e-6)


def test_several_steps_share_a_file() -> None:
    """And a micro-batch has one colour in all its actions."""
    events = read(measured(), predicted())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "measured", 1: "predicted"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)}
    assert len({(e["args"]["micro_batch"], e["cname"]) for e in events if e.get("cat") in ("F", "R", "B", "W")}) == 5


def test_of_very_large_steps_there_are_only_the_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_trace, "MOST_DETAILED", 4)
    assert {e["ph"] for e in read(measured())} == {"M", "X", "C"}
    assert not counted(read(measured()), "stage 0: MiB of", "activations")


def test_a_stage_that_waited_since_before_the_step_begins_the_axis() -> None:
    early = replace(measured(), begin_seconds=99.75, step_seconds=10.0)
    assert (1, "waiting for 0F0", 0, 1.5) in slices(read(early))
