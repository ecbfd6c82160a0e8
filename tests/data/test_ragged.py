"""Sequences of every length: against lists."""

import pytest
import torch

from gpipe_cli.data.ragged import Ragged

TOKENS = [[5, 6, 7], [], [8], [9, 10, 11, 12], []]
TEXTS = ["", "Grüße", "漢字", "", "x"]


def as_lists(ragged: Ragged) -> list[list[int]]:
    return [part.tolist() for part in ragged.values.split(ragged.lengths.tolist())]


def test_tokens() -> None:
    ragged = Ragged.of_tokens(TOKENS)
    assert ragged.values.dtype == torch.int32
    assert len(ragged) == 5
    assert as_lists(ragged) == as_lists(Ragged.stored(ragged.to_store("x"), "x")) == TOKENS


def test_padded_to_the_width() -> None:
    padded = Ragged.of_tokens(TOKENS).padded(torch.tensor([3, 0, 4, 0]), 4, -100)
    assert padded.dtype == torch.int64
    assert padded.tolist() == [[9, 10, 11, 12], [5, 6, 7, -100], [-100] * 4, [5, 6, 7, -100]]
    with pytest.raises(AssertionError):
        Ragged.of_tokens(TOKENS).padded(torch.tensor([3]), 3, 0)


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [3, 0], [1], [2, 2, 4], []])
def test_chosen(chosen: list[int]) -> None:
    assert as_lists(Ragged.of_tokens(TOKENS).chosen(torch.tensor(chosen, dtype=torch.int64))) == [
        TOKENS[index] for index in chosen
    ]


def test_texts() -> None:
    ragged = Ragged.of_texts(TEXTS)
    assert ragged.texts() == TEXTS
    assert [ragged.text(index) for index in range(5)] == TEXTS
