"""Who did what when in one training step: what Figure 2(c) of the paper shows, with a time axis.

The simulator makes one from a schedule and costs, a measurement makes one from clocks; both are this class, so that
a prediction and what became of it are compared number by number and picture by picture.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.pipeline.schedule import Action, Kind


@dataclass(frozen=True, slots=True)
class Span:
    """When an action ran; both times count from the same zero on every stage."""

    action: Action
    start_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


@dataclass(frozen=True)
class Timeline:
    """``stages[k]`` is what stage k did, in order of time. Spans of a stage do not overlap."""

    stages: tuple[tuple[Span, ...], ...]

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

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """For each stage, the time spent in actions, recomputation included."""
        return tuple(sum(span.seconds for span in spans) for spans in self.stages)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """For each stage, the rest of the step."""
        step = self.step_seconds
        return tuple(step - busy for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """The share of all stage-time that is idle, from 0 to 1 (section 2.3)."""
        available = self.step_seconds * len(self.stages)
        return sum(self.idle_seconds) / available if available > 0 else 0.0

    def kind_seconds(self, kind: Kind) -> tuple[float, ...]:
        """For each stage, the time spent in actions of one kind (what the paper's overhead breakdown adds up)."""
        return tuple(sum(s.seconds for s in spans if s.action.kind is kind) for spans in self.stages)

    def grid(self, width: int = 120) -> str:
        """The timeline as text, a row per stage, lengths proportional to time, ``.`` for idle.

        K = 2, M = 2, a backward twice as long as a forward:

            stage 0 | F0---F1---...............B1--------B0--------
            stage 1 | .....F0---F1---B1--------B0--------..........

        A span too short for its name shows the letter or nothing. Times round to the nearest of ``width`` columns.
        """
        labels = [f"stage {k:<{len(str(len(self.stages) - 1))}} | " for k in range(len(self.stages))]
        columns = max(1, width - max(map(len, labels), default=0))
        start, step = self.start_seconds, self.step_seconds
        scale = columns / step if step > 0 else 0.0
        return "\n".join(label + _row(s, start, scale, columns) for label, s in zip(labels, self.stages, strict=True))

    def chrome_trace(self) -> list[dict[str, Any]]:
        """Events of the Chrome trace format (a row per stage), which Perfetto and ``chrome://tracing`` open.

        ``json.dump`` of this list is a complete trace file. Times are microseconds since the step began, as the
        format asks for. A complete event has ``ph`` X, the name of a row ``ph`` M.
        """
        events: list[dict[str, Any]] = []
        for stage in range(len(self.stages)):
            place = {"pid": 0, "tid": stage}
            events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": f"stage {stage}"}})
            events.append({"name": "thread_sort_index", "ph": "M", **place, "args": {"sort_index": stage}})
        for spans in self.stages:
            for span in spans:
                action = span.action
                events.append(
                    {
                        "name": str(action),
                        "cat": action.kind.name,
                        "ph": "X",
                        "ts": (span.start_seconds - self.start_seconds) * 1e6,
                        "dur": span.seconds * 1e6,
                        "pid": 0,
                        "tid": action.stage,
                        "args": {"kind": action.kind.name, "stage": action.stage, "micro_batch": action.micro_batch},
                    }
                )
        return events


def _row(spans: Sequence[Span], start: float, scale: float, columns: int) -> str:
    row = ["."] * columns
    for span in spans:
        first, last = (round((t - start) * scale) for t in (span.start_seconds, span.end_seconds))
        length = last - first
        name = f"{span.action.kind.value}{span.action.micro_batch}"
        # A name cut short would be the name of another micro-batch.
        row[first:last] = (name if len(name) <= length else name[0]).ljust(length, "-")[:length]
    return "".join(row)
