"""Where a run begins, when it evaluates, saves and ends, and which of its weights are the best.

All of it follows from settings and from numbers that every process has, so that they need not be sent.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.assembly.loss import Totals
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import show
from gpipe_cli.training.checkpoint.store import Progress, read_index


def starting_point(config: TrainConfig, source: Path | None) -> Progress:
    """The first mini-batch, or the one that a resumed run, of which `source` is a checkpoint, comes to next.

    Raises ValueError if its mini-batches would be others now.
    """
    if config.resume is None or source is None:
        return Progress(0, 0, 0, config.seed, config.batch_size, config.batch_tokens, 0, 0, None, None)
    progress = read_index(source).progress
    for setting, given, saved in (
        ("seed", config.seed, progress.seed),
        ("batch_size", config.batch_size, progress.batch_size),
        ("batch_tokens", config.batch_tokens, progress.batch_tokens),
    ):
        if given != saved:
            raise ValueError(
                f"{setting}={show(given)}: the run that is resumed has {setting}={show(saved)}, and its position in "
                "the data means something else with another; leave the setting out"
            )
    return progress


@dataclass(frozen=True)
class Milestones:
    """What is due after which step; `step` counts those that are done, since the beginning of the first run."""

    steps_per_epoch: int
    total_steps: int  # of all epochs: the learning rate is made for them
    end_step: int  # the last one
    evaluate_every_epochs: int  # 0, as of the next ones: never
    save_every_epochs: int
    save_every_steps: int
    only_steps: bool  # not even at the end anything is evaluated or saved

    @classmethod
    def of(cls, config: TrainConfig, steps_per_epoch: int, *, only_steps: bool) -> "Milestones":
        total_steps = config.epochs * steps_per_epoch
        return cls(
            steps_per_epoch,
            total_steps,
            min(total_steps, config.max_steps or total_steps),
            config.evaluate_every_epochs,
            config.checkpoint.every_epochs or 0,
            config.checkpoint.every_steps or 0,
            only_steps,
        )

    def refuse_finished(self, config: TrainConfig, step: int) -> None:
        """Raises ValueError if a run that is resumed has done all its steps."""
        if step < self.end_step:
            return
        limit, more = ("max_steps", step + 1) if self.end_step < self.total_steps else ("epochs", config.epochs + 1)
        raise ValueError(
            f"resume={config.resume}: that run has done {step} steps, and {limit} allows {self.end_step}; "
            f"nothing is left to do, use {limit}={more} or more"
        )

    def evaluates_after(self, step: int) -> bool:
        return not self.only_steps and (step == self.end_step or self._epochs_end(step, self.evaluate_every_epochs))

    def saves_after(self, step: int) -> bool:
        if self.only_steps:
            return False
        every = self.save_every_steps
        return (
            step == self.end_step or self._epochs_end(step, self.save_every_epochs) or (every > 0 and step % every == 0)
        )

    def _epochs_end(self, step: int, epochs: int) -> bool:
        return epochs > 0 and step % (epochs * self.steps_per_epoch) == 0


def score_of(totals: Totals, text: bool) -> float:
    """What the best checkpoint has the most of: top-1 of the test set, or for text its loss with a minus."""
    loss, _, top1, _ = totals.means
    return -loss if text else top1


def is_best(score: float, progress: Progress) -> bool:
    return math.isfinite(score) and (progress.best_score is None or score > progress.best_score)


class DivergedError(RuntimeError):
    """The loss or a gradient is not a number any more."""


def refuse_nonsense(config: TrainConfig, loss: float, norm: float, step: int, epoch: int, rate: float) -> None:
    """Raises DivergedError if the loss or the gradient norm is not finite; `step` and `epoch` count from 1."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        scale = "per_sample" if config.learning_rate.name == "paper" else "peak"
        raise DivergedError(
            f"step {step} (epoch {epoch}): the loss is {loss} and the gradient norm {norm}; it has diverged "
            f"at learning rate {rate:g}; use a smaller learning_rate.{scale}, a longer warm-up, "
            "or gradient_clipping=10"
        )
