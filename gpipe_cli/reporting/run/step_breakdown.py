"""Where the time of a step went, measured beside predicted: the paper's overhead breakdown (NeurIPS section 3.1).

Shares of stage-time that add up to 1. Stages are busy with compute, recompute and the weight update, and idle for four
causes: bubble, load imbalance, exposed transfers and set-up. What was measured and what was predicted never share a
column.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from gpipe_cli.reporting.plots.timeline_values import BUSY, IDLE, SHARES, idle, in_percent
from gpipe_cli.reporting.run.description import Prediction
from gpipe_cli.units import duration, percent, size

STAGES_SHOWN = 4  # of more than these only the fullest one
COMPARED_STEPS = 20  # done in this process when the prediction is compared
_LARGE = 2.0  # a difference is written as a factor from here on, and from its inverse down


class MeasuredShares:
    """Medians over the steps of a run; warm-up steps count only while there are no others."""

    def __init__(self) -> None:
        self._shares = {name: array("d") for name in SHARES}
        self._warm_up = True  # what is kept is that of warm-up steps

    def add(self, breakdown: Mapping[str, float], warm_up: bool) -> None:
        """One step, with what was measured of it."""
        if self._warm_up and not warm_up:
            for values in self._shares.values():
                del values[:]
            self._warm_up = False
        for name, values in self._shares.items():
            values.append(breakdown[name])

    @property
    def breakdown(self) -> dict[str, float] | None:
        """SHARES, each a median, scaled so that together they are 1 as those of every step are; None without any."""
        if not self._shares[SHARES[0]]:
            return None
        medians = {name: median(values) for name, values in self._shares.items()}
        total = sum(medians.values())
        return {name: value / total for name, value in medians.items()} if total > 0 else medians


def share_result(measured: MeasuredShares, prediction: Prediction | None, ideal_bubble: float) -> dict[str, Any]:
    """The entries of result.json: ``breakdown``, of it ``idle`` and ``bubble``, and ``prediction``."""
    known = {} if prediction is None else asdict(prediction)
    kinds = {"measured": measured.breakdown, "predicted": known.pop("breakdown", None)}
    return {
        "breakdown": kinds,
        "idle": {kind: None if shares is None else idle(shares) for kind, shares in kinds.items()},
        "bubble": {kind: None if shares is None else shares["bubble"] for kind, shares in kinds.items()}
        | {"ideal": ideal_bubble},
        "prediction": known or None,
    }


def share_facts(result: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Labelled lines of the summary, from the entries of result.json; none where nothing was measured."""
    breakdown = result.get("breakdown")
    if breakdown is not None and breakdown["measured"] is not None:
        yield from share_lines({kind: shares for kind, shares in breakdown.items() if shares is not None})
        yield ideal_bubble_line(result["bubble"]["ideal"])


def share_lines(kinds: Mapping[str, Mapping[str, float]]) -> Iterable[tuple[str, str]]:
    """A small table: a heading, and a line for each kind of breakdown, `measured` or `predicted`.

    % of a step  compute recompute  update    idle =  bubble imbalance transfer set-up
    measured        58.0      18.3     2.2    21.5 =    14.2       1.5     2.3    3.5
    """
    columns = (*BUSY, "idle", *IDLE)

    def line(cells: Sequence[str]) -> str:
        widths = [max(len(share_word(name)), len("100.0")) for name in columns]
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return f"{' '.join(padded[: len(BUSY)])}  {padded[len(BUSY)]} = {' '.join(padded[len(BUSY) + 1 :])}"

    yield "% of a step", line([share_word(name) for name in columns])
    for kind, breakdown in kinds.items():
        shown = in_percent(breakdown)
        yield kind, line([f"{shown[name]:.1f}" for name in columns])


def ideal_bubble_line(ideal_bubble: float) -> tuple[str, str]:
    """What the measured and the predicted bubble are compared with."""
    return "ideal bubble", f"{percent(ideal_bubble)}, (K-1)/(M+K-1): stages are equal and do nothing but compute"


def share_names() -> list[str]:
    """The rows of a table of shares: `idle`, and below it the causes, `of it bubble`."""
    return ["of it " * (name in IDLE) + share_word(name) for name in (*BUSY, "idle", *IDLE)]


def share_cells(breakdown: Mapping[str, float] | None) -> list[str]:
    """The shares in the rows of ``share_names``; `-` where there are none."""
    shown = None if breakdown is None else in_percent(breakdown)
    return ["-" if shown is None else f"{shown[name]:.1f} %" for name in (*BUSY, "idle", *IDLE)]


def share_word(name: str) -> str:
    """`set-up` for `set_up`."""
    return name.replace("_", "-")


def comparison(
    prediction: Prediction,
    step_seconds: float,
    predicted_bytes: Sequence[int] | None,
    counted_bytes: Sequence[int] | None,
) -> Iterable[tuple[str, str]]:
    """Labelled lines: the prediction of a run against what became of it.

    Args:
        step_seconds: median over the steps without warm-up.
        predicted_bytes, counted_bytes: saved activations of one mini-batch, per stage; None if they were not counted.
    """
    times = f"{duration(prediction.step_seconds)} a step, measured {duration(step_seconds)}"
    yield "predicted", f"{times} ({difference(prediction.step_seconds, step_seconds, 'as long')})"
    if predicted_bytes and counted_bytes:
        stages = range(len(counted_bytes))
        fullest = max(stages, key=lambda stage: counted_bytes[stage])
        for stage in stages if len(stages) <= STAGES_SHOWN else [fullest]:
            name = f"stage {stage}" if len(stages) <= STAGES_SHOWN else f"the fullest, stage {stage}"
            predicted, counted = predicted_bytes[stage], counted_bytes[stage]
            sizes = f"{size(predicted)} of activations, counted {size(counted)}"
            yield "", f"{name}: {sizes} ({difference(predicted, counted)})"
    if not prediction.measured:
        yield "", f"from {prediction.source}; cost=measured times the layers themselves"


def difference(predicted: float, found: float, times: str = "as much") -> str:
    """`4 % more`, `12 % less`, `as predicted`; a large one `2.4 times as much`."""
    if predicted <= 0:
        return "as predicted" if found == predicted else "nothing was predicted"
    factor = found / predicted
    if not 1 / _LARGE < factor < _LARGE:
        return f"{factor:,.{0 if factor >= 10 else 1 if factor >= 1 else 2}f} times {times}"
    share = round(100 * (factor - 1))
    return "as predicted" if share == 0 else f"{abs(share)} % {'more' if share > 0 else 'less'}"
