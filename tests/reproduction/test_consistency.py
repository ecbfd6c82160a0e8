"""The same training with several numbers of partitions: what is compared, and what is said when something differs."""

from pathlib import Path

import pytest
import torch
from recipe_runs import TINY, column, experiment, real_runner

from gpipe_cli.reproduction.experiments.consistency import compare_runs
from gpipe_cli.reproduction.last_tensors import DIGITS, digest, last_tensors
from gpipe_cli.reproduction.recipe import read_recipe
from gpipe_cli.reproduction.runner import Findings, keep_last


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Findings, Path]:
    folder = tmp_path_factory.mktemp("consistency")
    small = (*TINY, "dataset.classes=[0,1]", "max_steps=2", "micro_batches=3")
    settings = keep_last((*read_recipe("consistency").small.settings, *small))
    what = experiment("consistency", partitions=[1, 3], seeds=[0, 1])
    return what(real_runner("consistency", folder, *settings)), folder


def test_partitions_change_nothing_and_seeds_do(found: tuple[Findings, Path]) -> None:
    findings, folder = found
    runs, spread = findings.tables
    assert list(zip(column(runs, "K"), column(runs, "seed"), strict=True)) == [("1", "0"), ("3", "0"), ("1", "1")]
    assert column(runs, "losses of all steps", "measured") == ["-", "as in row 1", "others"]
    one, three, other = column(runs, "SHA-256 of weights", "measured")
    assert one == three != other
    assert one == digest(last_tensors(folder / "partitions_1_seed_0"))[:DIGITS]
    partitions, seeds = column(spread, "loss", "measured")
    assert float(partitions) == 0 < float(seeds)
    said = dict(findings.notes)
    assert said["losses"] == "those of all 2 steps are the same bits with K = 1, 3"
    tensors = last_tensors(folder / "partitions_3_seed_0")
    assert said["weights"] == f"all {len(tensors):,} tensors of the last checkpoint are the same bits with K = 1, 3"
    assert said["curves"] == f"tensorboard --logdir {folder}"


def test_what_differs_is_said(found: tuple[Findings, Path]) -> None:
    """The run with another seed in the place of one with another number of partitions."""
    _, folder = found
    first, other = folder / "partitions_1_seed_0", folder / "partitions_1_seed_1"
    said = compare_runs([(1, 0), (3, 0), (1, 1)], [first, other, other], folder).notes
    assert ("losses", "K = 3: of 2 steps, some losses differ from those with K = 1") in said
    (weights,) = (line for label, line in said if label == "weights")
    assert weights.startswith("K = 3: ")
    assert f"of {len(last_tensors(first))} tensors differ" in weights


def test_digests_are_of_names_types_shapes_and_bits() -> None:
    zeros, square = torch.zeros(2), torch.arange(4.0).reshape(2, 2)  # transposed, its memory is not in order
    others = [{"a": -zeros}, {"b": zeros}, {"a": zeros.reshape(1, 2)}, {"a": zeros.int()}, {"a": square}]
    assert len({digest(tensors) for tensors in ({"a": zeros}, *others)}) == 6
    assert digest({"a": square.T}) == digest({"a": square.T.contiguous()}) != digest({"a": square})
