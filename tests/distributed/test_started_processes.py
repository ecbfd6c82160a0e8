"""The variables that torchrun, or SLURM's srun, gives the processes that it starts."""

import pytest

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
