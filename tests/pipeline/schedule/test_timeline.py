"""A timeline's numbers and its trace file."""

import json
from dataclasses import replace

import pytest

from gpipe_cli.pipeline.schedule.orders import build
from gpipe_cli.pipeline.schedule.schedules import Action, Kind
from gpipe_cli.pipeline.schedule.simulator import StageCost, simulate
from gpipe_cli.pipeline.schedule.timeline import Event, EventKind, Span, Timeline, gap


def measured() -> Timeline:
    """Two stages, begun at 100 s on some clock; stage 1 waits 1 s for its input."""
    return Timeline(
        (
            (
                Span(Action(Kind.F, 0, 0), 100.0, 101.0),
                Span(Action(Kind.R, 0, 0), 101.0, 102.0),
                Span(Action(Kind.B, 0, 0), 104.0, 106.0),
            ),
            (Span(Action(Kind.F, 1, 0), 101.0, 102.0), Span(Action(Kind.B, 1, 0), 102.0, 104.0)),
        ),
        ((), ()),
    )


def test_the_trace_is_what_perfetto_opens() -> None:
    """The array form of the trace event format: ``ph`` X with ``ts`` and ``dur`` in microseconds, M for rows."""
    waits = Event(EventKind.WAITING, 100.0, 101.0, Action(Kind.F, 1, 0))
    timeline = replace(measured(), events=((Event(EventKind.UPDATE, 106.0, 107.5, None),), (waits,)))
    assert timeline.step_seconds == 6  # of the actions
    events = json.loads(json.dumps(timeline.chrome_trace("run")))
    complete = [e for e in events if e["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1"}
    assert [e["name"] for e in complete if e["cat"] in ("F", "R", "B")] == ["0F0", "0R0", "0B0", "1F0", "1B0"]
    backward = complete[2]
    assert (backward["tid"], backward["cat"], backward["ts"], backward["dur"]) == (0, "B", 4_000_000, 2_000_000)
    assert backward["args"] == {"kind": "B", "stage": 0, "micro_batch": 0}
    assert {"name", "ph", "ts", "dur", "pid", "tid"} <= backward.keys()
    update, waiting = (e for e in complete if e["cat"] in list(EventKind))
    assert (update["name"], update["tid"], update["ts"], update["dur"]) == ("update", 0, 6_000_000, 1_500_000)
    assert update["args"] == {"stage": 0}
    assert (waiting["name"], waiting["tid"], waiting["ts"], waiting["dur"]) == ("waiting", 1, 0, 1_000_000)
    assert waiting["args"] == {"kind": "F", "stage": 1, "micro_batch": 0}


def test_two_timelines_share_a_trace() -> None:
    """And a micro-batch has one colour in all its actions."""
    predicted = simulate(build("gpipe", 2, 3, "never"), [StageCost(1, 1, 2)] * 2)
    shown = measured().chrome_trace("measured") + predicted.chrome_trace("predicted", pid=1)
    names = {e["pid"]: e["args"]["name"] for e in shown if e["name"] == "process_name"}
    assert names == {0: "measured", 1: "predicted"}
    assert {(e["pid"], e["tid"]) for e in shown if e["ph"] == "X"} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert len({(e["args"]["micro_batch"], e["cname"]) for e in shown if e.get("cat") in ("F", "R", "B")}) == 3


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
