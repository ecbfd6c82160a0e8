"""Where a run begins, when it evaluates, saves and ends, and which weights are the best. All of this follows from
settings and numbers that every process has, so that no decision needs to be sent.
"""

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpipe_cli.assembly.loss import Totals
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.errors import InputError
from gpipe_cli.training.checkpoint.files import (
    CorruptCheckpointError,
    Progress,
    check_files,
    list_checkpoints,
    missing_best_checkpoint,
    read_index,
)


def initial_progress(config: TrainConfig, source: Path | None) -> Progress:
    """Where a run begins: the progress in the checkpoint `source` if it is resumed, otherwise step 0. Without its best
    checkpoint, the run has no best until the next evaluation."""
    if config.resume is None or source is None:
        return Progress(0, 0, 0, 0, 0, None, None)
    progress = read_index(source).progress
    if missing_best_checkpoint(source) is not None:
        return replace(progress, best_score=None, best_step=None, best=None)
    return progress


@dataclass(frozen=True)
class Milestones:
    """What is due after which step. Steps count from 1, including those before the run was resumed.

    With `only_steps` nothing is evaluated or saved, not even at the end.
    """

    config: TrainConfig
    steps_per_epoch: int
    only_steps: bool = False

    @property
    def total_steps(self) -> int:
        """The steps of all epochs, over which the learning rate is scheduled."""
        return self.config.epochs * self.steps_per_epoch

    @property
    def end_step(self) -> int:
        """The number of the last step: `total_steps`, or `max_steps` if that is less."""
        return min(self.total_steps, self.config.max_steps or self.total_steps)

    def check_not_finished(self, step: int) -> None:
        """Raises InputError if a resumed run has done all its steps already."""
        if step < self.end_step:
            return
        by_epochs = self.end_step == self.total_steps
        limit, more = ("epochs", self.config.epochs + 1) if by_epochs else ("max_steps", step + 1)
        raise InputError(
            f"resume={self.config.resume}: that run has done {step} steps, and {limit} allows {self.end_step}; "
            f"nothing is left to do, use {limit}={more} or more"
        )

    def evaluates_after(self, step: int) -> bool:
        return self._due(step, self.config.evaluate_every_epochs * self.steps_per_epoch)

    def saves_after(self, step: int) -> bool:
        checkpoint = self.config.checkpoint
        return self._due(step, checkpoint.every_epochs * self.steps_per_epoch, checkpoint.every_steps)

    def _due(self, step: int, *intervals: int) -> bool:
        """Whether `step` is the last, or a multiple of any of the intervals; an interval of 0 means never."""
        ends = step == self.end_step or any(interval > 0 and step % interval == 0 for interval in intervals)
        return ends and not self.only_steps


def progress_if_complete(config: TrainConfig, folder: Path) -> Progress | None:
    """The progress of the run in `folder`, if its last checkpoint is intact and `config` allows no more steps."""
    with suppress(IndexError, CorruptCheckpointError):
        index = read_index(last := list_checkpoints(folder)[-1])
        if index.progress.step >= Milestones(config, index.progress.steps_per_epoch).end_step:
            check_files(last, index.files)
            return index.progress
    return None


def score_of(totals: Totals, text: bool) -> float:
    """The score by which the best checkpoint is chosen, greater is better: test top-1, or for text minus test loss."""
    loss, _, top1, _ = totals.means
    return -loss if text else top1


def is_best(score: float, progress: Progress) -> bool:
    return math.isfinite(score) and (progress.best_score is None or score > progress.best_score)


class DivergedError(RuntimeError):
    """The loss or the gradient norm is not finite."""


def check_finite(config: TrainConfig, loss: float, norm: float, step: int, epoch: int, rate: float) -> None:
    """Raises DivergedError if the loss or the gradient norm is not finite; `step` and `epoch` count from 1."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        scale = "per_sample" if config.learning_rate.name == "paper" else "peak"
        raise DivergedError(
            f"step {step} (epoch {epoch}): the loss is {loss} and the gradient norm {norm}; it has diverged "
            f"at learning rate {rate:g}; use a smaller learning_rate.{scale}, a longer warm-up, "
            "or gradient_clipping=10"
        )
