"""A fork does one thing; it ends with its parent, and all that it has started ends with it."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from training_runs import children, wait_until

from gpipe_cli.system import forked_call
from gpipe_cli.system.forked_call import Fork, map_in_forks

PARENT = """
import os, time
from gpipe_cli.system.forked_call import Fork
def work():
    print(os.getpid(), flush=True)
    time.sleep(60)
Fork(work).wait()
"""


def test_how_it_ended_is_known(capfd: pytest.CaptureFixture[str]) -> None:
    assert Fork(lambda: {"answer": 42}).wait() == ({"answer": 42}, 0)
    assert Fork(lambda: os.kill(os.getpid(), signal.SIGKILL)).wait() == (None, -9)
    assert Fork(lambda: {}["x"]).wait() == (None, 1)
    assert "KeyError: 'x'\n" in capfd.readouterr().err


class SlowStream(io.StringIO):
    def flush(self) -> None:
        time.sleep(0.1)


def test_nothing_is_a_value_too() -> None:
    """A fork that returned None had, by chance, the exit code of its parent's SIGKILL."""

    def return_nothing() -> None:
        sys.stdout = SlowStream()  # flushed at the end of the fork, which its parent does not wait for

    assert Fork(return_nothing).wait() == (None, 0)


@pytest.mark.parametrize("items", [0, 1, 3, 11])
def test_there_are_no_more_forks_than_items(items: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_call, "usable_cores", lambda: 4)
    forks: list[object] = []
    init = Fork.__init__

    def counted(self: Fork[object], *given: object) -> None:
        forks.append(self)
        init(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Fork, "__init__", counted)
    assert map_in_forks(lambda share: [2 * item for item in share], range(items)) == [2 * item for item in range(items)]
    assert len(forks) == min(items, 4)


def test_an_interrupt_ends_all_of_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while `gpipe reproduce` started the thread that shows a log's newest line left the run behind: its end
    was not waited for."""
    monkeypatch.setattr(forked_call, "_KILL_TIMEOUT_SECONDS", 0.3)

    def work() -> None:  # neither it nor its child wants to end
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "new").write_text(str(child.pid))
        (tmp_path / "new").rename(tmp_path / "child")
        time.sleep(60)

    def interrupt_when_running() -> None:
        wait_until((tmp_path / "child").exists, 30, "the child")
        os.kill(os.getpid(), signal.SIGINT)

    @contextmanager
    def interrupted(where: str) -> Iterator[None]:
        if where == "while it begins":
            interrupt_when_running()
        else:
            threading.Thread(target=interrupt_when_running, daemon=True).start()
        yield

    for where in ("while it begins", "while it lasts"):
        (tmp_path / "child").unlink(missing_ok=True)
        forked = Fork(work)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                forked.wait(interrupted(where))
        finally:
            signal.signal(signal.SIGINT, before)
        wait_until(lambda: not _lives((tmp_path / "child").read_text()), 10, f"the end of an interrupt {where}")


def test_an_interrupt_within_a_fork_is_not_lost() -> None:
    """logging has a callback at the end of every fork: Ctrl-C in it was printed as "Exception ignored in", and `gpipe
    reproduce` went on."""
    interrupting = [signal.SIGINT]

    def callback() -> None:
        if interrupting:
            os.kill(os.getpid(), interrupting.pop())

    os.register_at_fork(after_in_parent=callback)  # it stays
    others = children(os.getpid())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Fork(lambda: time.sleep(60))
        assert children(os.getpid()) == others
        assert Fork(lambda: signal.getsignal(signal.SIGINT) is signal.default_int_handler).wait() == (True, 0)
    finally:
        signal.signal(signal.SIGINT, before)


def _lives(process: str) -> bool:
    try:
        return Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_ends_with_a_parent_that_was_killed() -> None:
    """A recipe that was killed left its measurement running for minutes: it has a separate session."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path("/proc", parent.stdout.readline().strip())
        assert child.exists()
        parent.kill()
        wait_until(lambda: not child.exists(), 10, "the fork ends")
