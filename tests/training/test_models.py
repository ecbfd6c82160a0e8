"""Law 1 for a user's model: K changes no bit of what is learned."""

from pathlib import Path

import torch
from training_runs import TINY, assert_same_tensors, configure, final_tensors, pipeline_of, state_of, train_here

COMMON = [*TINY[2:], "max_steps=2", "executor=in_process", "ema_decay=0.9", "gradient_clipping=1"]


def test_partitions_do_not_matter(tmp_path: Path) -> None:
    """Each layer is a stage: tuples of one, integers that are passed on, a norm that is applied twice and averages all
    mini-batches, one with a hook, a parametrization."""
    settings = [*COMMON, "model=custom", "model.target=custom_models:odd"]
    train_here(configure(*settings, "partitions=1", "recompute=never"), tmp_path / "whole")
    train_here(configure(*settings, "partitions=15", "recompute=always"), tmp_path / "cut")
    whole = final_tensors(tmp_path / "whole")
    assert_same_tensors(final_tensors(tmp_path / "cut"), whole)
    assert all(tensor.isfinite().all() for tensor in whole.values())
    assert int(whole["model/4.norm.num_batches_tracked"]) == 2 * 2


def test_the_seed_decides_a_custom_models_initial_values() -> None:
    settings = [*COMMON, "model=custom", "model.target=custom_models:small", "model.arguments={width: 5}"]
    one, same, other = (
        state_of(pipeline_of(configure(*settings, f"seed={seed}")))["model/1.shift"] for seed in (3, 3, 4)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
