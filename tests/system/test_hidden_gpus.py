"""While a model is traced no GPU is shown to torch: only workers open GPUs."""

import os

import pytest
import torch
from training_runs import SMALL, configure

from gpipe_cli.planner.model_profile import profile_model


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
