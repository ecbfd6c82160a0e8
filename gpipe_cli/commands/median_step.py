"""Which recorded step of a run is shown: one that took as long as half of the others at most, and half of them at
least. Single steps wait for data, disks and other programs, and the first ones for memory."""

from bisect import insort

from gpipe_cli.training.events import StepDone, StepRecorded

KEPT = 32  # recordings: one may have thousands of numbers, and an epoch tens of thousands of steps


class MedianStep:
    """The step, among those added, whose duration is nearest to their median.

    Durations are kept of all of them; recordings of all as long as these are few, later of every second, fourth, ...
    step, so that they are spread over all of the time. Steps that do not count (warm-up, a short mini-batch) stand in
    for want of others only: the first one that counts drops them.
    """

    def __init__(self) -> None:
        self._seconds: list[float] = []  # ascending
        self._kept: list[tuple[StepDone, StepRecorded]] = []
        self._every = 1  # one recording is kept for this many steps
        self.counted = 0  # steps added that count

    def add(self, done: StepDone, recorded: StepRecorded, *, counts: bool) -> None:
        if counts and not self.counted:
            self._seconds, self._kept, self._every = [], [], 1
        if not counts and self.counted:
            return
        self.counted += counts
        if len(self._seconds) % self._every == 0:
            self._kept.append((done, recorded))
        insort(self._seconds, done.seconds)
        if len(self._kept) > KEPT:
            self._kept, self._every = self._kept[::2], 2 * self._every

    @property
    def steps(self) -> int:
        """How many steps the median is of."""
        return len(self._seconds)

    @property
    def nearest(self) -> tuple[StepDone, StepRecorded] | None:
        """The step, and when its stages did what; None before the first step. Of an even number of steps the median is
        the lower one of the middle."""
        middle = (len(self._seconds) - 1) // 2
        return min(self._kept, key=lambda step: abs(step[0].seconds - self._seconds[middle]), default=None)
