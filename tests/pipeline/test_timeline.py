"""A timeline's numbers, its picture and its trace file."""

import json

import pytest

from gpipe_cli.pipeline.schedule import Action, Kind, gpipe
from gpipe_cli.pipeline.simulator import simulate
from gpipe_cli.pipeline.timeline import Span, Timeline


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
        )
    )


def test_numbers_do_not_depend_on_when_the_clock_began() -> None:
    timeline = measured()
    assert timeline.start_seconds == 100
    assert timeline.end_seconds == 106
    assert timeline.step_seconds == 6
    assert timeline.busy_seconds == (4, 3)
    assert timeline.idle_seconds == (2, 3)
    assert timeline.bubble == 5 / 12
    assert timeline.kind_seconds(Kind.F) == (1, 1)
    assert timeline.kind_seconds(Kind.R) == (1, 0)
    assert timeline.kind_seconds(Kind.B) == (2, 2)


def test_the_picture_is_proportional_to_time() -> None:
    assert measured().grid(width=10 + 24) == "\n".join(
        (
            "stage 0 | F0--R0--........B0------",
            "stage 1 | ....F0--B0------........",
        )
    )
    timeline = simulate(gpipe(2, 2, "never"), [1, 1], [2, 2])
    assert timeline.grid(width=10 + 45) == "\n".join(
        (
            "stage 0 | F0---F1---...............B1--------B0--------",
            "stage 1 | .....F0---F1---B1--------B0--------..........",
        )
    )


def test_a_name_that_does_not_fit_is_never_the_name_of_another_micro_batch() -> None:
    spans = tuple(Span(Action(Kind.F, 0, m), m, m + 1) for m in range(10, 14))
    assert Timeline((spans,)).grid(width=10 + 8) == "stage 0 | F-F-F-F-"
    assert Timeline((spans,)).grid(width=10 + 12) == "stage 0 | F10F11F12F13"


@pytest.mark.parametrize("width", [11, 30, 77, 120])
def test_every_row_has_the_width(width: int) -> None:
    timeline = simulate(gpipe(3, 5, "always"), [0.3, 1.1, 0.7], [0.9, 2.0, 1.3])
    rows = timeline.grid(width).split("\n")
    assert [len(row) for row in rows] == [width] * 3


def test_the_trace_is_what_perfetto_opens() -> None:
    """The array form of the trace event format: ``ph`` X with ``ts`` and ``dur`` in microseconds, M for rows."""
    events = json.loads(json.dumps(measured().chrome_trace()))
    complete = [e for e in events if e["ph"] == "X"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1"}
    assert [e["name"] for e in complete] == ["0F0", "0R0", "0B0", "1F0", "1B0"]
    backward = complete[2]
    assert (backward["tid"], backward["cat"], backward["ts"], backward["dur"]) == (0, "B", 4_000_000, 2_000_000)
    assert backward["args"] == {"kind": "B", "stage": 0, "micro_batch": 0}
    assert {"name", "ph", "ts", "dur", "pid", "tid"} <= backward.keys()


def test_nothing_happened() -> None:
    timeline = Timeline(((), ()))
    assert timeline.step_seconds == 0
    assert timeline.bubble == 0
    assert timeline.grid(width=14) == "stage 0 | ....\nstage 1 | ...."
    assert [e["ph"] for e in timeline.chrome_trace()] == ["M"] * 4
