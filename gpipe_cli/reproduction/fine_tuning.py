"""The paper's transfer learning (section 4, Table 4 of v5): ImageNet's AmoebaNet-B on seven other data sets.

The paper fine-tunes five times and reports the mean. At the paper's scale the user gives the pretrained run, because it
takes weeks; at a desk it is trained first.
"""

from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from gpipe_cli.config.typed import quoted
from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction.numbers import NONE, SAME_RESULT, beside, difference, number, percents
from gpipe_cli.reproduction.runner import Findings, Runner


@dataclass(frozen=True, slots=True)
class FineTuning:
    """The paper's accuracies on the test set, in percent, and how ours are reached."""

    top1: float  # mean of the runs
    previous_best: float  # of others, before the paper
    runs: int  # with seeds 0, 1, ...
    begins_with: str  # the recipe that makes the run to begin with
    pretraining: tuple[str, ...]  # settings of the run to begin with, at a desk
    fine_tuning: tuple[str, ...]  # of the others, at a desk

    def __post_init__(self) -> None:
        if self.runs < 2:
            raise ValueError(f"fine_tuning.runs={self.runs}: a deviation takes 2 or more")

    def reproduce(self, runner: Runner) -> Findings:
        """Fine-tunes with every seed; at a desk also learns the same without the weights of another run.

        Raises ValueError for settings that the experiment makes itself, and as the commands do; and CommandFailedError.
        """
        if (seed := runner.given("seed")) is not None:
            seeds = f"0 to {self.runs - 1}"
            raise ValueError(f"seed={seed}: this recipe runs seeds {seeds} and takes their mean; leave it out")
        begins_with, settings = runner.given("init_from"), self.fine_tuning if runner.desk else ()
        if begins_with == "null":
            begins_with, runner = None, runner.without("init_from")  # as if it were left out
        if begins_with is None and not runner.desk:
            raise ValueError(
                "init_from=null: the paper's scale begins with the ImageNet run, which takes weeks; make it with gpipe "
                f"reproduce {self.begins_with} scale=paper and give init_from=FOLDER of its run; "
                "scale=desk makes its own"
            )
        others: list[tuple[str, dict[str, Any]]] = []  # name of their row, and result.json
        anew = ("init_from=null", "seed=0")
        if makes_its_own := begins_with is None:
            others.append(("the run begun with, its classes", runner.train("pretrained", *anew, *self.pretraining)))
            begins_with = quoted(runner.folder / "pretrained")
        begin = f"init_from={begins_with}"
        runs = [runner.train(f"seed_{seed}", begin, f"seed={seed}", *settings) for seed in range(self.runs)]
        if makes_its_own:
            others.append(("from scratch, seed 0", runner.train("from_scratch", *anew, *settings)))
        comparable = not runner.desk and not runner.changed("init_from", *SAME_RESULT)
        note = f"of a sample of {self.runs} runs, which differ in their seed only; the paper prints none"
        tables = self._means(runs, others, comparable), _each(runs)
        return Findings(tables, (("deviation", note),), comparable=comparable)

    def _means(self, runs: list[dict[str, Any]], others: list[tuple[str, dict[str, Any]]], comparable: bool) -> Table:
        percent = [100 * run["test"]["top1"] for run in runs]
        top1 = mean(percent)
        off = difference(top1, self.top1, comparable)
        rows = [
            (f"top-1, mean of {len(runs)} runs", f"{self.top1:.1f} %", f"{top1:.2f} %", off),
            ("standard deviation, points", NONE, number(stdev(percent), 2), NONE),
            ("best before the paper", f"{self.previous_best:.1f} %", NONE, NONE),
            *((name, NONE, percents(run["test"]["top1"]), NONE) for name, run in others),
        ]
        return beside(f"Fine-tuned, test set of {runs[0]['dataset']}", rows)


def _each(runs: list[dict[str, Any]]) -> Table:
    columns = (
        Column("seed", cells=[str(run["config"]["seed"]) for run in runs]),
        Column("top-1", "measured", [percents(run["test"]["top1"]) for run in runs]),
        Column("loss", "measured", [number(run["test"]["loss"], 4) for run in runs]),
    )
    return Table("Each run", columns)
