"""Which steps of a run are drawn, and when: of each epoch the step of median duration, with the prediction."""

import time
from array import array
from collections.abc import Callable
from functools import partial
from importlib import import_module
from statistics import median_low

from gpipe_cli.data.micro_batches import shard_of
from gpipe_cli.pipeline.runtime.step_timings import timeline_of_marks
from gpipe_cli.reporting.plots.timeline_values import StepPicture, TimelineView, view_of_plan
from gpipe_cli.reporting.run.description import RunContext
from gpipe_cli.schedule.breakdown import Breakdown, breakdown
from gpipe_cli.schedule.timeline import Timeline
from gpipe_cli.training.events import StepDone, StepRecorded

_FIRST_DRAWN_AFTER_STEPS = 5  # counted steps after which the first picture is drawn, before the first epoch ends
_MIN_PAUSE_RATIO = 50  # of the pause between drawings to the last drawing, which takes a core from the stages
_KEPT = 32  # recordings at most: each may hold thousands of numbers, and an epoch tens of thousands of steps


class MedianStep:
    """The step, among those added, whose duration is nearest to their median: other steps may have waited for data,
    disks or other programs, and the first steps for memory.

    All durations are kept, but recordings of all steps only up to _KEPT, later of every second, fourth, ... step, so
    that they spread over the whole time. Steps that do not count (warm-up, a short mini-batch) are used only until the
    first step that counts, which drops them.
    """

    def __init__(self) -> None:
        self._seconds = array("d")  # durations of all steps
        self._kept: list[tuple[StepDone, StepRecorded]] = []
        self._every = 1  # a recording is kept once in this many steps
        self.counted = 0  # number of steps added that count

    def add(self, done: StepDone, recorded: StepRecorded, *, counts: bool) -> None:
        if counts and not self.counted:
            self._seconds, self._kept, self._every = array("d"), [], 1
        if not counts and self.counted:
            return
        self.counted += counts
        if len(self._seconds) % self._every == 0:
            self._kept.append((done, recorded))
        self._seconds.append(done.seconds)
        if len(self._kept) > _KEPT:
            self._kept, self._every = self._kept[::2], 2 * self._every

    @property
    def steps(self) -> int:
        """Number of steps that the median is taken over."""
        return len(self._seconds)

    @property
    def nearest(self) -> tuple[StepDone, StepRecorded] | None:
        """The kept step nearest to the median duration, with its recording; None before the first step. Of an even
        number of steps, the median is the lower of the two in the middle."""
        if not self._kept:
            return None
        middle = median_low(self._seconds)
        return min(self._kept, key=lambda step: abs(step[0].seconds - middle))


class StepDrawer:
    """Passes the steps that are to be drawn to `show`."""

    def __init__(self, run: RunContext, show: Callable[[StepPicture], None]) -> None:
        self._run, self._show = run, show
        self._warmed_up = run.ready.first_step + run.warm_up_steps  # the median leaves out steps up to this number
        self._median = MedianStep()  # over the current epoch; in a measurement, over all steps
        self._epoch_shown = False  # whether the median step of a whole epoch, or of the whole run, is chosen
        self._next_drawing = 0.0  # no picture is drawn before this time.monotonic()
        self._undrawn: Callable[[], None] | None = None  # draws the last step that was chosen

    def add(self, step: StepDone, recorded: StepRecorded) -> None:
        """Draws the median step of an epoch at its end, and what is left at the last step, while that is evaluated."""
        run = self._run
        if not run.bench:  # the first steps are slow in any case, and the last picture need not wait for the import
            import_module("gpipe_cli.reporting.plots.timeline")
        whole = step.samples == (run.config.batch_size or step.samples)  # an epoch's last mini-batch may be short
        self._median.add(step, recorded, counts=whole and step.step > self._warmed_up)
        counted = self._median.counted
        ends = step.position == run.ready.steps_per_epoch and counted > 0
        # drawing takes a core for a second, so a measurement is drawn at its end
        if not run.bench and (ends or (counted == _FIRST_DRAWN_AFTER_STEPS and not self._next_drawing)):
            self._choose()
            if ends:
                self._median = MedianStep()
                self._epoch_shown = True
            if time.monotonic() >= self._next_drawing:
                self._draw()
        if step.step == run.total_steps:
            self.finish(completed=True)

    def finish(self, *, completed: bool) -> None:
        """Draws the chosen step if the run is completed, or nothing of it is drawn yet."""
        if completed or self._next_drawing == 0:
            if not self._epoch_shown:
                self._choose()
                self._epoch_shown = True
            self._draw()

    def analyze(self, step: StepDone, recorded: StepRecorded) -> tuple[Timeline, Breakdown, int]:
        """The timeline and the breakdown of a recorded step, and its number of micro-batches M."""
        config, spec = self._run.config, self._run.spec
        micro_batches = len(shard_of(step.samples, config.micro_batches, config.replicas).sizes)
        schedule = spec.schedule(micro_batches)
        devices = spec.layout.device_of_stage
        timeline = timeline_of_marks(schedule, recorded.seconds, recorded.began_seconds, devices)
        return timeline, breakdown(timeline, micro_batches, step.seconds), micro_batches

    def _choose(self) -> None:
        """Chooses the median step so far to be drawn next, with the prediction."""
        if (chosen := self._median.nearest) is None:
            return
        step, recorded = chosen
        plan = self._run.prediction
        timeline, shares, micro_batches = self.analyze(step, recorded)
        title = f"epoch {step.epoch}, step {step.step:,}"
        steps = self._median.steps
        note = f"the median of {steps:,} steps" if steps > 1 else ""
        views = [
            TimelineView(title, "measured", timeline, recorded.began_seconds, step.seconds, shares._asdict(), note)
        ]
        if plan is not None and plan.micro_batches == micro_batches:
            views.append(view_of_plan(title, plan))
        self._undrawn = partial(self._show, StepPicture(step.epoch, step.step, tuple(views), steps))

    def _draw(self) -> None:
        """Draws the chosen step, unless it is drawn already."""
        if self._undrawn is not None:
            began = time.monotonic()
            self._undrawn()
            self._undrawn = None
            ended = time.monotonic()
            self._next_drawing = ended + _MIN_PAUSE_RATIO * (ended - began)
