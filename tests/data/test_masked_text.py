"""Windows for a masked language model: what is selected, what replaces it, and that it depends on the seed,
the epoch and the sample alone."""

from types import SimpleNamespace
from typing import Any

import torch

from gpipe_cli.data.masked_text import MaskedText
from gpipe_cli.data.text import SyntheticText, TextSplit
from gpipe_cli.data.vocabulary import END, IGNORED, UNKNOWN

LENGTH, SAMPLES, TOKENS = 40, 2000, 1000
SYNTHETIC = SyntheticText(SAMPLES, LENGTH, TOKENS, seed=1, pairs=False)
SPLIT = MaskedText(SYNTHETIC, seed=3)


def of(split: MaskedText, epoch: int, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    (inputs,) = split.inputs(epoch, indices, (LENGTH,))
    return inputs, split.targets_of(epoch, torch.tensor(indices), (LENGTH,))


def test_what_is_selected_and_what_is_seen() -> None:
    """15 % of each window; of those 80 % are hidden, 10 % another token, 10 % as they were: within 4 deviations."""
    inputs, targets = of(SPLIT, 0, [*range(SAMPLES)])
    (tokens,) = SYNTHETIC.inputs(0, range(SAMPLES), (LENGTH,))
    selected = targets != IGNORED
    assert selected.sum(1).tolist() == [6] * SAMPLES
    assert torch.equal(targets[selected], tokens[selected])
    assert torch.equal(inputs[~selected], tokens[~selected])
    count = int(selected.sum())
    hidden, same = inputs[selected] == UNKNOWN, inputs[selected] == tokens[selected]
    other = ~hidden & ~same
    for found, share in ((hidden, 0.8), (other, 0.1), (same, 0.1)):
        assert abs(int(found.sum()) / count - share) < 4 * (share * (1 - share) / count) ** 0.5
    drawn = inputs[selected][other]
    assert 0 <= int(drawn.min()) < 10
    assert TOKENS - 10 < int(drawn.max()) < TOKENS
    places = selected.sum(0).double()  # no place is preferred
    assert float((places - count / LENGTH).abs().max()) < 4 * (0.15 * 0.85 * SAMPLES) ** 0.5


def test_it_depends_on_seed_epoch_and_sample_alone() -> None:
    inputs, targets = of(SPLIT, 2, [5, 6, 7])
    again = of(MaskedText(SYNTHETIC, seed=3), 2, [7, 5])
    assert torch.equal(again[0], inputs[[2, 0]])
    assert torch.equal(again[1], targets[[2, 0]])
    for epoch, seed, index in ((1, 3, 5), (2, 4, 5)):
        assert not torch.equal(of(MaskedText(SYNTHETIC, seed=seed), epoch, [index])[1], targets[:1])


def test_ends_of_documents_are_not_selected_and_windows_are_full() -> None:
    """Except in a window that has nothing else; 19 tokens are 4 windows of 4, as some of a fifth have no successor."""
    vocabulary: Any = SimpleNamespace(mask=9, end=END, size=30)
    text = MaskedText(TextSplit(torch.tensor([5, END, 6, END] * 4 + [END] * 4, dtype=torch.int32), 4, vocabulary), 0)
    assert text.split_index.samples == 4
    targets = torch.cat([text.targets_of(epoch, torch.arange(4), (4,)) for epoch in range(9)])
    assert {*targets.unique().tolist()} == {IGNORED, 5, 6}
    assert (targets != IGNORED).sum(1).tolist() == [1] * 36
    only = MaskedText(TextSplit(torch.full((9,), END, dtype=torch.int32), 4, vocabulary), 0)
    assert int((only.targets_of(0, torch.arange(2), (4,)) == END).sum()) == 2
