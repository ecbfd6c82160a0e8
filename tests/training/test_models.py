"""Law 1 for the models that are not ours: timm's, and a user's own; K changes no bit of what is learned."""

from pathlib import Path

import pytest
import torch
from training_runs import TINY, assert_same_tensors, configure, final_tensors, train_here

MODELS = {
    "resnet": ["model=resnet", "model.depth=18", "model.dropout=0.2", "model.drop_path=0.2"],
    "vit": ["model=timm", "model.name=vit_tiny_patch16_224", "dataset.image_size=32", "model.drop_path=0.2"],
}
COMMON = [*TINY[2:], "max_steps=2", "executor=in_process", "ema_decay=0.9", "gradient_clipping=1"]


@pytest.mark.parametrize("model", MODELS)
def test_partitions_do_not_matter(model: str, tmp_path: Path) -> None:
    settings = [*COMMON, *MODELS[model]]
    train_here(configure(*settings, "partitions=1", "recompute=never"), tmp_path / "whole")
    train_here(configure(*settings, "partitions=3", "recompute=always"), tmp_path / "cut")
    whole = final_tensors(tmp_path / "whole")
    assert_same_tensors(final_tensors(tmp_path / "cut"), whole)
    assert all(tensor.isfinite().all() for tensor in whole.values())


def test_what_is_unusual_is_the_same_for_every_cut(tmp_path: Path) -> None:
    """Tuples of one, integers that travel along, a norm that is applied twice and averages all mini-batches, one with a
    hook, a parametrization: each a stage of its own, and all in one."""
    settings = [*COMMON, "model=custom", "model.target=custom_models:odd"]
    train_here(configure(*settings, "partitions=1", "recompute=never"), tmp_path / "whole")
    train_here(configure(*settings, "partitions=15", "recompute=always"), tmp_path / "cut")
    whole = final_tensors(tmp_path / "whole")
    assert_same_tensors(final_tensors(tmp_path / "cut"), whole)
    assert int(whole["model/4.norm.num_batches_tracked"]) == 2 * 2


def test_the_seed_decides_a_custom_models_initial_values(tmp_path: Path) -> None:
    found = []
    settings = ["model=custom", "model.target=custom_models:small", "model.arguments={width: 5}", "max_steps=1"]
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        train_here(configure(*COMMON, *settings, f"seed={seed}"), tmp_path / name)
        found.append(final_tensors(tmp_path / name)["model/1.shift"])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
