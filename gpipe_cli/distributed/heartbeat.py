"""Detects, under torchrun, that processes on other machines are lost, even in the middle of a step.

A lost machine sends nothing, and a GPU waits for it forever. So the supervisor of each process increments a counter in
torchrun's store, in a thread, and checks that the others' counters change.
"""

import threading
import time
from datetime import timedelta

import torch.distributed as dist

from gpipe_cli.distributed.torchrun_env import Torchrun, store_address

_MAX_INTERVAL_SECONDS = 5.0  # the longest interval between two beats
_SLICE_SECONDS = 0.5  # the longest sleep within a wait
_MAX_GAP_SECONDS = 2.0  # longer gaps between calls of `find_lost` count as this: after Ctrl-Z and fg no process is lost
_ENDED, _FAILED = "ended", "failed"
_NOTHING = b""  # the counter of a process before its first beat


class Heartbeat:
    """Beats until `stop`. `start`: the name of this start; a process that is silent for `limit_seconds` is lost."""

    def __init__(self, torchrun: Torchrun, start: str, limit_seconds: float) -> None:
        self._keys = [f"{start}/heartbeat/{rank}" for rank in range(torchrun.world_size)]
        self._rank, self._limit = torchrun.rank, limit_seconds
        self._interval = min(_MAX_INTERVAL_SECONDS, limit_seconds / 4)
        self._silent = dict.fromkeys(range(torchrun.world_size), 0.0)  # seconds without a beat while this process ran
        self._failed: int | None = None
        self._error: Exception | None = None  # that has ended the thread
        self._answered = self._asked = time.monotonic()  # when the store answered, and `find_lost` was called, last
        self._unanswered = 0.0  # seconds for which the store has not answered
        self._limit_shortened = False
        self._ending = threading.Event()
        self._last = _ENDED
        self._thread = threading.Thread(target=self._run, name="gpipe-heartbeat", daemon=True)
        self._thread.start()

    def find_lost(self) -> tuple[int, float | None] | None:
        """The rank of a lost process, and its seconds of silence, None if it has reported its failure itself. If the
        store does not answer, rank 0 is lost. None: no process is lost. Raises RuntimeError if this thread fails."""
        if self._error is not None:
            raise RuntimeError("the heartbeat of this process has failed") from self._error
        asked, answered = time.monotonic(), self._answered
        if answered > self._asked:
            self._unanswered = 0.0
        self._unanswered += min(asked - max(self._asked, answered), _MAX_GAP_SECONDS)
        self._asked = asked
        if self._failed is not None:
            return self._failed, None
        if self._unanswered > self._limit:
            return 0, self._unanswered
        rank = max(self._silent, key=self._silent.__getitem__)
        return (rank, self._silent[rank]) if self._silent[rank] > self._limit else None

    def shorten_limit(self) -> float:
        """Called when some process is known to be lost, but not which: beats more often, and allows for two missed
        beats. Returns the seconds after which nothing more will be found."""
        self._limit_shortened = True
        self._limit = min(self._limit, 2.2 * self._interval)
        return self._limit + _MAX_GAP_SECONDS

    def stop(self, *, failed: bool) -> None:
        self._last = _FAILED if failed else _ENDED
        self._ending.set()
        self._thread.join(_MAX_GAP_SECONDS)  # a thread in a call of the store when Python ends aborts the process

    def _run(self) -> None:
        seen = [_NOTHING] * len(self._keys)
        beat = 0
        looked_at = time.monotonic()
        try:
            # a separate connection: a call that blocks holds up all others on the same connection
            store = dist.TCPStore(*store_address(), is_master=False, wait_for_workers=False,
                                  timeout=timedelta(seconds=self._limit))  # fmt: skip
            while not self._ending.wait(min(_SLICE_SECONDS, self._interval)):
                if not self._limit_shortened and time.monotonic() - looked_at < self._interval:
                    continue
                beat += 1
                store.set(self._keys[self._rank], str(beat))
                if _NOTHING in seen:
                    values = [store.get(key) if store.check([key]) else _NOTHING for key in self._keys]
                else:
                    values = store.multi_get(self._keys)
                answered = self._answered = time.monotonic()
                passed = min(answered - looked_at, 2 * self._interval)
                looked_at = answered
                for rank, (value, before) in enumerate(zip(values, seen, strict=True)):
                    alive = value != before or value.decode() == _ENDED
                    self._silent[rank] = 0.0 if alive else self._silent[rank] + passed
                    if value.decode() == _FAILED:
                        self._failed = rank
                seen = values
            store.set(self._keys[self._rank], self._last)
        except dist.DistError:  # the store does not answer: `find_lost` will report it
            return
        except Exception as error:
            self._error = error
