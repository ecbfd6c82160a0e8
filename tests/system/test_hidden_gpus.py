"""While a model is traced no GPU is shown to torch: only workers open GPUs."""

import os
import threading

import pytest
import torch
from training_runs import SMALL, configure

from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.system.hidden_gpus import hidden_gpus


def test_all_that_asks_cuda_while_a_model_is_traced_is_told_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str | None] = []

    def count() -> int:
        shown.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return 0

    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", count, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    profile_model(configure(*SMALL, "precision=bfloat16", "optimizer=adam", "optimizer.epsilon=0.125"))
    assert shown.count("") == len(shown) > 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


def test_threads_that_trace_at_once_leave_the_gpus_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """One put back what the other had set, and all that the process started afterwards saw no GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    entered, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with hidden_gpus():
            entered.set()
            may_leave.wait(1)

    def second() -> None:
        entered.wait()
        with hidden_gpus():
            may_leave.set()
            one.join(1)

    one, other = threading.Thread(target=first), threading.Thread(target=second)
    for thread in (one, other):
        thread.start()
    for thread in (one, other):
        thread.join()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
