"""GPipe (Huang et al., 2019): micro-batch pipeline parallelism, as a training application for the command line.

In Python, `load` gives the model of a run.
"""

from os import PathLike
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # it takes seconds, and `gpipe --help` needs none of it
    from torch import nn

__all__ = ["load"]


def load(
    run_folder: str | PathLike[str],
    *,
    averaged: bool | None = None,
    checkpoint: Literal["best", "last"] = "best",
) -> "nn.Sequential":
    """The trained model of a run: its layers as a plain `nn.Sequential`, on the CPU, in evaluation mode, in float32.

        from gpipe_cli import load
        model = load("outputs/my_run")
        logits = model(images)

    Images are (N, 3, S, S), S pixels as dataset.image_size of the run, each value (v / 255 - mean) / deviation, as
    `gpipe export` prints them; logits are (N, classes). Text is token ids (N, length) of the run's vocabulary.model,
    and logits are (N, length, vocabulary); for translation a tuple of the source and the target so far.

    Args:
        run_folder: of `gpipe train`; K, M and the devices of the training do not matter.
        averaged: the moving average of the weights, with which the run was evaluated (True), or the weights (False).
            None: the average, if the run kept one (ema_decay).
        checkpoint: the best one by the test set, or the last one; a damaged one is replaced by the newest that is
            intact, with a warning.

    Raises InputError, one line, for a folder that is no run, has no such weights, or whose own model (model=custom) is
    not found from the current folder.
    """
    from gpipe_cli.training.checkpoint.whole_model import load_run

    return load_run(str(run_folder), averaged, checkpoint)
