"""Trains a model that translates, and evaluates it. No difference from the paper is taken, as its pairs of sentences
are not public."""

from collections.abc import Sequence

from gpipe_cli.reproduction.comparison import Row, compare_parameters, compare_rows, describe_training
from gpipe_cli.reproduction.runner import Findings, Runner
from gpipe_cli.units import plural


def reproduce(
    runner: Runner,
    model: str,
    parameters: float,
    counted: Sequence[str],
    nll: float | None = None,
    bleu: float | None = None,
) -> Findings:
    """``parameters``, ``nll`` (nats a token), ``bleu``: the paper's, of its ``model``; ``counted``: settings to count
    parameters with."""
    sentences = {"paper": "null", "small": "100", "smoke": "1"}[runner.scale]  # null: all of the test set
    trained = runner.train("trained")
    evaluated = runner.evaluate("trained", "checkpoint=last", f"decode.sentences={sentences}")
    translation = evaluated["translation"]
    title = (
        f"Test set of {trained['dataset']}: {plural(evaluated['samples'], 'pair')}, {translation['sentences']:,} "
        f"translated with beam {translation['beam']}"
    )
    rows = (
        Row("NLL, nats a token", evaluated["loss"], ",.2f", paper=nll),
        Row("perplexity", evaluated["perplexity"], ",.2f"),
        Row("... of a unigram model", evaluated["unigram_perplexity"], ",.2f"),
        Row("BLEU", translation["bleu"], ",.2f", paper=bleu),
        Row("... of copying the source", translation["bleu_copy"], ",.2f"),
        Row("chrF", translation["chrf"], ",.2f"),
        Row("... of copying the source", translation["chrf_copy"], ",.2f"),
    )
    size = compare_parameters(model, parameters, runner.count_parameters(*counted))
    notes = (
        ("trained", describe_training(trained)),
        ("counted", f"from the paper's configuration with {' '.join(counted)}, dry_run=true"),
    )
    return Findings((compare_rows(title, rows, comparable=False), size), notes, comparable=False)
