"""The splits of a data set: training, test and optionally a validation set, which chooses the best weights.

The paper does not tell on what its checkpoints were chosen. Chosen on the test set, a score is too high.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from gpipe_cli.config.settings import SplitName
from gpipe_cli.data.batches import derive_seed
from gpipe_cli.errors import InvalidSettingError

T = TypeVar("T")
U = TypeVar("U")


class Splits(NamedTuple, Generic[T]):
    """Something of each split of a data set. Without a validation set, the test set chooses the best weights."""

    training: T
    test: T
    validation: T | None = None

    def each(self) -> Iterator[tuple[SplitName, T]]:
        """The splits that there are, with their names in messages."""
        yield "training", self.training
        yield "test", self.test
        if self.validation is not None:
            yield "validation", self.validation

    def map(self, function: Callable[[T], U]) -> "Splits[U]":
        return Splits(*(function(part) for _, part in self.each()))


def divide(strata: Tensor | int, setting: str, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """The indices, int64 and ascending, of the samples that stay in a set, and of those that `setting` takes out: the
    fraction `share` of each stratum, as nearly as whole samples allow, but never all of it.

    strata: int64 (n,), the stratum of each sample, such as its class; or n, if all are alike. seed: of the run; another
    setting draws other samples. Raises InvalidSettingError if no sample is taken.
    """
    if isinstance(strata, int):
        strata = torch.zeros(strata, dtype=torch.int64)
    shuffled = torch.randperm(len(strata), generator=torch.Generator().manual_seed(derive_seed(setting, seed)))
    by_stratum = shuffled[strata[shuffled].argsort(stable=True)]
    sizes = strata.bincount()
    rank = torch.arange(len(strata)) - (sizes.cumsum(0) - sizes)[strata[by_stratum]]
    # rounded so that their sum is rounded only once
    quotas = (sizes.cumsum(0) * share).round().long().diff(prepend=torch.tensor([0]))
    held_out = torch.zeros(len(strata), dtype=torch.bool)
    held_out[by_stratum] = rank < quotas.minimum((sizes - 1).clamp(min=0))[strata[by_stratum]]
    if not held_out.any():
        why = f"that is less than one of {len(strata)} samples"
        raise InvalidSettingError(setting, share, f"{why}; use a larger fraction, or {setting}=null")
    return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()


VALIDATION_NAME = "val"  # of dataset.validation, and the name of the folder or the file


def split_names(root: Path, validation: object = None, suffix: str = "") -> list[str]:
    """The names of the folders, or with `suffix` of the files, in `root` that hold the training, the test and, if
    `validation` asks for its folder, the validation set. Without `test`, `val` holds the test set.

    Raises InvalidSettingError if there is no validation set, or it would also be the test set.
    """
    has = {name: (root / f"{name}{suffix}").exists() for name in ("test", VALIDATION_NAME)}
    if validation == VALIDATION_NAME:
        for name in has:
            if not has[name]:
                why = f"'{root / name}{suffix}' is not there, and the test set cannot be the validation set"
                use = "add it, or use a fraction of the training set, dataset.validation=0.1"
                raise InvalidSettingError("dataset.validation", validation, f"{why}; {use}")
        return ["train", "test", VALIDATION_NAME]
    return ["train", VALIDATION_NAME if has[VALIDATION_NAME] and not has["test"] else "test"]
