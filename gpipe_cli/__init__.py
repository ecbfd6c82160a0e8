"""GPipe (Huang et al., 2019): micro-batch pipeline parallelism, as a training application for the command line.

From Python, `load` returns the trained model of a run, `result` its numbers, `show` its timelines in a notebook, and
`Pipeline` trains layers in your own loop.
"""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # importing torch takes seconds, and `gpipe --help` does not need it
    from torch import nn

    from gpipe_cli.library.pipeline import Pipeline
    from gpipe_cli.reporting.page.inline import InlinePage

__all__ = ["Pipeline", "__version__", "load", "result", "show"]

__version__ = "0.1.0"  # pyproject.toml reads it here


def __getattr__(name: str) -> Any:
    if name == "Pipeline":
        from gpipe_cli.library.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load(
    run_folder: str | PathLike[str],
    *,
    averaged: bool | None = None,
    checkpoint: Literal["best", "last"] = "best",
    target: str | None = None,
) -> "nn.Sequential":
    """Load the trained model of a run as a plain `nn.Sequential` of its layers, on the CPU, in eval mode, in float32.

        from gpipe_cli import load
        model = load("outputs/my_run")
        logits = model(images)

    Images have shape (N, 3, S, S), S the run's dataset.image_size; an 8-bit value v becomes (v / 255 - mean) / std by
    its dataset.mean and dataset.std, which `gpipe export` prints. Logits have shape (N, classes). Text is token ids of
    the run's vocabulary.model or tokenizer/, (N, length), with logits (N, length, vocabulary); for translation a tuple
    (source, target so far).

    Args:
        run_folder: the folder of a `gpipe train` run, trained with any K, M and devices.
        averaged: True: the moving average of the weights, with which the run was evaluated; False: the weights; None:
            the average, if the run kept one (ema_decay).
        checkpoint: the best, by the validation set or, if the run had none, by the test set; or the last. If it is
            damaged or gone, the newest intact one is loaded, with a warning.
        target: of a run with model=custom, and required there: the function that returns its layers, such as
            "mymodel:digits", found from the current folder. What the run's files name is not imported or called, so
            that a run from elsewhere runs no code: this takes its place.

    Raises InputError, one line, if the folder is not a run or lacks such weights, or if the target is not given, not
    found, or of another model.
    """
    from gpipe_cli.training.checkpoint.whole_model import load_run

    return load_run(str(run_folder), averaged, checkpoint, target)


def result(run_folder: str | PathLike[str]) -> dict[str, str | int | float | None]:
    """The numbers and settings of a run as one flat dict: a row of a DataFrame.

        from gpipe_cli import result
        pandas.DataFrame([result("outputs/a"), result("outputs/b")])[["micro_batches", "step_seconds"]]

    The keys are as in `gpipe compare format=json`, and `gpipe help KEY` explains them: measures of result.json in
    seconds, bytes and shares from 0 to 1, of several stages the largest. Shares of a step end in `_measured` and
    `_predicted` (`transfer_measured`). Measures that the run lacks are left out. Then come all settings by their dotted
    names (`model.filters`); lists are text as on the command line.

    Args:
        run_folder: the folder of a `gpipe train` or `gpipe bench` run.

    Raises InputError if the folder does not hold a run, or its result cannot be read.
    """
    from gpipe_cli.reporting.compare.run_record import flat_result

    return flat_result(Path(run_folder))


def show(folder: str | PathLike[str], *, height: int = 600, whole: bool = False) -> "InlinePage":
    """The interactive timelines of a run or a plan, for a cell of a notebook.

        from gpipe_cli import show
        show("outputs/my_run")

    Args:
        folder: of `gpipe train`, `gpipe bench` or `gpipe plan`, with a pipeline.html; or that file.
        height: of the frame, in pixels.
        whole: the whole page, with the controls that simulate other settings; False: its numbers and timelines.

    Returns an object that Jupyter displays as a frame; it needs no connection and no IPython. Raises InputError, one
    line, if the folder has no such page.
    """
    from gpipe_cli.reporting.page.inline import inline_page

    return inline_page(Path(folder), height, whole)
