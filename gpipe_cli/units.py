"""Formats numbers in short form with units, in ASCII, because logs are also read where UTF-8 is not available."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

GIB, MIB = 2**30, 2**20


def count(number: int) -> str:
    """`1.20 M`, `12.3 M`; numbers below 1000 as they are."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size * 0.99995:
            value = number / size
            return f"{value:.2f} {unit}" if value < 9.995 else f"{value:.1f} {unit}"
    return str(number)


def operations(number: float) -> str:
    """`12.3 G` for 1.23e10 floating-point operations; numbers below 1000 without a prefix."""
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size * 0.99995:
            return f"{number / size:.1f} {unit}" if number < size * 999.95 else f"{number / size:,.0f} {unit}"
    return f"{number:.0f}"


def percent(share: float | None) -> str:
    """`98.6 %` for 0.986; `-` for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def memory_unit(max_bytes: float) -> tuple[int, str]:
    """Bytes and name of the unit for a table of memory whose largest number is `max_bytes`."""
    return (GIB, "GiB") if max_bytes >= 10 * GIB else (MIB, "MiB")


def size(number_bytes: float) -> str:
    """`1.5 GiB`."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number_bytes >= 1024**power:
            return f"{number_bytes / 1024**power:.1f} {unit}"
    return f"{number_bytes:.0f} B"


def duration(seconds: float) -> str:
    """`34.1 us`, `62.5 ms`, `12.3 s`, `2 min 13 s`, `3 h 05 min`."""
    if 0 < seconds < 0.99995e-4:
        return f"{1e6 * seconds:.1f} us"
    if seconds < 0.9995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def duration_range(seconds: tuple[float, float]) -> str:
    """`340.0 to 410.0 ms`, `900.0 ms to 1.2 s`; `340.0 ms` if both are the same."""
    low, high = map(duration, seconds)
    if low == high:
        return high
    number, _, unit = low.partition(" ")
    return f"{number} to {high}" if high.partition(" ")[2] == unit else f"{low} to {high}"


def round_preserving_sum(parts: Mapping[str, float]) -> dict[str, float]:
    """Round each part to one decimal so that the rounded parts add up to the rounded sum (largest remainders)."""
    tenths = {name: math.floor(10 * value) for name, value in parts.items()}
    missing = round(10 * sum(parts.values())) - sum(tenths.values())
    for name in sorted(parts, key=lambda name: tenths[name] - 10 * parts[name])[:missing]:
        tenths[name] += 1
    return {name: value / 10 for name, value in tenths.items()}


def rate(per_second: float | None) -> str:
    """`512.3`, `12,345`, `1.23 M`; `-` for None."""
    if per_second is None:
        return "-"
    if per_second >= 999_999.5:  # tokens per second; more digits would not fit in a column
        return count(round(per_second))
    return f"{per_second:,.0f}" if per_second >= 999.95 else f"{per_second:.1f}"


def join_ranges(numbers: Iterable[int], to: str) -> list[str]:
    """Ascending numbers, with three or more in sequence joined by `to`: `1 to 4`, `7`, `9`, `10`."""
    groups = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    return [part for span in runs for part in ([f"{span[0]}{to}{span[-1]}"] if len(span) > 2 else map(str, span))]


def plural(number: int, noun: str) -> str:
    """`1 epoch`, `6 epochs`, `2 processes`, `2 micro-batches`, `3 entries`."""
    if number != 1:
        noun = f"{noun[:-1]}ie" if re.search("[^aeiou]y$", noun) else noun
        noun += "es" if noun.endswith(("s", "x", "z", "tch", "sh")) else "s"
    return f"{number:,} {noun}"


def first_few(names: Sequence[str], number: int = 3) -> str:
    """`cat, dog, fox, …`"""
    return ", ".join([*names[:number], *["…"][: len(names) > number]])


def loss(value: float | None) -> str:
    """`2.1034`; `-` for None."""
    if value is None:
        return "-"
    return f"{value:.4f}" if not abs(value) >= 1000 else f"{value:.3e}"  # `not` lets NaN through as nan


def perplexity(value: float | None) -> str:
    """`41.3`, `12,345`; `>1e+06` for values worse than guessing gives; `-` for None."""
    if value is None:
        return "-"
    if value >= 999_999.5:
        return ">1e+06"
    if value >= 999.95:
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def learning_rate(value: float | None) -> str:
    """`0.04`, `1.23e-05`; `-` for None."""
    return "-" if value is None else f"{value:.3g}"
