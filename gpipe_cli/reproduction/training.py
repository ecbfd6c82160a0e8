"""The paper's trained models: ImageNet (section 4), translation and its batch sizes (section 5), beside ours.

A model is trained once and evaluated on its test set; fine-tuning, which takes several runs, has a file of its own. The
parameters of the paper's own model are counted at every scale: that takes neither its data nor its accelerators.
"""

from dataclasses import dataclass, replace
from typing import Any

from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction.fine_tuning import FineTuning
from gpipe_cli.reproduction.numbers import NONE, SAME_RESULT, beside, difference, number, percents
from gpipe_cli.reproduction.runner import Findings, Runner
from gpipe_cli.units import count, plural

RUN = "trained"  # folder of the run


@dataclass(frozen=True, slots=True)
class Size:
    """The parameters of the full model."""

    model: str  # in the paper's words
    parameters: int  # the paper's
    settings: tuple[str, ...]  # with which the recipe is counted without the paper's data


@dataclass(frozen=True, slots=True)
class Classification:
    """The paper's accuracies on the test set, in percent."""

    top1: float
    top5: float


@dataclass(frozen=True, slots=True)
class Translation:
    """What the paper says of a translation model, and how much of the test set is translated here."""

    sentences: int | None  # None: all
    desk_sentences: int
    nll: float | None = None  # nats a token
    bleu: float | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """Exactly one of the last three is not None."""

    size: Size | None = None
    classification: Classification | None = None
    translation: Translation | None = None
    fine_tuning: FineTuning | None = None

    def __post_init__(self) -> None:
        kinds = (self.classification, self.translation, self.fine_tuning)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("training: give one of classification, translation, fine_tuning")

    def reproduce(self, runner: Runner) -> Findings:
        """Trains, and counts the paper's own model.

        Raises ValueError as the commands do for bad input, and CommandFailedError.
        """
        if self.fine_tuning is not None:
            return self.fine_tuning.reproduce(runner)
        result = runner.train(RUN)
        comparable = self.classification is not None and not runner.desk and not runner.changed(*SAME_RESULT)
        if self.classification is not None:
            tables = [_classified(self.classification, result, comparable)]
        else:
            assert self.translation is not None
            tables = [_translated(self.translation, result, runner)]
        notes = [("trained", _trained(result))]
        if self.size is not None:
            tables.append(_counted(self.size, runner))
            settings = " ".join(self.size.settings)
            notes.append(("counted", f"from the paper's configuration with {settings}, dry_run=true"))
        return Findings(tuple(tables), tuple(notes), comparable=comparable)


def _classified(paper: Classification, result: dict[str, Any], comparable: bool) -> Table:
    test = result["test"]
    rows = [
        (name, f"{theirs:.1f} %", percents(ours), difference(100 * ours, theirs, comparable))
        for name, theirs, ours in (("top-1", paper.top1, test["top1"]), ("top-5", paper.top5, test["top5"]))
    ]
    rows.append(("loss", NONE, number(test["loss"], 4), NONE))
    return beside(f"Test set of {result['dataset']}", rows)


def _translated(paper: Translation, result: dict[str, Any], runner: Runner) -> Table:
    """Without differences: the paper's pairs are not public, whatever is translated here."""
    sentences = paper.desk_sentences if runner.desk else paper.sentences
    limit = "null" if sentences is None else str(sentences)
    found = runner.evaluate(RUN, "checkpoint=last", f"decode.sentences={limit}")
    scores = found["translation"]
    numbers = (
        ("NLL, nats a token", paper.nll, found["loss"]),
        ("perplexity", None, found["perplexity"]),
        ("... of a unigram model", None, found["unigram_perplexity"]),
        ("BLEU", paper.bleu, scores["bleu"]),
        ("... of copying the source", None, scores["bleu_copy"]),
        ("chrF", None, scores["chrf"]),
        ("... of copying the source", None, scores["chrf_copy"]),
    )
    rows = [(name, number(theirs, 2), number(ours, 2), NONE) for name, theirs, ours in numbers]
    seen = f"{plural(found['samples'], 'pair')}, {scores['sentences']:,} translated with beam {scores['beam']}"
    return beside(f"Test set of {result['dataset']}: {seen}", rows)


def _counted(size: Size, runner: Runner) -> Table:
    """At the paper's size whatever the scale of the runs is, and whatever the user changed in them."""
    counted = replace(runner, settings=()).train("counted", "dry_run=true", *size.settings)["model_parameters"]
    relative = f"{100 * (counted / size.parameters - 1):+.1f} %"
    columns = Column("model"), Column("parameters", "paper"), Column("parameters", "counted"), Column("", "difference")
    return Table.of_rows("Size", columns, ((size.model, count(size.parameters), count(counted), relative),))


def _trained(result: dict[str, Any]) -> str:
    """`AmoebaNet-B (6, 16), 368.3 k parameters: 450 steps of 32 samples`."""
    tokens = result.get("global_batch_tokens")
    batch = f"at most {tokens:,} tokens" if tokens else plural(result["global_batch"], "sample")
    size = f"{result['model']}, {count(result['model_parameters'])} parameters"
    return f"{size}: {plural(result['steps'], 'step')} of {batch}, seed {result['config']['seed']}"
