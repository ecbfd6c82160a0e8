"""The same training with 1, 2, 4 and 8 partitions (consistent training, supplement of the NeurIPS paper).

Synchronous updates do not depend on the number of partitions: the paper finds differences within the deviation of
repeated runs. Here they are the same bits, and the deviation between seeds stands beside that.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.compare.run_curves import same_curves
from gpipe_cli.reporting.compare.run_record import RunRecord, read_run
from gpipe_cli.reporting.run.tensorboard import TEST_LOSS, TEST_TOP1, TRAIN_LOSS
from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction.numbers import NONE, number, percents
from gpipe_cli.reproduction.runner import Findings, Runner
from gpipe_cli.units import plural

if TYPE_CHECKING:
    from torch import Tensor

CURVES = "curves.png"
DIGITS = 12  # of a digest that are shown; all of them are compared


@dataclass(frozen=True, slots=True)
class Consistency:
    """Which runs: every number of partitions with the first seed, and the first number with the other seeds."""

    partitions: tuple[int, ...]
    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        for key in ("partitions", "seeds"):
            if len(set(getattr(self, key))) < 2 or len(set(getattr(self, key))) < len(getattr(self, key)):
                raise ValueError(f"consistency.{key}={list(getattr(self, key))}: must be 2 or more that differ")


@dataclass(frozen=True)
class Trained:
    """One of the runs."""

    partitions: int
    seed: int
    record: RunRecord

    @property
    def result(self) -> Any:
        return self.record.result


def reproduce(what: Consistency, runner: Runner) -> Findings:
    """Trains all of them, compares losses and final weights bit by bit, and draws the curves over each other.

    Raises ValueError for settings that the experiment makes itself, and as `gpipe train` does; and CommandFailedError.
    """
    for key, values in (("partitions", what.partitions), ("seed", what.seeds)):
        if (value := runner.given(key)) is not None:
            listed = ", ".join(map(str, values))
            raise ValueError(f"{key}={value}: this recipe compares {key}={listed}; leave it out")
    first, seed = what.partitions[0], what.seeds[0]
    same = [_train(runner, partitions, seed) for partitions in what.partitions]
    others = [_train(runner, first, other) for other in what.seeds[1:]]
    weights = [final_tensors(run.record.folder) for run in same]
    digests = [digest(tensors) for tensors in weights]
    digests += [digest(final_tensors(run.record.folder)) for run in others]
    losses = _as_the_first([*same, *others])
    notes = [("losses", _losses_note(same, losses)), ("weights", _weights_note(same, weights, digests))]
    picture = _draw([*same, *others], runner.folder)
    tables = (_runs([*same, *others], losses, digests), _spread(what, same, [same[0], *others]))
    return Findings(tables, tuple(notes), (("curves", str(picture)),))


def _train(runner: Runner, partitions: int, seed: int) -> Trained:
    name = f"partitions_{partitions}_seed_{seed}"
    runner.train(name, f"partitions={partitions}", f"seed={seed}")
    return Trained(partitions, seed, read_run(runner.folder / name))


def _as_the_first(runs: Sequence[Trained]) -> list[bool]:
    """Whether the logged losses of every step are the first run's, to the last bit."""
    groups = same_curves([run.record for run in runs], TRAIN_LOSS)
    alike = next((group for group in groups if 0 in group), (0,))
    return [position in alike for position in range(len(runs))]


def _losses_note(same: Sequence[Trained], losses: Sequence[bool]) -> str:
    curve = same[0].record.curves.get(TRAIN_LOSS)
    steps = len(curve.steps) if curve is not None else 0
    other = [str(run.partitions) for run, alike in zip(same, losses, strict=False) if not alike]
    if other:
        all_steps, first = plural(steps, "step"), same[0].partitions
        return f"K = {', '.join(other)}: of {all_steps}, some losses differ from those with K = {first}"
    return f"those of all {plural(steps, 'step')} are the same bits with K = {_listed(same)}"


def _weights_note(same: Sequence[Trained], weights: Sequence[Any], digests: Sequence[str]) -> str:
    if len(set(digests[: len(same)])) == 1:
        return f"all {len(weights[0]):,} tensors of the last checkpoint are the same bits with K = {_listed(same)}"
    return "; ".join(
        f"K = {run.partitions}: {tensors_apart(weights[0], tensors)}"
        for run, tensors, sha in zip(same, weights, digests, strict=False)
        if sha != digests[0]
    )


def _draw(runs: Sequence[Trained], folder: Path) -> Path:
    from gpipe_cli.reporting.plots.curves import draw_curves
    from gpipe_cli.reporting.plots.picture import write_picture

    write_picture(folder / CURVES, draw_curves([run.record for run in runs], (TRAIN_LOSS, TEST_LOSS, TEST_TOP1)))
    return folder / CURVES


def _runs(runs: Sequence[Trained], losses: Sequence[bool], digests: Sequence[str]) -> Table:
    columns = (
        Column("K"),
        Column("seed"),
        Column("top-1", "measured"),
        Column("loss", "measured"),
        Column("losses of all steps", "measured"),
        Column("SHA-256 of weights", "measured"),
    )
    rows = tuple(
        (
            str(run.partitions),
            str(run.seed),
            percents(run.result["test"]["top1"]),
            number(run.result["test"]["loss"], 6),
            ("as in row 1" if alike else "others") if place else NONE,
            sha[:DIGITS],
        )
        for place, (run, alike, sha) in enumerate(zip(runs, losses, digests, strict=True))
    )
    return Table.of_rows(f"The same training, test set of {runs[0].result['dataset']}", columns, rows)


def _spread(what: Consistency, same: Sequence[Trained], repeated: Sequence[Trained]) -> Table:
    columns = (
        Column("standard deviation of"),
        Column("", "paper"),
        *(Column(of, "measured") for of in ("top-1", "loss")),
    )
    rows = (
        (f"K = {_listed(same)}, seed {what.seeds[0]}", "within the next row's", *_deviations(same)),
        (f"seeds {', '.join(map(str, what.seeds))}, K = {what.partitions[0]}", NONE, *_deviations(repeated)),
    )
    return Table.of_rows("Between numbers of partitions, and between seeds", columns, rows)


def _deviations(runs: Sequence[Trained]) -> tuple[str, str]:
    tests = [run.result["test"] for run in runs]
    top1 = 100 * stdev(test["top1"] for test in tests)
    losses = [test["loss"] for test in tests]  # None where it was not a number
    return f"{number(top1, 3)} points", NONE if None in losses else number(stdev(losses), 6)


def _listed(runs: Sequence[Trained]) -> str:
    return ", ".join(str(run.partitions) for run in runs)


def final_tensors(run: Path) -> "dict[str, Tensor]":
    """Everything in the last checkpoint of the run in ``run`` by name: weights, averages, the optimizer's state.

    Raises ValueError if it has none.
    """
    from gpipe_cli.training.checkpoint.store import find_checkpoint, read_index, read_tensors

    checkpoint = find_checkpoint(run, "last", "run")
    return read_tensors(checkpoint, read_index(checkpoint).layers, ("model", "optimizer", "ema"))


def digest(tensors: "dict[str, Tensor]") -> str:
    """SHA-256 of names, types, shapes and bits, in hexadecimal digits."""
    from torch import uint8

    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(uint8).numpy().tobytes())
    return sha.hexdigest()


def tensors_apart(one: "dict[str, Tensor]", other: "dict[str, Tensor]") -> str:
    """How far two sets of weights are from each other: `12 of 345 tensors differ, by 1.2e-07 at most`."""
    from gpipe_cli.pipeline.runtime.digests import same_bits

    if one.keys() != other.keys():
        return f"{plural(len(one.keys() ^ other.keys()), 'tensor')} in one of them only"
    names = [name for name in one if not same_bits(one[name], other[name])]
    shaped = [name for name in names if one[name].shape == other[name].shape]
    most = max((float((one[name].double() - other[name].double()).abs().max()) for name in shaped), default=0.0)
    return f"{len(names)} of {len(one)} tensors differ, by {most:.1e} at most"
