"""Fine-tunes a pretrained model with several seeds, and compares the mean of their accuracies with the paper's."""

from collections.abc import Sequence
from statistics import mean, stdev

from gpipe_cli.config.schema import quote
from gpipe_cli.errors import InputError
from gpipe_cli.reproduction.comparison import Row, Shown, compare_rows, make_table
from gpipe_cli.reproduction.runner import Findings, Runner
from gpipe_cli.units import plural


def reproduce(
    runner: Runner, top1: float, previous_best: float, pretraining: Sequence[str], fine_tuning: Sequence[str]
) -> Findings:
    """``top1``, ``previous_best``: the paper's; ``pretraining``, ``fine_tuning``: settings of the runs when these are
    smaller than the paper's."""
    seeds = range({"paper": 5, "small": 3, "smoke": 1}[runner.scale])
    runner.check_not_given({"seed": f"this recipe runs seeds 0 to {seeds[-1]} and takes their mean"})
    is_given = runner.setting_value("init_from") not in (None, "null")
    if not is_given and not runner.is_small:
        raise InputError(
            "init_from=null: the paper's scale begins with the ImageNet run, which takes weeks; make it with gpipe "
            "reproduce imagenet_amoebanet_b scale=paper and give init_from=FOLDER of its run; scale=small makes its own"
        )
    smaller = fine_tuning if runner.is_small else ()
    harmless = "init_from", "partitions", "partition", "schedule", "recompute"
    comparable = runner.scale == "paper" and not runner.incomparable_settings(*harmless)
    start, others = list[str](), list[Row]()
    if not is_given:
        runner = runner.without("init_from")
        pretrained = runner.train("pretrained", "init_from=null", "seed=0", *pretraining)
        start = [f"init_from={quote(runner.folder / 'pretrained')}"]
        others.append(Row("pretrained run, on its own classes", pretrained["test"]["top1"], ".2%"))
    runs = [runner.train(f"seed_{seed}", f"seed={seed}", *start, *smaller) for seed in seeds]
    if not is_given and runner.scale == "small":
        from_scratch = runner.train("from_scratch", "init_from=null", "seed=0", *smaller)
        others.append(Row("from scratch, seed 0", from_scratch["test"]["top1"], ".2%"))
    tests = [{"seed": seed, **run["test"]} for seed, run in zip(seeds, runs, strict=True)]
    accuracies = [test["top1"] for test in tests]
    deviation = 100 * stdev(accuracies) if len(runs) > 1 else None
    rows = [
        Row(f"top-1, mean of {plural(len(runs), 'run')}", mean(accuracies), ".2%", paper=top1),
        Row("standard deviation, points", deviation, ",.2f"),
        Row("best before the paper", paper=previous_best),
        *others,
    ]
    columns = (
        Shown("seed", "seed"),
        Shown("top-1", "top1", ".2%", "measured"),
        Shown("loss", "loss", ",.4f", "measured"),
    )
    tables = (
        compare_rows(f"Fine-tuned, test set of {runs[0]['dataset']}", rows, comparable, paper_form=".1%"),
        make_table("Each run", columns, tests),
    )
    of_a_sample = f"of a sample of {plural(len(runs), 'run')} that differ only in their seed; the paper prints none"
    return Findings(tables, (("deviation", of_a_sample),), comparable=comparable)
