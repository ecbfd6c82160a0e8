"""Which process of a run does nothing any more: one that was stopped, that hangs, or whose data does not come.

The others soon wait for it without end, so it is the one that does not wait for another process.
"""

import time
from collections.abc import Collection, Mapping

from gpipe_cli.distributed.activity import Activity, Awaited

_MOST_SECONDS = 2.0  # that count between two looks: after Ctrl-Z and fg, or on a laptop that has slept, all were silent


class SilenceTimer:
    """For how long processes have changed nothing, as far as this one was awake to see it."""

    def __init__(self, limit_seconds: float, whole: bool) -> None:
        """`whole`: all processes of the run are looked at. What one waits for may else be elsewhere."""
        self._limit, self._whole = limit_seconds, whole
        self._seen: dict[int, Activity] = {}
        self._seconds: dict[int, float] = {}
        self._looked = time.monotonic()

    def find(self, processes: Mapping[int, Activity], stopped: Collection[int]) -> tuple[int, float] | None:
        """The process that holds up the run, and its seconds, if one has been silent for too long; `stopped` are those
        that were stopped by a signal.

        There is no limit before the first mini-batch is loaded: a vocabulary is learned, a data set fetched.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _MOST_SECONDS), now
        silent: dict[int, float] = {}
        for process, doing in processes.items():
            same = self._seen.get(process) == doing
            self._seen[process] = doing
            self._seconds[process] = self._seconds.get(process, 0.0) + passed if same else 0.0
            has_begun = doing.kind > 0 or doing.awaited == Awaited.DATA
            if self._seconds[process] > self._limit and (has_begun or process in stopped):
                silent[process] = self._seconds[process]
        if not silent:
            return None
        causes = {one for one in silent if processes[one].awaited != Awaited.PROCESS or one in stopped}
        if not causes and not (self._whole and len(silent) == len(processes)):
            return None
        process = max(causes or silent, key=silent.__getitem__)
        return process, silent[process]
