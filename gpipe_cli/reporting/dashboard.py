"""The TensorBoard events of a run: every tag of the project is in this file.

The curves behind the paper's accuracies (section 3) and their speed. One writer per run, in the parent process. Steps
count those done; accuracies are shares, 0 to 1.
"""

from collections.abc import Iterator
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from gpipe_cli.reporting.description import EvaluationMessage, StepMessage

TRAIN_LOSS = "train/loss"  # what is minimized
TRAIN_CROSS_ENTROPY = "train/cross_entropy"  # comparable with test/loss
TRAIN_TOP1 = "train/top1"
TRAIN_TOP5 = "train/top5"
TEST_LOSS = "test/loss"
TEST_TOP1 = "test/top1"
TEST_TOP5 = "test/top5"
LEARNING_RATE = "learning_rate"
GRADIENT_NORM = "gradient_norm"
SAMPLES_PER_SECOND = "speed/samples_per_second"
STEP_SECONDS = "speed/step_seconds"
CONFIG = "config"
BANNER = "banner"

GIB = 2**30
FLUSH_SECONDS = 10  # a run that is killed loses no more than this


def memory_tag(stage: int) -> str:
    """Peak memory of a stage in GiB."""
    return f"memory/stage_{stage}_gib"


class Dashboard:
    """Writes events to ``folder``; ``first_step`` is the number of steps done before it, by the run resumed."""

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        # A resumed run repeats what came after its checkpoint: readers drop old events from the purge step on.
        self._writer = SummaryWriter(str(folder), purge_step=first_step + 1, flush_secs=FLUSH_SECONDS)
        self._first_step = first_step

    def describe(self, config_yaml: str, banner: str) -> None:
        """Puts the configuration and the banner beside the curves."""
        # Four blanks are Markdown for text that stays as it is.
        for tag, text in ((CONFIG, config_yaml), (BANNER, banner)):
            self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), self._first_step)
        self._writer.flush()

    def step(self, message: StepMessage) -> None:
        """The curves of training; what is None is left out."""
        for tag, value in _scalars(message):
            if value is not None:
                self._writer.add_scalar(tag, value, message["step"])

    def evaluated(self, message: EvaluationMessage) -> None:
        """The curves of the test set."""
        for tag, value in ((TEST_LOSS, message["loss"]), (TEST_TOP1, message["top1"]), (TEST_TOP5, message["top5"])):
            if value is not None:
                self._writer.add_scalar(tag, value, message["step"])
        self._writer.flush()

    def close(self) -> None:
        """Writes what is left; harmless when repeated."""
        self._writer.close()


def _scalars(message: StepMessage) -> Iterator[tuple[str, float | None]]:
    yield TRAIN_LOSS, message["loss"]
    yield TRAIN_CROSS_ENTROPY, message["cross_entropy"]
    yield TRAIN_TOP1, message["top1"]
    yield TRAIN_TOP5, message["top5"]
    yield LEARNING_RATE, message["learning_rate"]
    yield GRADIENT_NORM, message["gradient_norm"]
    yield SAMPLES_PER_SECOND, message["samples"] / message["seconds"]
    yield STEP_SECONDS, message["seconds"]
    for stage, size in enumerate(message["memory_bytes"]):
        yield memory_tag(stage), size / GIB
