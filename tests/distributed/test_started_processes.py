"""The variables that torchrun, or SLURM's srun, gives the processes that it starts."""

import signal

import pytest

from gpipe_cli.distributed.rendezvous import store
from gpipe_cli.distributed.torchrun import Torchrun, torchrun


def test_a_process_that_srun_starts_alone_is_a_command_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a shell of an allocation SLURM's numbers are set, too, and say nothing of other processes."""
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_LOCALID", "1")
    assert torchrun() is None
    for name, value in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "node7")):
        monkeypatch.setenv(name, value)
    assert torchrun() == Torchrun(rank=1, processes=4, here=2, local_rank=1)
    monkeypatch.setenv("RANK", "2")  # started by torchrun in the shell
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
