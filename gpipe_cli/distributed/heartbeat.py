"""Under torchrun: whether the processes on other machines are still there, also in the middle of a step.

A lost machine says nothing, and a GPU waits for it without end. So the supervisor of each process counts on in
torchrun's store, in a thread, and looks whether the others do.
"""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from gpipe_cli.distributed.torchrun import Torchrun, store_address

_MOST_SECONDS = 5.0  # between two looks
_ENDED = "ended"


class Heartbeat:
    """From here to `stop`; `start` is the name of this start of all processes."""

    def __init__(self, started: Torchrun, start: str, limit_seconds: float) -> None:
        self._keys = [f"{start}/heartbeat/{process}" for process in range(started.processes)]
        self._rank, self._limit = started.rank, limit_seconds
        self._silent = dict.fromkeys(range(started.processes), 0.0)  # seconds without news, as far as this was awake
        self._looked = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="gpipe-heartbeat", daemon=True).start()

    def lost(self) -> tuple[int, float] | None:
        """The process that has been silent for too long, and its seconds; process 0 where the store is."""
        unanswered = time.monotonic() - self._looked
        if unanswered > self._limit:
            return 0, unanswered
        process = max(self._silent, key=self._silent.__getitem__)
        return (process, self._silent[process]) if self._silent[process] > self._limit else None

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        interval = min(_MOST_SECONDS, self._limit / 4)
        # a connection of its own: a call that waits holds up the others of its connection
        store = dist.TCPStore(*store_address(), is_master=False, wait_for_workers=False,
                              timeout=timedelta(seconds=self._limit))  # fmt: skip
        seen: list[bytes] = []
        beat = 0
        try:
            while not self._ended.wait(interval):
                beat += 1
                store.set(self._keys[self._rank], str(beat))
                values = store.multi_get(self._keys) if store.check(self._keys) else []  # not before all have begun
                now = time.monotonic()
                passed, self._looked = min(now - self._looked, 2 * interval), now
                for process, (value, before) in enumerate(zip(values, seen, strict=False)):
                    news = value != before or value.decode() == _ENDED
                    self._silent[process] = 0.0 if news else self._silent[process] + passed
                seen = values
            store.set(self._keys[self._rank], _ENDED)
        except dist.DistError:  # the store does not answer: `lost` says so in time
            return
