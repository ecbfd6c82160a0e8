"""Several pipelines that share every mini-batch: K does not matter at the same R, and R only for the order of sums."""

from pathlib import Path

import pytest
import torch
from training_runs import LIVELY_SMALL, NAMED, SMALL, assert_same_tensors, command, configure, final_tensors, train_here

from gpipe_cli.data.batches import MiniBatches, SplitIndex
from gpipe_cli.data.micro_batches import micro_batch_sizes, shard_of
from gpipe_cli.results.files import read_result
from gpipe_cli.training.checkpoint.files import read_index, read_tensors

# mini-batches of 8, 8 and 6 samples in pieces of 2, 2 | 2, 2 and 2, 2 | 1, 1
SETTINGS = [
    *SMALL,
    *LIVELY_SMALL,
    "micro_batches=2",
    "replicas=2",
    "epochs=2",
    "checkpoint.keep=9",
    "checkpoint.every_steps=1",
]


def test_cuts_do_not_matter_and_nothing_is_lost(tmp_path: Path) -> None:
    """With dropout, batch norm, clipping and averages: one process for each replica, two for each of stages that are
    not adjacent, stopped after four steps and resumed with another cut: the same bits. After one step the weights equal
    those of one pipeline with as many micro-batches, except for the order in which gradients were summed."""

    def run(name: str, *settings: str) -> dict[str, torch.Tensor]:
        assert command("train", *settings, f"run_folder={tmp_path / name}") == 0
        return final_tensors(tmp_path / name)

    whole = run("whole", *SETTINGS, "partitions=1")
    # with two micro-batches, the two gradients have one sum in either order
    interleaved = ["schedule=interleaved", "partitions=4", "stages_per_process=2"]
    run("begun", *SETTINGS, *interleaved, "max_steps=4")
    other_cut = ["partitions=3", "schedule=gpipe", "stages_per_process=null", "executor=in_process"]
    assert_same_tensors(run("ended", f"resume={tmp_path / 'begun'}", NAMED, *other_cut), whole)

    alone = ["partitions=1", "max_steps=1", "replicas=1", "micro_batches=4", "executor=in_process"]
    train_here(configure(*SETTINGS, *alone), tmp_path / "one")
    one, after_one_step = final_tensors(tmp_path / "one"), tmp_path / "whole" / "checkpoints" / "step_00000001"
    several = read_tensors(after_one_step, read_index(after_one_step).layers, ("model", "optimizer", "ema"))
    for name in ("running_mean", "running_var", "num_batches_tracked", "square_avg"):
        for key in (key for key in one if name in key):
            torch.testing.assert_close(several[key], one[key], rtol=1e-5, atol=1e-9, msg=key)


def test_replicas_without_samples(tmp_path: Path) -> None:
    """A mini-batch may have fewer samples than there are replicas: the last one of a test set, one cut by tokens in
    training and in a test, and the hypotheses that still grow in a decoding. The replicas without samples ran an empty
    schedule, which did not know its number of stages, and the run was lost after its first epoch."""
    images = [*SMALL, "dataset.drop_last=true", "dataset.test_samples=9", "batch_size=8"]  # tests: 8, then 1 sample
    sentences = [("aba ba", "ba"), ("ab", "ab ba"), ("b", "a"), ("ba ba ab", "ab"), ("a", "b b")]
    for name in ("train", "test"):
        lines = [f"{source}\t{target}\tde-en" for source, target in sentences]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    translation = [
        "~presets", "model=transformer_nmt", "dataset=parallel_text", f"dataset.root={tmp_path}", "threads=1",
        f"dataset.cache={tmp_path / 'cache'}", "dataset.vocabulary=270", "model.layers=1", "model.width=8",
        "model.hidden=8", "model.heads=1", "model.length=16", "batch_size=null", "batch_tokens=5", "device=cpu",
    ]  # fmt: skip
    for task, settings, named in (("images", images, [NAMED]), ("translation", translation, [])):
        pipeline = ["partitions=1", "micro_batches=1", "epochs=1", "replicas=3"]
        folder = tmp_path / task
        assert command("train", *settings, *pipeline, f"run_folder={folder}") == 0
        tested = read_result(folder)["test"]["loss"]
        assert command("evaluate", f"run={folder}", *named, "checkpoint=last", "partitions=1") == 0
        assert tested == pytest.approx(read_result(folder, "evaluate.json")["loss"], rel=1e-5)


@pytest.mark.parametrize("samples", [1, 5, 22])
def test_shares_are_the_pieces_of_one_pipeline(samples: int) -> None:
    for replicas, micro_batches in ((2, 1), (3, 4)):
        shares = [shard_of(samples, micro_batches, replicas, replica) for replica in range(replicas)]
        pieces = [size for share in shares for size in share.sizes]
        assert tuple(pieces) == micro_batch_sizes(samples, replicas * micro_batches)
        assert max(len(share.sizes) for share in shares) <= micro_batches
        for share in shares:
            assert share.first_sample == sum(pieces[: share.first_micro_batch])
        batches = [
            MiniBatches(SplitIndex(samples), batch_size=samples, seed=0, shuffle=True, micro_batches=micro_batches,
                        replicas=replicas, replica=replica) for replica in range(replicas)
        ]  # fmt: skip
        read = torch.cat([one.indices(0, 0)[one.shard(0, 0).samples] for one in batches])
        assert torch.equal(read, batches[0].indices(0, 0))
