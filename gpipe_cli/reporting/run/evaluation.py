"""What `gpipe evaluate` found: said to people, and written as evaluate.json.

The accuracies of the paper's tables are those of a test set (section 3); a finished run can be asked for them again.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.reporting.run.result import write_result
from gpipe_cli.reporting.run.summary import outcome_of_test, outcome_of_translation, show_facts
from gpipe_cli.reporting.run.task import Task, scores, words_of
from gpipe_cli.training.events import EvaluationDone, TranslationScores
from gpipe_cli.units import duration, plural

EVALUATION = "evaluate.json"


def show_evaluation(console: Console, folder: Path, checkpoint: str, task: Task, message: EvaluationDone) -> None:
    """Shows an evaluation and writes evaluate.json beside the run's result.json, which stays as it was."""
    found = _found(checkpoint, task, message)
    try:
        write_result(folder, found, EVALUATION)
    finally:  # what cannot be written is shown all the same
        _show(console, folder, found, message.translation)


def _show(console: Console, folder: Path, found: dict[str, Any], translation: TranslationScores | None) -> None:
    words = words_of(found["task"])
    seen = f"{found['samples']:,} with {plural(found['tokens'], 'token')}" if words.text else f"{found['samples']:,}"
    facts = [
        ("checkpoint", found["checkpoint"]),
        ("test", outcome_of_test(found, found.get("unigram_perplexity"))),
        (f"{words.sample}s", f"{seen} in {duration(found['seconds'])}"),
    ]
    if translation is not None:
        facts += outcome_of_translation(translation)
    show_facts(console, [*facts, ("written to", str(folder / EVALUATION))])


def _found(checkpoint: str, task: Task, message: EvaluationDone) -> dict[str, Any]:
    """What evaluate.json holds: the scores of the task, and nothing that the task does not know."""
    found: dict[str, Any] = {
        "checkpoint": checkpoint,
        "task": task,
        "samples": message.samples,
        **scores(task, message.loss, message.top1, message.top5),
        "averaged": message.averaged,
        "seconds": message.seconds,
    }
    if words_of(task).text:
        found |= {"tokens": message.tokens, "unigram_perplexity": message.unigram_perplexity}
    if task == "translation":
        found["translation"] = None if message.translation is None else asdict(message.translation)
    return found
