"""Trains the same model with 1, 2, 4 and 8 partitions (consistent training, supplement of the NeurIPS paper).

Synchronous updates do not depend on the number of partitions: the paper's results differ by less than the deviation
between repeated runs. Ours are bit-identical, and the deviation between seeds is shown for comparison.
"""

import hashlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Self

from gpipe_cli.errors import InputError
from gpipe_cli.reporting.compare.run_record import RunRecord, read_run, same_curves
from gpipe_cli.reporting.tables.table import NONE, Column, Table
from gpipe_cli.reproduction.runner import Findings, Runner, number, numbers
from gpipe_cli.results.measures import MEASURES, TRAIN_LOSS
from gpipe_cli.units import percent, plural

if TYPE_CHECKING:
    from torch import Tensor

DIGITS = 12  # digits of a digest in the table; whole digests are compared


@dataclass(frozen=True)
class Trained:
    partitions: int
    seed: int
    record: RunRecord

    @cached_property
    def tensors(self) -> "dict[str, Tensor]":
        return last_tensors(self.record.folder)

    @cached_property
    def sha256(self) -> str:
        return digest(self.tensors)


@dataclass(frozen=True, slots=True)
class Consistency:
    """Runs every number of partitions with the first seed, and the first number with every other seed."""

    partitions: tuple[int, ...]
    seeds: tuple[int, ...]

    def reproduce(self, runner: Runner) -> Findings:
        """Train all runs, and compare losses and final weights bit by bit."""
        for key, values in (("partitions", self.partitions), ("seed", self.seeds)):
            if (value := runner.given(key)) is not None:
                listed = ", ".join(map(str, values))
                raise InputError(f"{key}={value}: this recipe compares {key}={listed}; leave it out")
        same = [_train(runner, partitions, self.seeds[0]) for partitions in self.partitions]
        repeated = [same[0], *(_train(runner, self.partitions[0], seed) for seed in self.seeds[1:])]
        runs = [*same, *repeated[1:]]
        curves = ("curves", f"tensorboard --logdir {shlex.quote(str(runner.folder))}")
        return Findings((_table(runs), _spread(same, repeated)), (*notes(same), curves))

    def smallest(self) -> Self:
        return replace(self, partitions=self.partitions[:2], seeds=self.seeds[:2])


def _train(runner: Runner, partitions: int, seed: int) -> Trained:
    name = f"partitions_{partitions}_seed_{seed}"
    runner.train(name, f"partitions={partitions}", f"seed={seed}")
    return Trained(partitions, seed, read_run(runner.folder / name))


def as_the_first(runs: Sequence[Trained]) -> list[bool]:
    """Whether the logged losses of each run equal those of the first run bit for bit."""
    groups = same_curves([run.record.curves.get(TRAIN_LOSS) for run in runs])
    alike = next((group for group in groups if 0 in group), [0])
    return [position in alike for position in range(len(runs))]


def notes(same: Sequence[Trained]) -> Iterator[tuple[str, str]]:
    """Yields (label, line): whether runs that differ in the number of partitions are identical, or how far apart."""
    first = same[0]
    curve = first.record.curves.get(TRAIN_LOSS)
    steps = plural(len(curve.steps) if curve is not None else 0, "step")
    if other := [run for run, alike in zip(same, as_the_first(same), strict=True) if not alike]:
        yield "losses", f"K = {_listed(other)}: of {steps}, some losses differ from those with K = {first.partitions}"
    else:
        yield "losses", f"those of all {steps} are the same bits with K = {_listed(same)}"
    if other := [run for run in same if run.sha256 != first.sha256]:
        apart = (f"K = {run.partitions}: {tensors_apart(first.tensors, run.tensors)}" for run in other)
        yield "weights", "; ".join(apart)
    else:
        tensors = f"all {len(first.tensors):,} tensors of the last checkpoint"
        yield "weights", f"{tensors} are the same bits with K = {_listed(same)}"


def _table(runs: Sequence[Trained]) -> Table:
    alike = ["as in row 1" if same else "others" for same in as_the_first(runs)]
    top1, losses = ([MEASURES[key].value(run.record.result) for run in runs] for key in ("test_top1", "test_loss"))
    columns = [
        Column("K", cells=[str(run.partitions) for run in runs]),
        Column("seed", cells=[str(run.seed) for run in runs]),
        Column("top-1", "measured", [percent(share, 2) for share in top1]),
        numbers("loss", "measured", losses, 6),
        Column("losses of all steps", "measured", [NONE, *alike[1:]]),
        Column("SHA-256 of weights", "measured", [run.sha256[:DIGITS] for run in runs]),
    ]
    return Table(f"The same training, test set of {runs[0].record.result.dataset}", columns)


def _spread(same: Sequence[Trained], repeated: Sequence[Trained]) -> Table:
    seeds = ", ".join(str(run.seed) for run in repeated)
    rows = [f"K = {_listed(same)}, seed {same[0].seed}", f"seeds {seeds}, K = {same[0].partitions}"]
    top1, losses = (  # None if the loss was not a number
        [[MEASURES[key].value(run.record.result) for run in runs] for runs in (same, repeated)]
        for key in ("test_top1", "test_loss")
    )
    columns = (
        Column("standard deviation of", cells=rows),
        Column("", "paper", ["within the next row's", NONE]),
        Column("top-1", "measured", [f"{number(one, 3)} points" for one in (100 * stdev(row) for row in top1)]),
        numbers("loss", "measured", [None if None in row else stdev(row) for row in losses], 6),
    )
    return Table("Between numbers of partitions, and between seeds", columns)


def _listed(runs: Sequence[Trained]) -> str:
    return ", ".join(str(run.partitions) for run in runs)


def last_tensors(run: Path) -> "dict[str, Tensor]":
    """All tensors of the last checkpoint of a run by name: weights, averaged weights, optimizer state."""
    from gpipe_cli.training.checkpoint.files import find_checkpoint, read_index, read_tensors

    checkpoint = find_checkpoint(run, "last", "run")
    return read_tensors(checkpoint, read_index(checkpoint).layers, ("model", "optimizer", "ema"))


def digest(tensors: "dict[str, Tensor]") -> str:
    """SHA-256 of the names, dtypes, shapes and bits of ``tensors``, in hexadecimal."""
    from torch import uint8

    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(uint8).numpy().tobytes())
    return sha.hexdigest()


def tensors_apart(one: "dict[str, Tensor]", other: "dict[str, Tensor]") -> str:
    """How far two sets of tensors are apart: `12 of 345 tensors differ, by 1.2e-07 at most`."""
    from gpipe_cli.pipeline.runtime.boundary import same_bits

    if one.keys() != other.keys():
        return f"{plural(len(one.keys() ^ other.keys()), 'tensor')} in one of them only"
    names = [name for name in one if not same_bits(one[name], other[name])]
    shaped = [name for name in names if one[name].shape == other[name].shape]
    most = max((float((one[name].double() - other[name].double()).abs().max()) for name in shaped), default=0.0)
    return f"{len(names)} of {len(one)} tensors differ, by {most:.1e} at most"
