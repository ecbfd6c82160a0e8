"""What `gpipe evaluate` found: said to people, and written as evaluate.json.

The accuracies of the paper's tables are those of a test set (section 3); a finished run can be asked for them again.
"""

from pathlib import Path
from typing import Any, NotRequired, TypedDict

from rich.console import Console

from gpipe_cli.reporting.run.result import write_result
from gpipe_cli.reporting.run.summary import outcome_of_test, outcome_of_translation, show_facts
from gpipe_cli.reporting.run.task import Task, scores, words_of
from gpipe_cli.training.events import TranslationResult
from gpipe_cli.units import duration, plural

EVALUATION = "evaluate.json"


class EvaluationResult(TypedDict):
    """What `gpipe evaluate` found."""

    checkpoint: str
    task: NotRequired[Task]  # an image classification if it is not said, as in a description
    samples: int
    tokens: NotRequired[int | None]  # as in a step
    loss: float
    top1: float  # share of right predictions, of samples or tokens
    top5: float | None
    averaged: bool
    seconds: float
    unigram_perplexity: NotRequired[float | None]  # text only
    translation: NotRequired[TranslationResult | None]  # None: nothing was decoded


def show_evaluation(console: Console, folder: Path, result: EvaluationResult) -> None:
    """Shows an evaluation and writes evaluate.json beside the run's result.json, which stays as it was."""
    found = _found(result)
    try:
        write_result(folder, found, EVALUATION)
    finally:  # what cannot be written is shown all the same
        _show(console, folder, found)


def _show(console: Console, folder: Path, found: dict[str, Any]) -> None:
    words = words_of(found["task"])
    seen = f"{found['samples']:,} with {plural(found['tokens'], 'token')}" if words.text else f"{found['samples']:,}"
    facts = [
        ("checkpoint", found["checkpoint"]),
        ("test", outcome_of_test(found, found.get("unigram_perplexity"))),
        (f"{words.sample}s", f"{seen} in {duration(found['seconds'])}"),
    ]
    translation = found.get("translation")
    if translation is not None:
        facts += outcome_of_translation(translation)
    show_facts(console, [*facts, ("written to", str(folder / EVALUATION))])


def _found(result: EvaluationResult) -> dict[str, Any]:
    """What evaluate.json holds: the scores of the task, and nothing that the task does not know."""
    task = result.get("task", "classification")
    found: dict[str, Any] = {
        "checkpoint": result["checkpoint"],
        "task": task,
        "samples": result["samples"],
        **scores(task, result["loss"], result["top1"], result.get("top5")),
        "averaged": result["averaged"],
        "seconds": result["seconds"],
    }
    if words_of(task).text:
        found |= {"tokens": result["tokens"], "unigram_perplexity": result.get("unigram_perplexity")}
    if task == "translation":
        found["translation"] = result.get("translation")
    return found
