"""What a run is judged by: top-1 for the paper's images (section 4), the loss of a token for its text (table 5)."""

import math
from dataclasses import dataclass

from gpipe_cli.config.settings import Task
from gpipe_cli.training.events import Scores


@dataclass(frozen=True)
class Words:
    """The words and columns of a task's reports."""

    text: bool  # whether loss, accuracy and speed are those of tokens; otherwise of samples
    sample: str  # one of what the data set holds
    speed: str  # the unit of the speed in columns and bars
    accuracy: str  # the share of right predictions, in columns and bars
    scores: tuple[str, str, str]  # of the test set, in columns
    ends: tuple[int, ...]  # where the columns of an epoch's line end

    @property
    def headings(self) -> tuple[str, ...]:
        """Of an epoch's line."""
        return "epoch", "train loss", self.accuracy, *self.scores, self.speed, "lr"


def words_of(task: Task) -> Words:
    """The words of a task. Lines are at most 75 characters long: `best` still fits behind them at 80 columns."""
    if task == "classification":
        ends = (10, 21, 29, 40, 48, 56, 66, 75)
        return Words(False, "sample", "samples/s", "top-1", ("test loss", "top-1", "top-5"), ends)
    sample = "sequence" if task == "language_model" else "sentence"
    ends = (5, 16, 26, 36, 47, 57, 66, 75)
    return Words(True, sample, "tokens/s", "token acc", ("test loss", "perplexity", "token acc"), ends)


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
