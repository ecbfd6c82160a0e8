"""Where the time of a step went, measured beside predicted: the paper's overhead breakdown (NeurIPS section 3.1).

Shares of stage-time that add up to 1: compute, recompute, bubble, load imbalance, exposed transfers, weight update and
set-up. Beside them stands the bubble alone, the idle share of the pipeline's window, which is what (K-1)/(M+K-1) of
section 2.3 speaks of. What was measured and what was predicted never share a column.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from gpipe_cli.reporting.description import Prediction
from gpipe_cli.reporting.timeline_view import SHARES
from gpipe_cli.reporting.units import duration, percent, size

FIRST_LINE = 3  # of the shares; these and the others fit 80 columns behind a label
STAGES_SHOWN = 4  # more than these are told by the fullest one
COMPARED_STEPS = 20  # done in this process when the prediction is compared


class MeasuredShares:
    """Medians over the steps of a run; warm-up steps count only while there are no others."""

    def __init__(self) -> None:
        self._shares = {name: array("d") for name in SHARES}
        self._bubbles = array("d")
        self._warm_up = True  # what is kept is that of warm-up steps

    def add(self, breakdown: Mapping[str, float], bubble: float, warm_up: bool) -> None:
        """One step, with what was measured of it."""
        if self._warm_up and not warm_up:
            for values in (*self._shares.values(), self._bubbles):
                del values[:]
            self._warm_up = False
        for name, values in self._shares.items():
            values.append(breakdown[name])
        self._bubbles.append(bubble)

    @property
    def breakdown(self) -> dict[str, float] | None:
        """SHARES, each a median, scaled so that together they are 1 as those of every step are; None without any."""
        if not self._shares[SHARES[0]]:
            return None
        medians = {name: median(values) for name, values in self._shares.items()}
        total = sum(medians.values())
        return {name: value / total for name, value in medians.items()} if total > 0 else medians

    @property
    def bubble(self) -> float | None:
        """Idle share of the pipeline's window; None without any."""
        return median(self._bubbles) if self._bubbles else None


def share_result(measured: MeasuredShares, prediction: Prediction | None, ideal_bubble: float) -> dict[str, Any]:
    """The entries of result.json: ``breakdown``, ``bubble`` and ``prediction``."""
    known = {} if prediction is None else asdict(prediction)
    breakdown, bubble = known.pop("breakdown", None), known.pop("bubble", None)
    return {
        "breakdown": {"measured": measured.breakdown, "predicted": breakdown},
        "bubble": {"measured": measured.bubble, "predicted": bubble, "ideal": ideal_bubble},
        "prediction": known or None,
    }


def share_facts(result: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Labelled lines of the summary, from the entries of result.json; none where nothing was measured."""
    bubble, breakdown = result.get("bubble"), result.get("breakdown")
    if bubble is not None and bubble["measured"] is not None:
        fact = f"{percent(bubble['measured'])} measured, {percent(bubble['ideal'])} ideal (K-1)/(M+K-1)"
        known = bubble["predicted"] is not None
        yield "bubble", f"{fact}, {percent(bubble['predicted'])} predicted" if known else fact
    if breakdown is not None and breakdown["measured"] is not None:
        label = "step"
        for kind in ("measured", "predicted"):
            if breakdown[kind] is not None:
                for line in share_lines(kind, breakdown[kind]):
                    yield label, line
                    label = ""


def share_lines(kind: str, breakdown: Mapping[str, float]) -> tuple[str, str]:
    """`measured: compute 65.6 %, recompute 22.5 %, bubble 4.1 %,` and the rest."""
    words = [f"{share_word(name)} {percent(breakdown[name])}" for name in SHARES]
    return f"{kind}: {', '.join(words[:FIRST_LINE])},", ", ".join(words[FIRST_LINE:])


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
    yield "predicted", f"{times} ({difference(prediction.step_seconds, step_seconds)})"
    if predicted_bytes and counted_bytes:
        stages = range(len(counted_bytes))
        fullest = max(stages, key=lambda stage: counted_bytes[stage])
        for stage in stages if len(stages) <= STAGES_SHOWN else [fullest]:
            name = f"stage {stage}" if len(stages) <= STAGES_SHOWN else f"the fullest, stage {stage}"
            predicted, counted = predicted_bytes[stage], counted_bytes[stage]
            sizes = f"{size(predicted)} of activations, counted {size(counted)}"
            yield "", f"{name}: {sizes} ({difference(predicted, counted)})"
    if prediction.from_figures:
        yield "", f"from {prediction.source}; cost=measured predicts from this machine"


def difference(predicted: float, found: float) -> str:
    """`4 % more`, `12 % less`, `as predicted`."""
    if predicted <= 0:
        return "as predicted" if found == predicted else "nothing was predicted"
    share = round(100 * (found / predicted - 1))
    return "as predicted" if share == 0 else f"{abs(share):,} % {'more' if share > 0 else 'less'}"
