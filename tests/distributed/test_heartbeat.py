"""A process on another machine that stops, fails or never begins is found, one that has ended is not missed."""

import multiprocessing
import os
import signal
import time

import pytest
from torch.distributed import TCPStore
from training_runs import wait_until

from gpipe_cli.distributed.heartbeat import Heartbeat
from gpipe_cli.distributed.torchrun_env import Torchrun

LIMIT = 1.0  # seconds


def beats(rank: int) -> Heartbeat:
    """One of four processes."""
    return Heartbeat(Torchrun(rank, 4, 1, 0), "start", LIMIT)


def beat_on() -> None:
    beats(2)
    time.sleep(100)


def test_who_stops_is_found_and_who_has_ended_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(shared.port))
    other = multiprocessing.get_context("fork").Process(target=beat_on)
    other.start()
    alone = Heartbeat(Torchrun(0, 2, 1, 0), "another start", LIMIT / 2)
    own = None
    try:
        process, _ = wait_until(alone.find_lost, 20, "that the other one never begins")
        assert process == 1
        wait_until(lambda: shared.check(["start/heartbeat/2"]), 20, "the other process")
        own, ends, fails = (beats(rank) for rank in (0, 1, 3))
        ends.stop(failed=False)
        until = time.monotonic() + 2 * LIMIT
        while time.monotonic() < until:
            assert own.find_lost() is None
            time.sleep(0.05)
        assert other.pid is not None
        os.kill(other.pid, signal.SIGSTOP)
        process, seconds = wait_until(own.find_lost, 20, "that the other one was stopped")
        assert (process, seconds > LIMIT) == (2, True)
        fails.stop(failed=True)
        wait_until(lambda: own.find_lost() == (3, None), 20, "that one to report its failure")
    finally:
        for heartbeat in filter(None, (alone, own)):
            heartbeat.stop(failed=False)
        other.kill()
        other.join()


def test_whoever_is_blamed_has_not_kept_this_process_from_beating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 was, for whatever error here."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "http")
    unable = beats(1)
    with pytest.raises(RuntimeError, match="heartbeat") as raised:
        wait_until(unable.find_lost, 20, "an error")
    assert isinstance(raised.value.__cause__, ValueError)
    unable.stop(failed=True)
