"""What is held out of a training set: a fraction of each class, of windows of text, or of the targets of pairs."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from image_files import opened, write_images

from gpipe_cli.config.groups import TextConfig
from gpipe_cli.data.splits import divide
from gpipe_cli.data.text import TextSplit, open_text
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.errors import InvalidSettingError


@pytest.mark.parametrize("share", [0.01, 0.1, 1 / 3, 0.5, 0.97])
@pytest.mark.parametrize("sizes", [(40, 7, 1), (10, 10, 10, 10), (200,), (3, 0, 5)])
def test_a_share_of_each_stratum_is_taken(sizes: tuple[int, ...], share: float) -> None:
    strata = torch.cat([torch.full((size,), number) for number, size in enumerate(sizes)])
    strata = strata[torch.randperm(len(strata), generator=torch.Generator().manual_seed(1))]
    if round(sum(sizes) * share) == 0:
        with pytest.raises(InvalidSettingError, match=r"^dataset\.validation=0\.01: .*dataset\.validation=null"):
            divide(strata, "dataset.validation", share, seed=0)
        return
    staying, taken = divide(strata, "dataset.validation", share, seed=0)
    assert sorted([*staying.tolist(), *taken.tolist()]) == list(range(len(strata)))
    for number, size in enumerate(sizes):
        count = int((strata[taken] == number).sum())
        assert abs(count - size * share) <= 1, number
        assert count < size or size == 0, "some of each class stay"
    again, others, apart = (
        divide(strata, setting, share, seed)[1].tolist()
        for setting, seed in (("dataset.validation", 0), ("dataset.validation", 1), ("dataset.test", 0))
    )
    assert again == taken.tolist()
    assert sum(sizes) == 8 or len(taken) in (1, len(strata) - 1) or taken.tolist() not in (others, apart)


def test_images_are_held_out_by_class(tmp_path: Path) -> None:
    """They are seen as the test images are, without augmentation; what is left is seen as before."""
    for name, count in (("cat", 8), ("dog", 4)):
        for split in ("train", "test"):
            write_images(tmp_path / split / name, *(f"{number}.png" for number in range(count)))
    whole = opened("image_folder", tmp_path, num_classes=2)
    parts = opened("image_folder", tmp_path, num_classes=2, validation=0.25)
    assert parts.validation is not None
    assert Counter(parts.validation.samples.targets.tolist()) == {0: 2, 1: 1}  # type: ignore[attr-defined]
    assert parts.validation.seed is None
    assert len(parts.training.samples.targets) == 9
    paths = [split.samples.pixels.paths for split in (parts.training, parts.validation)]  # type: ignore[attr-defined]
    assert sorted((*paths[0], *paths[1])) == sorted(whole.training.samples.pixels.paths)  # type: ignore[attr-defined]


def test_a_folder_of_classes_is_split_by_a_share(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        write_images(tmp_path / name, *(f"{number}.png" for number in range(10)))
    with pytest.raises(InvalidSettingError, match=r"dataset\.test=0\.2"):
        opened("image_folder", tmp_path, num_classes=2)
    splits = opened("image_folder", tmp_path, num_classes=2, test=0.2, validation=0.25)
    assert [len(split.samples.targets) for _, split in splits.each()] == [12, 4, 4]
    assert splits.test.samples.class_names == ("cat", "dog")
    (tmp_path / "train" / "cat").mkdir(parents=True)
    with pytest.raises(InvalidSettingError, match=r"dataset\.test=null"):
        opened("image_folder", tmp_path, num_classes=2, test=0.2)


def test_windows_of_text_are_held_out(tmp_path: Path) -> None:
    """All others stay as they are; no token is in both."""
    (tmp_path / "text.txt").write_text("".join(f"line {number} of {number * 7}\n" for number in range(900)))
    config = {"vocabulary": 300, "cache": str(tmp_path / "cache"), "root": str(tmp_path / "text.txt")}
    whole = open_text(TextConfig("text_files", **config), length=8, seed=0)
    parts = open_text(TextConfig("text_files", **config, validation=0.1), length=8, seed=0)
    assert isinstance(whole.training, TextSplit)
    assert isinstance(parts.training, TextSplit)
    assert isinstance(parts.validation, TextSplit)
    counts = [split.split_index.samples for split in (whole.training, parts.training, parts.validation)]
    assert counts[0] == counts[1] + counts[2]
    assert counts[2] == round(counts[0] / 10)
    lengths = (8,)
    everything = {tuple(row) for row in whole.training.inputs(0, range(counts[0]), lengths)[0].tolist()}
    for split, count in zip((parts.training, parts.validation), counts[1:], strict=True):
        assert {tuple(row) for row in split.inputs(0, range(count), lengths)[0].tolist()} <= everything
    predicted = [len(split.predicted_tokens()) for split in (whole.training, parts.training, parts.validation)]
    assert predicted[0] == predicted[1] + predicted[2]


def test_no_target_of_pairs_is_in_two_sets(tmp_path: Path) -> None:
    """A sentence in forty languages has a single translation: a pair of it in each set would give it away."""
    lines = [f"wort {number} {kind}\tword {number}\tx{kind}-en" for number in range(60) for kind in range(3)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    config = TextConfig(
        "parallel_text", 300, cache=str(tmp_path / "cache"), root=str(tmp_path / "pairs.tsv"), temperature=1.0,
        validation=0.2,
    )  # fmt: skip
    splits = open_text(config, length=40, seed=0, pairs=True)
    targets = []
    for _, split in splits.each():
        assert isinstance(split, PairSplit)
        targets.append({*split.pairs.references})
    assert [len(a & b) for a, b in ((targets[0], targets[1]), (targets[0], targets[2]), (targets[1], targets[2]))] == [
        0, 0, 0,
    ]  # fmt: skip
    assert len(targets[2]) == round(0.2 * len(targets[0] | targets[2]))


def test_a_separate_folder_may_be_the_validation_set(tmp_path: Path) -> None:
    for split in ("train", "test", "val"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "text.txt").write_text(f"a text that is for {split} only\n" * 9)
        (tmp_path / f"{split}.tsv").write_text(f"ein Satz zu {split}\ta sentence on {split}\n" * 3)
    config = {"vocabulary": 300, "cache": str(tmp_path / "cache"), "root": str(tmp_path), "validation": "val"}
    splits = open_text(TextConfig("text_files", **config), length=8, seed=0)  # type: ignore[arg-type]
    assert isinstance(splits.validation, TextSplit)
    assert "val only" in splits.validation.vocabulary.decode(splits.validation.tokens.tolist())  # type: ignore[union-attr]
    pairs = open_text(TextConfig("parallel_text", temperature=1.0, **config), length=40, seed=0, pairs=True)  # type: ignore[arg-type]
    assert isinstance(pairs.validation, PairSplit)
    assert {*pairs.validation.pairs.references} == {"a sentence on val"}
    for name in ("test.tsv", "test/text.txt"):
        (tmp_path / name).unlink()
    (tmp_path / "test").rmdir()
    for name in ("text_files", "parallel_text"):
        with pytest.raises(InvalidSettingError, match=r"^dataset\.validation=val: .*test.*dataset\.validation=0\.1"):
            open_text(TextConfig(name, temperature=1.0 if name != "text_files" else None, **config), length=8, seed=0)  # type: ignore[arg-type]
