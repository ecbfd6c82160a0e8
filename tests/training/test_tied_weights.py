"""Tied weights in whole trainings: one weight, wherever its layers are and however the run is resumed."""

from pathlib import Path

import pytest
import torch
from plan_runs import plan_of
from safetensors.torch import load_file
from training_runs import assert_same_tensors, command, configure, final_tensors, pipeline_of, train_here

import gpipe_cli
from gpipe_cli.planner.model_profile import profile_model

SETTINGS = [
    "model=transformer_nmt", "dataset=synthetic_text", "dataset.vocabulary=40", "dataset.train_samples=22",
    "dataset.test_samples=10", "model.layers=1", "model.width=8", "model.hidden=12", "model.heads=2",
    "model.head_width=3", "model.length=12", "model.dropout=0.2", "model.shared_embedding=false",
    "model.share_vocabularies=true", "model.tie_embeddings=true", "batch_size=8", "micro_batches=3", "threads=1",
    "device=cpu", "logger=[]", "epochs=2", "ema_decay=0.9", "gradient_clipping=0.5", "optimizer.weight_decay=0.1",
    "checkpoint.every_steps=2",
]  # fmt: skip
NAMES = ("embedding.weight", "target_embedding.weight", "softmax.logits.weight")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train_here(configure(*SETTINGS, "partitions=1", "schedule=1f1b"), folder)
    return folder


def test_a_checkpoint_has_the_weight_once_and_any_cut_resumes_it(whole: Path, tmp_path: Path) -> None:
    """Clipping, weight decay, optimizer and average count it once: with its layers on one to three stages, the bits are
    those of one partition."""
    saved = final_tensors(whole)
    for kind in ("model", "ema"):
        assert [name for name in NAMES if f"{kind}/{name}" in saved] == ["embedding.weight"]
    assert sum(name.startswith("optimizer/") and name.split("/")[1] in NAMES for name in saved) == 3  # Adam's state
    half = tmp_path / "half"
    train_here(configure(*SETTINGS, "partitions=3", "executor=in_process", "schedule=1f1b", "max_steps=2"), half)
    cut = ["partitions=4", "executor=distributed", "schedule=interleaved", "stages_per_process=2"]
    assert command("train", f"resume={half}", *cut, "max_steps=null", f"run_folder={tmp_path / 'on'}") == 0
    assert_same_tensors(final_tensors(tmp_path / "on"), saved)


def test_a_loaded_model_is_tied(whole: Path) -> None:
    model = gpipe_cli.load(whole, averaged=False)
    first, *others = map(model.get_parameter, NAMES)
    assert all(other is first for other in others)
    assert torch.equal(first, final_tensors(whole)["model/embedding.weight"])


def test_an_exported_file_has_the_weight_once(whole: Path, tmp_path: Path) -> None:
    """And the model that is built from it gives the run's loss (`evaluate`); safetensors refuses two names for one."""
    file = tmp_path / "model.safetensors"
    assert command("export", f"run={whole}", f"file={file}") == 0
    assert len([name for name in NAMES if name in load_file(file)]) == 1


def test_a_tied_weight_counts_once() -> None:
    """Parameters, trained ones and the plan's bytes; a stage with one use has the weight, and buffers for the gradients
    of the others."""
    tied = configure(*SETTINGS, "partitions=2")
    apart = configure(*SETTINGS, "model.share_vocabularies=false", "model.tie_embeddings=false")
    both = profile_model(tied), profile_model(apart)
    matrix = 40 * 8
    counts = [sum(weights.parameters for weights in profile.weights) for profile in both]
    assert counts[1] - counts[0] == 2 * matrix
    planned = plan_of(tied, both[0])
    assert planned.parameters == counts[0]
    assert [(tie.name, tie.stages, tie.bytes) for tie in planned.ties] == [("embedding.weight", (0, 1), 4 * matrix)]
    (weight,) = both[0].tied
    assert weight.weight_bytes == weight.gradient_bytes == 4 * matrix


def test_a_frozen_use_freezes_all() -> None:
    engine = pipeline_of(configure(*SETTINGS, "partitions=3", "executor=in_process", "freeze=[softmax]"))
    for k, stage in engine.stages.items():
        named = dict(stage.module.named_parameters())
        assert all(not named[name].requires_grad for name in NAMES if name in named), k
