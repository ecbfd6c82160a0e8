"""The variables that torchrun gives the processes that it starts."""

import re
import signal
import socket
from collections.abc import Iterator

import pytest
from training_runs import SMALL, command

from gpipe_cli.distributed import rendezvous
from gpipe_cli.distributed.rendezvous import store
from gpipe_cli.distributed.torchrun_env import Torchrun, limit_waits, read_torchrun_env


def test_the_processes_of_torchrun_know_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's numbers do not count: they are also set in an allocation's shell."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert read_torchrun_env() is None
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "node7"), ("RANK", "2")):
        monkeypatch.setenv(name, value)
    assert read_torchrun_env() == Torchrun(rank=2, world_size=4, local_world_size=2, local_rank=0)


def test_waiting_for_process_0_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the store's own wait, for 15 minutes, signals had no effect: SLURM's warning came to nothing."""
    monkeypatch.setenv("MASTER_PORT", "1")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            store()
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def left_over(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The variables of another program, in two processes; a message names a wait immediately."""
    store.cache_clear()
    monkeypatch.setattr(rendezvous, "_REPORT_AFTER_SECONDS", 0)
    monkeypatch.setattr("gpipe_cli.cli.RANK_ZERO_GRACE_SECONDS", 0)
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", port)):
        monkeypatch.setenv(name, value)
    yield port
    store.cache_clear()


@pytest.mark.parametrize(("rank", "whom"), [("0", "process 1 of 2"), ("1", "process 0")])
@pytest.mark.parametrize("name", ["train", "evaluate"])
def test_variables_that_another_program_has_left_are_named(
    name: str, rank: str, whom: str, left_over: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For 15 minutes nothing was printed, and nothing happened: no process comes."""
    settings = [*SMALL, "partitions=2", "executor=distributed", "hardware=cpu", "max_steps=1"]
    if name == "evaluate":
        with monkeypatch.context() as patch:
            patch.delenv("WORLD_SIZE")
            assert command("train", *settings, "run_folder=run") == 0
        settings = ["run=run", "model.target=custom_models:small"]
    monkeypatch.setenv("RANK", rank)
    capfd.readouterr()
    assert command(name, *settings, "timeout_seconds=0.5") == 1
    variables = f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={left_over}: .* unset them"
    said = capfd.readouterr().err
    assert re.search(rf"^waiting for {whom}, at most 0\.5 s \(timeout_seconds\); {variables}$", said, re.MULTILINE)
    assert re.search(rf"^gpipe {name}: .*no answer from {whom} within 0\.5 s; {variables}$", said, re.MULTILINE)


def test_a_command_of_one_process_names_them_too(left_over: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It was told to call gpipe plan, as it had."""
    assert command("plan", *SMALL, "hardware=cpu") == 2
    assert "WORLD_SIZE=2 MASTER_ADDR=localhost" in capfd.readouterr().err


def test_what_listens_and_is_no_store_is_not_waited_for_long(left_over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's store waits for an answer without end, in C++. Process 0 cannot begin a store there."""
    with socket.create_server(("localhost", int(left_over))), limit_waits(0.5):
        with pytest.raises(TimeoutError, match=r"no answer from process 0 within 0\.5 s"):
            store()
        with pytest.raises(ConnectionError, match=f"MASTER_PORT={left_over}: no store answers") as caught:
            store(hosts=True)
    assert "\n" not in str(caught.value)
