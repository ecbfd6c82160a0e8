"""The variables that torchrun gives the processes that it starts."""

import signal

import pytest

from gpipe_cli.distributed.rendezvous import store
from gpipe_cli.distributed.torchrun import Torchrun, torchrun


def test_the_processes_of_torchrun_know_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM's numbers, which are set in a shell of an allocation too, say nothing."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert torchrun() is None
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "node7"), ("RANK", "2")):
        monkeypatch.setenv(name, value)
    assert torchrun() == Torchrun(rank=2, processes=4, here=2, local_rank=0)


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
