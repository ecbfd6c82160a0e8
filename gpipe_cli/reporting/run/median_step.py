"""The recorded step of a run that is shown: the step of median duration. Other steps may have waited for data, disks or
other programs, and the first steps for memory."""

from array import array
from statistics import median_low

from gpipe_cli.training.events import StepDone, StepRecorded

MAX_KEPT_STEPS = 32  # recordings at most: each may hold thousands of numbers, and an epoch tens of thousands of steps


class MedianStep:
    """The step, among those added, whose duration is nearest to their median.

    All durations are kept, but recordings of all steps only up to MAX_KEPT_STEPS, later of every second, fourth, ...
    step, so that they spread over the whole time. Steps that do not count (warm-up, a short mini-batch) are used only
    until the first step that counts, which drops them.
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
        if len(self._kept) > MAX_KEPT_STEPS:
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
