from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest

from gpipe_cli import units


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (units.count, {0: "0", 999: "999", 1000: "1.00 k", 999_960: "1.00 M", 155_300_000: "155.3 M"}),
        (units.operations, {0: "0", 999: "999", 53_240_000: "53.2 M", 999.96e6: "1.0 G", 5e21: "5,000 E"}),
        (units.size, {0: "0 B", 2**20: "1.0 MiB", 1.5 * 2**30: "1.5 GiB"}),
        (units.duration, {0.0: "0.0 ms", 2e-7: "0.2 us", 3.41e-5: "34.1 us", 0.0625: "62.5 ms", 0.9999: "1.0 s"}),
        (units.duration, {59.96: "1 min 00 s", 133: "2 min 13 s", 3 * 3600 + 299: "3 h 04 min"}),
        (units.rate, {None: "-", 999.94: "999.9", 12_345.6: "12,346", 999_999.4: "999,999", 999_999.5: "1.00 M"}),
        (units.percent, {None: "-", 0.986: "98.6 %", nan: "nan %"}),
        (units.loss, {None: "-", 2.1034: "2.1034", 1000.0: "1.000e+03", nan: "nan", inf: "inf"}),
        (units.learning_rate, {None: "-", 0.04: "0.04", 1.234e-5: "1.23e-05"}),
        (units.perplexity, {None: "-", 1.0: "1.00", 9.994: "9.99", 9.996: "10.0", 999.94: "999.9", 999.96: "1,000"}),
        (units.perplexity, {999_999.4: "999,999", 999_999.5: ">1e+06", inf: ">1e+06", nan: "nan"}),
        (lambda number: units.plural(number, "micro-batch"), {1: "1 micro-batch", 4: "4 micro-batches"}),
        (lambda noun: units.plural(2, noun), {"process": "2 processes", "box": "2 boxes", "index": "2 indexes"}),
    ],
)
def test_numbers_are_read_by_people(shown: Callable[[Any], str], words: dict[Any, str]) -> None:
    assert {number: shown(number) for number in words} == words


def test_rounded_parts_add_up() -> None:
    """Each of them by itself would be rounded down, to 0.2 of 0.4 in all; a part may be below 0."""
    assert units.round_preserving_sum({"a": 0.14, "b": 0.13, "c": 0.13}) == {"a": 0.2, "b": 0.1, "c": 0.1}
    assert units.round_preserving_sum({"a": 10.16, "b": -0.06}) == {"a": 10.2, "b": -0.1}
    assert units.round_preserving_sum({}) == {}
