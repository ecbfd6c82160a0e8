"""Trains a model on images, and compares its accuracy and its size with the paper's."""

from collections.abc import Sequence

from gpipe_cli.reproduction.comparison import Row, compare_parameters, compare_rows, describe_training
from gpipe_cli.reproduction.runner import Findings, Runner


def reproduce(
    runner: Runner, top1: float, top5: float, model: str, parameters: float, counted: Sequence[str]
) -> Findings:
    """``top1``, ``top5``, ``parameters``: the paper's, of its ``model``; ``counted``: settings to count them with."""
    harmless = "partitions", "partition", "schedule", "recompute"
    comparable = runner.scale == "paper" and not runner.incomparable_settings(*harmless)
    trained = runner.train("trained")
    test = trained["test"]
    rows = (
        Row("top-1", test["top1"], ".2%", paper=top1),
        Row("top-5", test["top5"], ".2%", paper=top5),
        Row("loss", test["loss"], ".4f"),
    )
    accuracies = compare_rows(f"Test set of {trained['dataset']}", rows, comparable, paper_form=".1%")
    size = compare_parameters(model, parameters, runner.count_parameters(*counted))
    notes = (
        ("trained", describe_training(trained)),
        ("counted", f"from the paper's configuration with {' '.join(counted)}, dry_run=true"),
    )
    return Findings((accuracies, size), notes, comparable=comparable)
