"""The paper's trained models beside ours: ImageNet and fine-tuning (section 4), translation (section 5).

A model is trained once and evaluated on its test set. The paper fine-tunes five times and reports the mean (Table 4 of
v5). At the paper's scale the user provides the pretrained run, which takes weeks; at a desk the recipe makes it.
"""

from dataclasses import dataclass, replace
from statistics import mean, stdev
from typing import Any, Self

from gpipe_cli.config.typed import quoted
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.tables.table import NONE, Column, Table
from gpipe_cli.reproduction.runner import SAME_RESULT, Findings, Runner, beside, counts, difference, number, numbers
from gpipe_cli.units import count, percent, plural

RUN = "trained"  # folder of the run


@dataclass(frozen=True, slots=True)
class Size:
    """The parameter count of the full model, shown at every scale, as counting takes neither data nor accelerators."""

    model: str  # the model in the paper's words
    parameters: int  # the paper's count
    settings: tuple[str, ...]  # settings that allow counting without the paper's data

    def table(self, runner: Runner) -> Table:
        """Count the parameters at the paper's size, whatever the scale and the user's settings."""
        counted = replace(runner, settings=()).train("counted", "dry_run=true", *self.settings)["model_parameters"]
        columns = (
            Column("model", cells=[self.model]),
            counts("parameters", "paper", [self.parameters]),
            counts("parameters", "counted", [counted]),
            Column("", "difference", minuend="parameters", cells=[f"{100 * (counted / self.parameters - 1):+.1f} %"]),
        )
        return Table("Size", columns)


@dataclass(frozen=True, slots=True)
class Classification:
    """The paper's accuracies on the test set, in percent."""

    top1: float
    top5: float

    def reproduce(self, runner: Runner) -> Findings:
        result = runner.train(RUN)
        test, comparable = result["test"], not runner.desk and not runner.changed(*SAME_RESULT)
        rows = [
            (name, f"{theirs:.1f} %", percent(ours, 2), difference(100 * ours, theirs, comparable))
            for name, theirs, ours in (("top-1", self.top1, test["top1"]), ("top-5", self.top5, test["top5"]))
        ]
        rows.append(("loss", NONE, number(test["loss"], 4), NONE))
        table = beside(f"Test set of {result['dataset']}", rows)
        return Findings((table,), (_note(result),), comparable=comparable)

    def smallest(self) -> Self:
        return self


@dataclass(frozen=True, slots=True)
class Translation:
    """The paper's scores of a translation model, and how much of the test set is translated here."""

    sentences: int | None  # how many sentences of the test set are translated; None: all
    desk_sentences: int  # the same at a desk
    nll: float | None = None  # nats per token
    bleu: float | None = None

    def reproduce(self, runner: Runner) -> Findings:
        """Train and translate; no difference is taken, as the paper's sentence pairs are not public."""
        result = runner.train(RUN)
        sentences = self.desk_sentences if runner.desk else self.sentences
        limit = "null" if sentences is None else str(sentences)
        found = runner.evaluate(RUN, "checkpoint=last", f"decode.sentences={limit}")
        scores = found["translation"]
        numbers = (
            ("NLL, nats a token", self.nll, found["loss"]),
            ("perplexity", None, found["perplexity"]),
            ("... of a unigram model", None, found["unigram_perplexity"]),
            ("BLEU", self.bleu, scores["bleu"]),
            ("... of copying the source", None, scores["bleu_copy"]),
            ("chrF", None, scores["chrf"]),
            ("... of copying the source", None, scores["chrf_copy"]),
        )
        rows = [(name, number(theirs, 2), number(ours, 2), NONE) for name, theirs, ours in numbers]
        seen = f"{plural(found['samples'], 'pair')}, {scores['sentences']:,} translated with beam {scores['beam']}"
        table = beside(f"Test set of {result['dataset']}: {seen}", rows)
        return Findings((table,), (_note(result),), comparable=False)

    def smallest(self) -> Self:
        return replace(self, desk_sentences=1)


@dataclass(frozen=True, slots=True)
class FineTuning:
    """The paper's accuracies on the test set, in percent, and the trainings that give ours."""

    top1: float  # mean of the runs
    previous_best: float  # best result of others before the paper
    runs: int  # number of fine-tunings, with seeds 0, 1, ...
    begins_with: str  # the recipe that makes the pretrained run
    pretraining: tuple[str, ...]  # settings of the pretrained run at a desk
    fine_tuning: tuple[str, ...]  # settings of the fine-tuned runs at a desk
    desk_runs: int | None = None  # number of fine-tunings at a desk; None: `runs`
    from_scratch: bool = True  # at a desk: also train without pretrained weights

    def reproduce(self, runner: Runner) -> Findings:
        """Fine-tune with every seed. Raises InputError if `seed` is set, or no `init_from` at the paper's scale."""
        number_of_runs = (runner.desk and self.desk_runs) or self.runs
        if (seed := runner.given("seed")) is not None:
            seeds = f"0 to {number_of_runs - 1}"
            raise InputError(f"seed={seed}: this recipe runs seeds {seeds} and takes their mean; leave it out")
        begins_with, settings = runner.given("init_from"), self.fine_tuning if runner.desk else ()
        if begins_with == "null":
            begins_with, runner = None, runner.without("init_from")  # as without this setting
        if begins_with is None and not runner.desk:
            raise InputError(
                "init_from=null: the paper's scale begins with the ImageNet run, which takes weeks; make it with gpipe "
                f"reproduce {self.begins_with} scale=paper and give init_from=FOLDER of its run; "
                "scale=desk makes its own"
            )
        others: list[tuple[str, dict[str, Any]]] = []  # (name of a row, content of result.json)
        anew = ("init_from=null", "seed=0")
        if makes_its_own := begins_with is None:
            others.append(("pretrained run, on its own classes", runner.train("pretrained", *anew, *self.pretraining)))
            begins_with = quoted(runner.folder / "pretrained")
        begin = f"init_from={begins_with}"
        runs = [runner.train(f"seed_{seed}", begin, f"seed={seed}", *settings) for seed in range(number_of_runs)]
        if makes_its_own and self.from_scratch:
            others.append(("from scratch, seed 0", runner.train("from_scratch", *anew, *settings)))
        comparable = not runner.desk and not runner.changed("init_from", *SAME_RESULT)
        note = f"of a sample of {plural(number_of_runs, 'run')} that differ only in their seed; the paper prints none"
        columns = (
            Column("seed", cells=[str(run["config"]["seed"]) for run in runs]),
            Column("top-1", "measured", [percent(run["test"]["top1"], 2) for run in runs]),
            numbers("loss", "measured", [run["test"]["loss"] for run in runs], 4),
        )
        tables = self._means(runs, others, comparable), Table("Each run", columns)
        return Findings(tables, (("deviation", note),), comparable=comparable)

    def smallest(self) -> Self:
        return replace(self, desk_runs=1, from_scratch=False)

    def _means(self, runs: list[dict[str, Any]], others: list[tuple[str, dict[str, Any]]], comparable: bool) -> Table:
        top1s = [100 * run["test"]["top1"] for run in runs]
        top1 = mean(top1s)
        off = difference(top1, self.top1, comparable)
        rows = [
            (f"top-1, mean of {plural(len(runs), 'run')}", f"{self.top1:.1f} %", f"{top1:.2f} %", off),
            ("standard deviation, points", NONE, number(stdev(top1s) if len(top1s) > 1 else None, 2), NONE),
            ("best before the paper", f"{self.previous_best:.1f} %", NONE, NONE),
            *((name, NONE, percent(run["test"]["top1"], 2), NONE) for name, run in others),
        ]
        return beside(f"Fine-tuned, test set of {runs[0]['dataset']}", rows)


def _note(result: dict[str, Any]) -> tuple[str, str]:
    """Model and length of a training: `AmoebaNet-B (6, 16), 368.3 k parameters: 450 steps of 32 samples`."""
    tokens = result.get("global_batch_tokens")
    batch = f"at most {tokens:,} tokens" if tokens else plural(result["global_batch"], "sample")
    size = f"{result['model']}, {count(result['model_parameters'])} parameters"
    return "trained", f"{size}: {plural(result['steps'], 'step')} of {batch}, seed {result['config']['seed']}"
