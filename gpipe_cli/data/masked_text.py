"""Text for a masked language model, as BERT's (Devlin et al. 2018, section 3.1): some tokens of a window are hidden,
and the model predicts what they were from both sides."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpipe_cli.data.batches import SplitIndex, derive_seed
from gpipe_cli.data.text import SyntheticText, TextSplit
from gpipe_cli.data.vocabulary import IGNORED, UNKNOWN

SELECTED_SHARE = 0.15  # fraction of a window's tokens, rounded to 1 or more
MASKED_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the selected: become the mask token, a random token; others stay


class MaskedText:
    """The full windows of a split. Each epoch hides other tokens; a test is always in epoch 0."""

    def __init__(self, windows: TextSplit | SyntheticText, seed: int) -> None:
        """Raises InvalidSettingError for a tokenizer without a mask token."""
        self.windows, self._seed = windows, seed
        # the ids of the mask token, and of the end of a document, predicted only if a window has too few other tokens;
        # and the number of ids that random tokens are drawn from
        if isinstance(windows, SyntheticText):
            self._mask, self._end, self._size = UNKNOWN, UNKNOWN, windows.vocabulary_size
        else:
            self._mask, self._end, self._size = windows.vocabulary.mask, windows.vocabulary.end, windows.vocabulary.size

    @property
    def split_index(self) -> SplitIndex:
        return SplitIndex.uniform(self.windows.full_windows, (self.windows.length,))

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """A single tensor: int64 (n, length)."""
        return (self._mask_windows(epoch, indices, lengths)[0],)

    def targets_of(self, epoch: int, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, length): the token that was selected, whatever replaces it in the inputs; else IGNORED."""
        return self._mask_windows(epoch, indices.tolist(), lengths)[1]

    def _mask_windows(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        (tokens,) = self.windows.inputs(epoch, indices, lengths)
        targets = torch.full_like(tokens, IGNORED)
        count = max(1, round(SELECTED_SHARE * self.windows.length))
        for row, target, index in zip(tokens, targets, indices, strict=True):
            generator = torch.Generator().manual_seed(derive_seed("mask", self._seed, epoch, index))
            order = torch.rand(len(row), generator=generator) + (row == self._end)
            selected = order.argsort()[:count]
            kinds = torch.rand(count, generator=generator)
            others = torch.randint(self._size, (count,), generator=generator)
            target[selected] = row[selected]
            shown = torch.where(kinds < MASKED_SHARE + RANDOM_SHARE, others, row[selected])
            row[selected] = shown.masked_fill(kinds < MASKED_SHARE, self._mask)
        return tokens, targets
