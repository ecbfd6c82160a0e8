"""A training step, measured or simulated, in the form that pictures need: Figure 2(c) of the paper, in seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from gpipe_cli.schedule.schedule import SENDS_GRADIENT
from gpipe_cli.schedule.timeline import Event, Span, Timeline
from gpipe_cli.units import round_preserving_sum

if TYPE_CHECKING:  # the module imports torch, which takes seconds; tables of runs do not need it
    from gpipe_cli.planner.plan import Plan

BarKind = Literal["F", "R", "B", "I", "W", "waiting", "transfer", "update"]
TimelineKind = Literal["measured", "predicted"]

MAX_ACTIONS = 20_000  # of a step that is drawn whole; of larger steps, a window is drawn
ACTIONS: tuple[BarKind, ...] = ("F", "R", "B", "I", "W")
# Shares of a step's stage-time, which sum to 1, in the order of display. The paper's overhead breakdown (section 3.1 of
# the NeurIPS version) names all but the transfer, which its TPUs hide behind compute.
BUSY = ("compute", "recompute", "update")
IDLE = ("bubble", "imbalance", "transfer", "set_up")
SHARES = (*BUSY, *IDLE)


class Bar(NamedTuple):
    """An interval of a stage: an action, or a wait."""

    what: BarKind  # an action; or waiting for a neighbour, an exposed transfer, the weight update
    micro_batch: int | None  # m; None for a bar of no micro-batch, such as the update
    start_seconds: float  # since the step began
    end_seconds: float

    @property
    def name(self) -> str:
        """`F0`, `update`."""
        if self.micro_batch is None or self.what not in ACTIONS:
            return self.what
        return f"{self.what}{self.micro_batch}"


@dataclass(frozen=True)
class TimelineView:
    """A step of a pipeline, measured or predicted. A stage is idle during `waiting` and `transfer`, and where it has
    no bar."""

    title: str  # `epoch 3, step 135`, `K = 4, M = 16`; pictures add kind and numbers
    kind: TimelineKind
    timeline: Timeline
    begin_seconds: float  # start of the step on the timeline's clock
    step_seconds: float  # duration of the whole step, update and set-up included
    breakdown: Mapping[str, float]  # SHARES -> share of stage-time, 0 to 1
    note: str = ""  # shown after the title where there is room: `the median of 45 steps`
    window: str = ""  # `a window, 20 of 1,024 actions`: what is shown of a larger step; the view then begins with it

    @cached_property
    def stages(self) -> tuple[tuple[Bar, ...], ...]:
        """What each stage did, in order of time. Bars of a stage do not overlap."""

        def bar(what: str, interval: Span | Event) -> Bar:
            micro_batch = None if interval.action is None else interval.action.micro_batch
            start_seconds = interval.start_seconds - self.begin_seconds
            return Bar(cast(BarKind, what), micro_batch, start_seconds, interval.end_seconds - self.begin_seconds)

        stages = []
        for spans, events in zip(self.timeline.stages, self.timeline.events, strict=True):
            bars = [*(bar(span.action.kind, span) for span in spans), *(bar(event.what, event) for event in events)]
            stages.append(tuple(sorted(bars, key=attrgetter("start_seconds", "end_seconds"))))
        return tuple(stages)

    @property
    def end_seconds(self) -> float:
        """The end of the time axis: the end of the step, or of a bar that ends later."""
        if self.window:
            return self.stages[-1][-1].end_seconds
        return max([self.step_seconds, *(bars[-1].end_seconds for bars in self.stages if bars)])

    @property
    def micro_batches(self) -> int:
        """M: the highest micro-batch index among the bars, plus 1."""
        indices = (bar.micro_batch for bars in self.stages for bar in bars if bar.micro_batch is not None)
        return max(indices, default=-1) + 1


def last_stages_and_actions(view: TimelineView, stages: int, actions: int) -> TimelineView:
    """`view` or, for a step with more than MAX_ACTIONS actions, its last `stages` stages during `actions` actions of
    the last stage, around its first backward. The other stages are empty."""
    timeline = view.timeline
    if sum(map(len, timeline.stages)) <= MAX_ACTIONS:
        return view
    last, others = timeline.stages[-1], len(timeline.stages) - stages
    turn = next((at for at, span in enumerate(last) if span.action.kind in SENDS_GRADIENT), 0)
    shown = last[max(0, turn - actions // 2) :][:actions]
    begin, end = shown[0].start_seconds, shown[-1].end_seconds

    def within(stage: int, pieces: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            piece._replace(start_seconds=max(begin, piece.start_seconds), end_seconds=min(end, piece.end_seconds))
            for piece in (pieces if stage >= others else ())
            if piece.start_seconds < end and piece.end_seconds > begin
        )

    spans, events = (tuple(map(within, count(), rows)) for rows in (timeline.stages, timeline.events))
    text = f"a window, {len(shown):,} of {len(last):,} actions"
    return replace(view, timeline=Timeline(spans, events), begin_seconds=begin, window=text)


def view_of_plan(title: str, plan: "Plan") -> TimelineView:
    begin_seconds = plan.timeline.start_seconds
    return TimelineView(title, "predicted", plan.timeline, begin_seconds, plan.step_seconds, plan.breakdown._asdict())


@dataclass(frozen=True)
class StepPicture:
    epoch: int
    step: int  # steps done, this step included
    views: tuple[TimelineView, ...]  # measured and, if there is a prediction, predicted
    median_of: int = 1  # number of steps among which this step's duration is nearest to the median


def idle_share(breakdown: Mapping[str, float]) -> float:
    """The fraction of stage-time in which stages did nothing, whatever the cause."""
    return sum(breakdown[name] for name in IDLE)


def to_percent(breakdown: Mapping[str, float]) -> dict[str, float]:
    """Shares in percent, rounded to one decimal so that they still sum to 100, and the sum of the idle ones."""
    shown = round_preserving_sum({name: 100 * breakdown[name] for name in SHARES})
    return shown | {"idle": idle_share(shown)}


def axis_unit(end_seconds: float) -> tuple[str, float]:
    """The unit of a time axis that ends at `end_seconds`: its name, and its length in seconds."""
    return ("s", 1.0) if end_seconds >= 2 else ("ms", 1e-3) if end_seconds >= 2e-3 else ("µs", 1e-6)
