"""GPipe (Huang et al., 2019): micro-batch pipeline parallelism, as a training application for the command line.

From Python, `load` returns the trained model of a run.
"""

from os import PathLike
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # importing torch takes seconds, and `gpipe --help` does not need it
    from torch import nn

__all__ = ["load"]


def load(
    run_folder: str | PathLike[str],
    *,
    averaged: bool | None = None,
    checkpoint: Literal["best", "last"] = "best",
) -> "nn.Sequential":
    """Load the trained model of a run as a plain `nn.Sequential` of its layers, on the CPU, in eval mode, in float32.

        from gpipe_cli import load
        model = load("outputs/my_run")
        logits = model(images)

    Images have shape (N, 3, S, S), S the run's dataset.image_size; an 8-bit value v becomes (v / 255 - mean) /
    deviation, as `gpipe export` prints them. Logits have shape (N, classes). Text is token ids of the run's
    vocabulary.model or tokenizer/, (N, length), with logits (N, length, vocabulary); for translation a tuple (source,
    target so far).

    Args:
        run_folder: the folder of a `gpipe train` run, trained with any K, M and devices.
        averaged: True: the moving average of the weights, with which the run was evaluated; False: the weights; None:
            the average, if the run kept one (ema_decay).
        checkpoint: the best one by the test set, or the last one; if it is damaged, the newest intact one is loaded,
            with a warning.

    Raises InputError, one line, if the folder is not a run or lacks such weights, or if the user's own model
    (model=custom) is not found from the current folder.
    """
    from gpipe_cli.training.checkpoint.whole_model import load_run

    return load_run(str(run_folder), averaged, checkpoint)
