"""Only workers open GPUs: neither the commands that start them nor the fork server between them do."""

import os
import threading
from pathlib import Path

import pytest
import torch
from cuda_calls import COMPILER, counted, counting_library, runtime_library
from training_runs import TINY, configure, train_here

from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.system.hidden_gpus import hidden_gpus

IMAGES = " ".join(setting for setting in TINY[2:] if not setting.startswith("device=")) + " device=cuda"
AMOEBANET = f"{IMAGES} model.normal_cells=3 model.filters=4"
SMALL = f"{IMAGES} model=custom model.target=custom_models:small"
TEXT = (
    "device=cuda model=transformer_lm model.layers=2 model.width=16 model.hidden=32 model.heads=2 model.length=8 "
    "dataset=synthetic_text dataset.vocabulary=50 batch_tokens=null batch_size=8 micro_batches=2"
)
ASKS = """
import custom_models, torch

torch.cuda.is_available()
layers = custom_models.small
"""
needs_compiler = pytest.mark.skipif(
    COMPILER is None or runtime_library() is None, reason="needs a C compiler, and a torch that was built with CUDA"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting_library(tmp_path_factory.mktemp("counting"))


@pytest.mark.slow
@needs_compiler
def test_neither_the_fork_server_nor_a_parent_asks_cuda_while_it_shows_gpus(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe comes last: its commands are forks that trace, which fails if autograd has counted a GPU before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = [*TINY[2:], "model=custom", "model.target=custom_models:small", "optimizer=adam", "max_steps=1"]
    train_here(configure(*own, "executor=in_process"), tmp_path / "trained")
    own, others = counted(
        library, tmp_path, "",
        f"plan {SMALL} partitions=auto precision=bfloat16 optimizer=adam",
        f"train {AMOEBANET} partitions=2 precision=bfloat16",
        f"train {TEXT} partitions=2 precision=bfloat16 optimizer=adam hardware=h100",
        f"train {IMAGES} model=timm model.name=test_resnet optimizer=sgd",
        f"train {SMALL} optimizer=adafactor precision=bfloat16",
        f"bench {TEXT} optimizer=adam cost=measured hardware=h100",
        f"check {SMALL} partitions=2 optimizer=adam",
        "train resume=trained epochs=5 device=cuda",
        "evaluate run=trained checkpoint=last device=cuda",
        "export run=trained checkpoint=last",
        "list models test_res*",
        f"reproduce breakdown scale=smoke {AMOEBANET}",
    )  # fmt: skip
    assert {call for call in own | others if not call.startswith("hidden ")} == set()
    assert others == set()


@needs_compiler
def test_a_fork_server_and_a_parent_that_ask_cuda_are_found(library: Path, tmp_path: Path) -> None:
    (tmp_path / "asks_cuda.py").write_text(ASKS)
    train = f"train {IMAGES} model=custom model.target=asks_cuda:layers hardware=h100"
    own, others = counted(library, tmp_path, "asks_cuda", train)
    assert "cudaGetDeviceCount" in own
    assert others == {"cudaGetDeviceCount"}


def test_all_that_asks_cuda_while_a_model_is_traced_is_told_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[str | None] = []

    def count() -> int:
        shown.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        return 0

    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", count, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    profile_model(configure(*TINY, "precision=bfloat16", "optimizer=adam", "optimizer.epsilon=0.125"))
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
