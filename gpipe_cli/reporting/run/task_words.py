"""What a run is judged by: top-1 for the paper's images (section 4), the loss of a token for its text (table 5).

The tasks differ in a few words and columns and in what their means are over. This file holds these differences, so that
the console, the dashboard and result.json need not ask for the task at every turn.
"""

import math
from dataclasses import dataclass
from typing import Literal

from gpipe_cli.training.events import Scores

Task = Literal["classification", "language_model", "translation"]


@dataclass(frozen=True)
class Words:
    """The words and columns of a task's reports."""

    text: bool  # whether loss, accuracy and speed are those of tokens; otherwise of samples
    sample: str  # one of what the data set holds
    speed: str  # the unit of the speed in columns and bars
    accuracy: str  # the share of right predictions, in columns and bars
    columns: tuple[tuple[str, int], ...]  # of an epoch's line: heading, and where it ends


# A line is at most 75 characters long: `best` still fits behind it at 80 columns.
_IMAGES = Words(
    text=False,
    sample="sample",
    speed="samples/s",
    accuracy="top-1",
    columns=(
        ("epoch", 10),
        ("train loss", 21),
        ("top-1", 29),
        ("test loss", 40),
        ("top-1", 48),
        ("top-5", 56),
        ("samples/s", 66),
        ("lr", 75),
    ),
)
_TEXT_COLUMNS = (
    ("epoch", 5),
    ("train loss", 16),
    ("token acc", 26),
    ("test loss", 36),
    ("perplexity", 47),
    ("token acc", 57),
    ("tokens/s", 66),
    ("lr", 75),
)


def words_of(task: Task) -> Words:
    """The words of a task."""
    match task:
        case "classification":
            return _IMAGES
        case "language_model":
            return Words(True, "sequence", "tokens/s", "token acc", _TEXT_COLUMNS)
        case "translation":
            return Words(True, "sentence", "tokens/s", "token acc", _TEXT_COLUMNS)


def scores_of(task: Task, scores: Scores) -> dict[str, float | None]:
    """The scores of a test set, under the names that they have in result.json."""
    if words_of(task).text:
        return {"loss": scores.loss, "perplexity": perplexity(scores.loss), "token_accuracy": scores.top1}
    return {"loss": scores.loss, "top1": scores.top1, "top5": scores.top5}


def perplexity(cross_entropy: float) -> float:
    """exp of the mean cross-entropy of a token in nats: among how many equally likely tokens the model wavers.

    Infinite where a float cannot hold it, as in a run that diverges.
    """
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf
