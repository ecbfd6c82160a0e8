from itertools import product
from pathlib import Path

from reporting_runs import log

from gpipe_cli.reporting.tables.check import CheckReport, show_check
from gpipe_cli.verify.self_check import MODES, Row, Variant


def test_a_variant_is_in_one_line_of_the_table() -> None:
    """The reference of 1f1b had a line, within tolerance of gpipe's, and was also counted in a line `identical`."""
    variants = [Variant(k, 4, *rest, "in_process") for *rest, k in product(("gpipe", "1f1b"), MODES, (1, 2))]
    rows = [Row(variant, "identical") for variant in variants]
    rows[0], rows[6] = Row(variants[0], "reference"), Row(variants[6], "within tolerance", difference=7e-8)
    console, file = log()
    show_check(console, Path(), CheckReport(tuple(rows), 5.7, {"precision": "float32"}))
    assert [" ".join(line.split()) for line in file.getvalue().splitlines() if "in_process" in line] == [
        f"1 gpipe {MODES[0]} in_process reference",
        "1, 2 gpipe all three in_process identical (5 others)",
        f"1 1f1b {MODES[0]} in_process within tolerance (7.0e-08)",
        "1, 2 1f1b all three in_process identical (5 others)",
    ]
