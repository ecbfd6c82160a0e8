"""Random tokens: a function of (seed, index), consistent between inputs and targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gpipe_cli.data.synthetic_text import SyntheticText, make_synthetic_text
from gpipe_cli.data.vocabulary import BEGIN, UNKNOWN


def make(**settings: Any) -> tuple[SyntheticText, SyntheticText]:
    defaults = {"length": 16, "vocabulary": 50, "pairs": False, "train_samples": 40, "test_samples": 3, "seed": 0}
    return make_synthetic_text(**{**defaults, **settings})


def test_targets_are_the_next_tokens() -> None:
    train, test = make()
    assert (len(train), len(test)) == (40, 3)
    assert train.catalogue.samples == 40
    assert train.catalogue.fixed_lengths == (16,)
    (inputs,) = train.inputs([(0, index) for index in range(40)], (16,))
    targets = train.targets_of(torch.arange(40), (16,))
    assert inputs.shape == targets.shape == (40, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert int(inputs.min()) == UNKNOWN + 1
    assert int(inputs.max()) == 49
    assert torch.equal(train.predicted(), targets.flatten())


def test_pairs_begin_with_begin() -> None:
    train, _ = make(pairs=True)
    assert train.catalogue.fixed_lengths == (16, 16)
    sources, so_far = train.inputs([(0, 4), (0, 2)], (16, 16))
    targets = train.targets_of(torch.tensor([4, 2]), (16, 16))
    assert sources.shape == so_far.shape == targets.shape == (2, 16)
    assert so_far[:, 0].tolist() == [BEGIN, BEGIN]
    assert torch.equal(so_far[:, 1:], targets[:, :-1])
    assert not torch.equal(sources, targets)


def test_made_from_seed_and_index() -> None:
    train, test = make()
    (batch,) = train.inputs([(0, 5), (0, 6)], (16,))
    assert torch.equal(batch[1], make()[0].inputs([(3, 6)], (16,))[0][0])  # the epoch changes nothing
    assert not torch.equal(batch[0], batch[1])
    assert not torch.equal(batch[0], test.inputs([(0, 5)], (16,))[0][0])
    assert not torch.equal(batch[0], make(seed=1)[0].inputs([(0, 5)], (16,))[0][0])


@pytest.mark.parametrize("setting", ["train_samples", "test_samples"])
def test_no_samples(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"^dataset\.{setting}=0: must be 1 or more$"):
        make(**{setting: 0})


def test_too_few_ids() -> None:
    with pytest.raises(ValueError, match=r"^dataset\.vocabulary=4: ids 0 to 3 are special; use [^\n]*=5 or more$"):
        make(vocabulary=4)
    assert (make(vocabulary=5)[0].predicted() == 4).all()
