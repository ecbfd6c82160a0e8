"""Sentence pairs as text: what a reader of parallel text returns (paper, Section 5).

The pairs of all languages are in one list with the number of their language pair beside them, because one model is
trained on all of them and languages are drawn with a temperature.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gpipe_cli.config.typed import RefusedError
from gpipe_cli.data.batches import SPLITS
from gpipe_cli.data.corpora import read_utf8
from gpipe_cli.data.seeds import seed_of

_TEST_ONE_IN = 20
_LANGUAGES = re.compile(r"[A-Za-z0-9_]+-[A-Za-z0-9_]+")


@dataclass(frozen=True, eq=False)
class Pairs:
    """One split. groups: int32 (n,), numbers of `languages`, which are names such as `de-en`, the same for both splits.
    file, lines: where each pair was read; None where not from a file."""

    sources: Sequence[str]
    references: Sequence[str]
    groups: Tensor
    languages: tuple[str, ...]
    file: Path | None = None
    lines: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.groups)

    def where(self, index: int) -> str:
        """A pair's origin, for a message."""
        if self.lines is not None:
            return f"'{self.file}' line {self.lines[index]}"
        return f"'{self.sources[index]}' ({self.languages[int(self.groups[index])]})"

    def chosen(self, indices: Tensor) -> "Pairs":
        """The pairs `indices` (int64), in that order."""
        rows = indices.tolist()
        return replace(
            self,
            sources=[self.sources[row] for row in rows],
            references=[self.references[row] for row in rows],
            groups=self.groups[indices],
            lines=None if self.lines is None else [self.lines[row] for row in rows],
        )


def target_language(languages: str) -> str:
    """`en` of `de-en`."""
    return languages.rpartition("-")[2]


def languages_of(pairs: Sequence[str]) -> int:
    """How many languages there are, on both sides, in pairs such as `hi_Latn-en`; scripts do not make another one."""
    return len({code.partition("_")[0] for pair in pairs for code in pair.split("-")})


def read_parallel_text(root: Path) -> tuple[Pairs, Pairs]:
    """Lines `source TAB target TAB languages` (such as `de-en`), UTF-8, without a heading; empty lines are skipped.

    root: a folder with train.tsv and test.tsv, or one file: then a line is test text where a hash of its target says
    so, about 1 in 20, so that no target is in both splits.

    Raises ValueError for files that are missing, empty or not UTF-8, and for a line of another form, with its number.
    """
    if root.is_dir():
        files = (root / "train.tsv", root / "test.tsv")
        rows = [_read_rows(file) for file in files]
    else:
        files, rows = (root, root), [[], []]
        for row in _read_rows(root):
            rows[seed_of(f"test {row.target}") % _TEST_ONE_IN == 0].append(row)
        for split, part in zip(SPLITS, rows, strict=True):
            if not part:
                why = f"1 line in {_TEST_ONE_IN} is test text, chosen by its target, and no {split} line is left"
                use = "add lines, or use a folder with train.tsv and test.tsv"
                raise RefusedError("dataset.root", root, f"{why}; {use}")
    languages = tuple(sorted({row.languages for part in rows for row in part}))
    numbers = {name: number for number, name in enumerate(languages)}
    train, test = (
        Pairs(
            [row.source for row in part],
            [row.target for row in part],
            torch.tensor([numbers[row.languages] for row in part], dtype=torch.int32),
            languages,
            file,
            [row.line for row in part],
        )
        for file, part in zip(files, rows, strict=True)
    )
    return train, test


class _Row(NamedTuple):
    line: int  # from 1
    source: str
    target: str
    languages: str


def _read_rows(file: Path) -> list[_Row]:
    """The lines of a file that are not empty, at least one."""
    rows = []
    # Not splitlines(): U+2028 and its like may be part of a sentence.
    for number, line in enumerate(read_utf8(file).split("\n"), 1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 3 or not all(columns) or not _LANGUAGES.fullmatch(columns[2]):
            raise ValueError(
                f"text file '{file}' line {number}: must have 3 columns, separated by tabs and none of them empty: "
                "source, target and languages (such as de-en)"
            )
        rows.append(_Row(number, *columns))
    if not rows:
        raise ValueError(f"text file '{file}': an empty corpus; expected lines of source, target and languages")
    return rows
