"""Sequences of every length in two tensors: a corpus has hundreds of thousands of short ones.

The paper's Section 5 counts its sentences in billions. A list of lists costs a Python object for each token, is copied
page by page into every loading process, and cannot be stored as it is; two tensors can.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequence i is values[ends[i - 1] : ends[i]].

    values: int32 (tokens,), or uint8 for texts in UTF-8. ends: int64 (sequences,).
    """

    values: Tensor
    ends: Tensor

    @classmethod
    def of_tokens(cls, sequences: Sequence[Sequence[int]]) -> Self:
        """From lists of ids."""
        ends = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64).cumsum(0)
        return cls(torch.from_numpy(np.fromiter(chain.from_iterable(sequences), dtype=np.int32)), ends)

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> Self:
        """From strings."""
        encoded = [text.encode() for text in texts]
        ends = torch.tensor([len(text) for text in encoded], dtype=torch.int64).cumsum(0)
        return cls(torch.from_numpy(np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)), ends)

    @classmethod
    def stored(cls, tensors: Mapping[str, Tensor], name: str) -> Self:
        """What `to_store` made."""
        return cls(tensors[name], tensors[f"{name}.ends"])

    def to_store(self, name: str) -> dict[str, Tensor]:
        """Named tensors, for a cache."""
        return {name: self.values, f"{name}.ends": self.ends}

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> Tensor:
        """int64 (sequences,)."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    def lengths_of(self, indices: Tensor) -> Tensor:
        """int64 (n,): the lengths of sequences `indices`; those of the others are not computed."""
        starts = self.ends[indices - 1].masked_fill_(indices == 0, 0)  # index -1 reads the last end; it is not used
        return self.ends[indices] - starts

    def text(self, index: int) -> str:
        """Sequence `index` of texts."""
        start = int(self.ends[index - 1]) if index > 0 else 0
        return self.values[start : int(self.ends[index])].numpy().tobytes().decode()

    def texts(self) -> list[str]:
        """All of them."""
        content, ends = self.values.numpy().tobytes(), self.ends.tolist()
        return [content[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=True)]

    def chosen(self, indices: Tensor) -> "Ragged":
        """The sequences `indices` (int64), in that order."""
        lengths = self.lengths[indices]
        ends = lengths.cumsum(0)
        shifts = (self.ends[indices] - ends).repeat_interleave(lengths)
        return Ragged(self.values[torch.arange(len(shifts)) + shifts], ends)

    def padded(self, indices: Tensor, width: int, padding: int) -> Tensor:
        """int64 (n, width): the sequences `indices` (int64 (n,)), each no longer than `width`."""
        lengths = self.lengths_of(indices)
        assert bool((lengths <= width).all()), (lengths, width)
        columns = torch.arange(width)
        positions = (self.ends[indices] - lengths)[:, None] + columns
        tokens = self.values[positions.clamp_(max=len(self.values) - 1)].to(torch.int64)
        return tokens.masked_fill_(columns >= lengths[:, None], padding)
