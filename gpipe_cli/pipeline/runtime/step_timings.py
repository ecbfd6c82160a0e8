"""Clock marks of what each stage did when, made by the executor as it performs a schedule, and their timeline.

The paper sums this up in a chart (NeurIPS version, section 3.1: computation, recomputation, bubble, load imbalance,
weight update); here it is recorded for every step of every run. A mark costs one reading of a clock: on a CPU the
host's monotonic clock, which all processes of a machine share; on a GPU an event in its stream, read a step later, so
that the host does not wait for it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from gpipe_cli.schedule.schedule import Schedule
from gpipe_cli.schedule.timeline import Event, EventKind, Span, Timeline, gap
from gpipe_cli.system.accelerator import current_stream, is_accelerator, new_stream, new_timer

Mark: TypeAlias = Any  # seconds (float) on the host, an event on a GPU; read by the clock that made it
MARKS_PER_ACTION = 4  # marks per action: begun, everything received, computed, sent
MARKS_PER_STAGE = 4  # after its actions: begin and end of the wait for replicas' sums, and of the update
_ANCHOR_STEPS = 50  # steps between comparisons of a GPU's clock with the host's, which drift by parts in a million


class HostClock:
    """The clock of a CPU, whose work is done when a call returns."""

    now = staticmethod(time.perf_counter)
    # CPU time of the calling thread, which computes. OpenMP's threads wait for each other within a millisecond, so
    # this thread's time also shows a core that another thread lacks.
    cpu_seconds = staticmethod(time.thread_time)

    def begin_step(self) -> None:
        pass

    def reader(self) -> Callable[[Sequence[Mark]], list[float]]:
        """A function from marks of this step, of which the last must be the latest, to seconds of the host's monotonic
        clock."""
        return list


class StreamClock:
    """The clock of a GPU: calls only launch work, so events are recorded between its kernels.

    An event is read as the time since another event, in float32: so each step has a new event to count from, which
    counts from the previous step's. Other events are reused: marks are read within the next step.
    """

    cpu_seconds = staticmethod(float)  # always 0: the device does the work

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps = 0
        self._reference: _Reference | None = None
        self._idle_stream = new_stream(device)  # for anchors
        self._events: list[torch.Event] = []  # events of this step and of the step before
        self._events_before: list[torch.Event] = []
        self._marks = 0  # marks made in this step

    def begin_step(self) -> None:
        if self._steps % _ANCHOR_STEPS == 0:  # on an idle stream, so that the host does not wait for kernels
            anchor = new_timer(self._device)
            anchor.record(self._idle_stream)
            anchor.synchronize()
            self._reference = _Reference(anchor, time.perf_counter(), None)
        start = new_timer(self._device)
        start.record(current_stream(self._device))
        self._reference = _Reference(start, None, self._reference)
        self._events, self._events_before = self._events_before, self._events
        self._marks = 0
        self._steps += 1

    def now(self) -> Mark:
        if self._marks == len(self._events):
            self._events.append(new_timer(self._device))
        event = self._events[self._marks]
        self._marks += 1
        event.record(current_stream(self._device))
        return event

    def reader(self) -> Callable[[Sequence[Mark]], list[float]]:
        assert self._reference is not None, "a step has begun"
        return self._reference.read


class _Reference:
    """An event that others count from, and its time on the host's clock: given, or counted from `previous`."""

    def __init__(self, event: Any, seconds: float | None, previous: "_Reference | None") -> None:
        self._event, self._seconds, self._previous = event, seconds, previous

    @property
    def seconds(self) -> float:
        if self._seconds is None:
            assert self._previous is not None
            (self._seconds,) = self._previous.read((self._event,))
            self._previous = None
        return self._seconds

    def read(self, marks: Sequence[Any]) -> list[float]:
        marks[-1].synchronize()
        return [self.seconds + float(self._event.elapsed_time(mark)) / 1e3 for mark in marks]


Clock: TypeAlias = HostClock | StreamClock  # marks moments in the order of a device's work


class StepTimings:
    """The marks of a step on the stages of this process, read by `seconds` when there is time for it."""

    def __init__(self, schedule: Schedule, readers: Mapping[int, Callable[[Sequence[Mark]], list[float]]]) -> None:
        self.schedule = schedule
        self._readers = readers
        self._marks: dict[int, list[Mark]] = {stage: [] for stage in readers}
        self._sums: dict[int, tuple[Mark, Mark]] = {}
        self._updates: dict[int, tuple[Mark, Mark]] = {}
        self._cpu_seconds = dict.fromkeys(readers, 0.0)

    def mark_action(
        self, stage: int, begun: Mark, received: Mark, computed: Mark, sent: Mark, cpu_seconds: float = 0.0
    ) -> None:
        """Add the four marks of an action, which had a core for `cpu_seconds` between `received` and `computed`."""
        self._marks[stage] += (begun, received, computed, sent)
        self._cpu_seconds[stage] += cpu_seconds

    def mark_gradient_sync(self, stage: int, begun: Mark, ended: Mark) -> None:
        """Add the marks of the wait for gradients of other replicas, and of other stages with the same weights."""
        self._sums[stage] = (begun, ended)

    def mark_update(self, stage: int, begun: Mark, ended: Mark) -> None:
        self._updates[stage] = (begun, ended)

    def cpu_starved_share(self, stage: int) -> float:
        """The share of its computing time for which the stage had no core, taken by other processes; 0 on a GPU."""
        cpu_seconds = self._cpu_seconds[stage]
        if not cpu_seconds:
            return 0.0
        marks = self._marks[stage]
        computing_seconds = sum(marks[first + 2] - marks[first + 1] for first in range(0, len(marks), MARKS_PER_ACTION))
        return max(0.0, 1 - cpu_seconds / computing_seconds)

    def seconds(self) -> dict[int, list[float]]:
        """By stage, seconds of the host's clock: MARKS_PER_ACTION for each action, in the schedule's order, then
        MARKS_PER_STAGE. On a GPU this waits for the last mark."""
        seconds: dict[int, list[float]] = {}
        for stage, reader in self._readers.items():
            marks = self._marks[stage]
            sums = self._sums.get(stage, marks[-1:] * 2)
            seconds[stage] = reader([*marks, *sums, *self._updates.get(stage, sums[-1:] * 2)])
        return seconds


class StepTimer:
    """Records steps on the stages (by index) of this process, which live on `devices`."""

    def __init__(self, devices: Mapping[int, torch.device]) -> None:
        clocks = {device: StreamClock(device) if is_accelerator(device) else HostClock() for device in devices.values()}
        self.clocks: dict[int, Clock] = {stage: clocks[device] for stage, device in devices.items()}

    def begin_step(self, schedule: Schedule) -> StepTimings:
        for clock in set(self.clocks.values()):
            clock.begin_step()
        return StepTimings(schedule, {stage: clock.reader() for stage, clock in self.clocks.items()})


def max_marks(micro_batches: int) -> int:
    """The maximum number of a stage's marks in a step: each micro-batch has at most an F, an R, an I and a W."""
    return 4 * micro_batches * MARKS_PER_ACTION + MARKS_PER_STAGE


def timeline_of_marks(
    schedule: Schedule,
    seconds: Sequence[Sequence[float]],
    began_seconds: float = -math.inf,
    device_of_stage: Sequence[int] = (),
) -> Timeline:
    """The timeline of a step; `seconds[k]` are stage k's marks, as `StepTimings.seconds` returns them, and
    `device_of_stage[k]` is the number of its device.

    It begins at `began_seconds`: earlier waiting is left out, as a stage may wait for its first micro-batch while stage
    0 is still in the previous step. The time that a stage takes to send its results is also a transfer.
    """
    action_ends = {
        action: computed
        for actions, numbers in zip(schedule.stages, seconds, strict=True)
        for action, computed in zip(actions, numbers[2::MARKS_PER_ACTION], strict=False)
    }
    stages, events = [], []
    for actions, numbers in zip(schedule.stages, seconds, strict=True):
        spans: list[Span] = []
        stage_events: list[Event] = []
        marks = zip(*(numbers[mark::MARKS_PER_ACTION] for mark in range(MARKS_PER_ACTION)), strict=True)
        for action, (begun, received, computed, sent) in zip(actions, marks, strict=False):
            if (source := schedule.source(action)) is not None:
                stage_events += gap(action, max(begun, min(began_seconds, received)), received, action_ends[source])
            spans.append(Span(action, received, computed))
            if sent > computed:
                stage_events.append(Event(EventKind.TRANSFER, computed, sent, action))
        sum_begun, sum_ended, begun, ended = numbers[len(actions) * MARKS_PER_ACTION :][:MARKS_PER_STAGE]
        last_events = Event(EventKind.TRANSFER, sum_begun, sum_ended, None), Event(EventKind.UPDATE, begun, ended, None)
        stages.append(tuple(spans))
        events.append((*stage_events, *(event for event in last_events if event.seconds > 0)))
    return Timeline(tuple(stages), tuple(events), tuple(device_of_stage))
