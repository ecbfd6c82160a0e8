"""The paper's trained models: ImageNet (section 4), translation and its batch sizes (section 5), beside ours.

A model is trained once and evaluated on its test set; fine-tuning, which takes several runs, has a file of its own. The
parameters of the paper's own model are counted at every scale: that takes neither its data nor its accelerators.
"""

from dataclasses import dataclass, replace
from typing import Any

from gpipe_cli.reporting.tables.table import Column, Table
from gpipe_cli.reproduction import fine_tuning
from gpipe_cli.reproduction.fine_tuning import FineTuning
from gpipe_cli.reproduction.numbers import NO_DIFFERENCES, NONE, SAME_RESULT, beside, difference, number, percents
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


def reproduce(what: Training, runner: Runner) -> Findings:
    """Trains, and counts the paper's own model.

    Raises ValueError as the commands do for bad input, and CommandFailedError.
    """
    if what.fine_tuning is not None:
        return fine_tuning.reproduce(what.fine_tuning, runner)
    result = runner.train(RUN)
    comparable = what.classification is not None and not runner.desk and not runner.changed(*SAME_RESULT)
    if what.classification is not None:
        tables = [_classified(what.classification, result, comparable)]
    else:
        assert what.translation is not None
        tables = [_translated(what.translation, result, runner)]
    notes = [("trained", _trained(result))]
    if what.size is not None:
        tables.append(_counted(what.size, runner))
        notes.append(("counted", f"from the paper's configuration with {' '.join(what.size.settings)}, dry_run=true"))
    if not comparable:
        notes.append(NO_DIFFERENCES)
    return Findings(tuple(tables), tuple(notes))


def _classified(paper: Classification, result: dict[str, Any], comparable: bool) -> Table:
    test = result["test"]
    off1, off5 = (
        difference(100 * test[key], theirs, comparable) for key, theirs in (("top1", paper.top1), ("top5", paper.top5))
    )
    rows = [
        ("top-1", f"{paper.top1:.1f} %", percents(test["top1"]), off1),
        ("top-5", f"{paper.top5:.1f} %", percents(test["top5"]), off5),
        ("loss", NONE, number(test["loss"], 4), NONE),
    ]
    return beside(f"Test set of {result['dataset']}", rows)


def _translated(paper: Translation, result: dict[str, Any], runner: Runner) -> Table:
    """Without differences: the paper's pairs are not public, whatever is translated here."""
    sentences = paper.desk_sentences if runner.desk else paper.sentences
    limit = "null" if sentences is None else str(sentences)
    found = runner.evaluate(RUN, "checkpoint=last", f"decode.sentences={limit}")
    scores = found["translation"]
    rows = [
        ("NLL, nats a token", number(paper.nll, 2), number(found["loss"], 2), NONE),
        ("perplexity", NONE, number(found["perplexity"], 2), NONE),
        ("... of a unigram model", NONE, number(found["unigram_perplexity"], 2), NONE),
        ("BLEU", number(paper.bleu, 2), number(scores["bleu"], 2), NONE),
        ("... of copying the source", NONE, number(scores["bleu_copy"], 2), NONE),
        ("chrF", NONE, number(scores["chrf"], 2), NONE),
        ("... of copying the source", NONE, number(scores["chrf_copy"], 2), NONE),
    ]
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
