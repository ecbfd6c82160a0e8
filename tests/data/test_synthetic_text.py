"""Random tokens: a function of (seed, index), consistent between inputs and targets."""

import torch

from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.data.text import SyntheticText, open_text
from gpipe_cli.data.vocabulary import BEGIN, UNKNOWN


def make(seed: int = 0, *, pairs: bool = False) -> tuple[SyntheticText, SyntheticText]:
    config = TextConfig("synthetic_text", vocabulary=50, train_samples=40, test_samples=3)
    return open_text(config, length=16, pairs=pairs, seed=seed)  # type: ignore[return-value]


def test_targets_are_the_next_tokens() -> None:
    train, test = make()
    assert (train.catalogue.samples, test.catalogue.samples) == (40, 3)
    (inputs,) = train.inputs(0, range(40), (16,))
    targets = train.targets_of(torch.arange(40), (16,))
    assert inputs.shape == targets.shape == (40, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (int(inputs.min()), int(inputs.max())) == (UNKNOWN + 1, 49)


def test_pairs_begin_with_begin() -> None:
    train, _ = make(pairs=True)
    assert train.catalogue.lengths[3].tolist() == [16, 16]  # type: ignore[index]
    sources, so_far = train.inputs(0, [4, 2], (16, 16))
    targets = train.targets_of(torch.tensor([4, 2]), (16, 16))
    assert sources.shape == so_far.shape == targets.shape == (2, 16)
    assert so_far[:, 0].tolist() == [BEGIN, BEGIN]
    assert torch.equal(so_far[:, 1:], targets[:, :-1])
    assert not torch.equal(sources, targets)


def test_made_from_seed_and_index() -> None:
    train, test = make()
    (batch,) = train.inputs(0, [5, 6], (16,))
    assert torch.equal(batch[1], make()[0].inputs(3, [6], (16,))[0][0])  # the epoch changes nothing
    for other, index in ((train, 6), (test, 5), (make(seed=1)[0], 5)):
        assert not torch.equal(batch[0], other.inputs(0, [index], (16,))[0][0])
