"""A process on another machine that stops, fails or never begins is found, one that has ended is not missed."""

import os
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed import TCPStore

from gpipe_cli.distributed.heartbeat import Heartbeat
from gpipe_cli.distributed.torchrun import Torchrun

OTHER = """
import time
from gpipe_cli.distributed.heartbeat import Heartbeat
from gpipe_cli.distributed.torchrun import Torchrun

heartbeat = Heartbeat(Torchrun(2, 4, 1, 0), "start", 2.0)
time.sleep(100)
"""


def test_who_stops_is_found_and_who_has_ended_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(shared.port))
    other = subprocess.Popen([sys.executable, "-c", OTHER])
    own = Heartbeat(Torchrun(0, 2, 1, 0), "another start", 1.0)

    def wait(seconds: float) -> tuple[int, float | None] | None:
        until = time.monotonic() + seconds
        while (found := own.lost()) is None and time.monotonic() < until:
            time.sleep(0.05)
        return found

    try:
        never_begins = wait(20)
        assert never_begins is not None
        assert never_begins[0] == 1
        own.stop(failed=False)
        while not shared.check(["start/heartbeat/2"]):
            time.sleep(0.05)
        own, ends, fails = (Heartbeat(Torchrun(rank, 4, 1, 0), "start", 2.0) for rank in (0, 1, 3))
        ends.stop(failed=False)
        assert wait(4) is None
        os.kill(other.pid, signal.SIGSTOP)
        found = wait(20)
        assert found is not None
        assert found[0] == 2
        assert found[1] is not None
        assert found[1] > 2
        fails.stop(failed=True)
        until = time.monotonic() + 20
        while (found := own.lost()) != (3, None) and time.monotonic() < until:
            time.sleep(0.05)
        assert found == (3, None)
    finally:
        own.stop(failed=False)
        other.kill()
        other.wait()
