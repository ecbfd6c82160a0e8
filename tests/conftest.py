"""What holds for all tests."""

import pytest
import torch

from gpipe_cli.launch import machine_timing as timing

# One thread in the test process: bit-equality is promised at the same number of threads, and the stages have one.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def machine_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in the test process plan by the figures of hardware=cpu: to time the machine takes seconds for
    each of them. `launch/test_machine_timing.py` and the processes that tests start do time it."""
    monkeypatch.setattr(timing, "machine_rates", lambda config, log=None: None)


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests themselves are started by something that sets torchrun's variables."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
