"""Where the time of a step went, measured and predicted: the paper's overhead breakdown (NeurIPS section 3.1)."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console

from gpipe_cli.reporting.plots.timeline_values import BUSY, IDLE, SHARES, to_percent
from gpipe_cli.reporting.run.lines import align_or_stack, print_fields
from gpipe_cli.reporting.run.measurement import StepMedians
from gpipe_cli.results.run import RunResult
from gpipe_cli.units import duration, duration_range, percent, size

if TYPE_CHECKING:  # imports torch
    from gpipe_cli.planner.plan import Plan

STAGES_SHOWN = 4  # with more stages, only the fullest is shown
COMPARED_STEPS = 20  # steps done in this process before the prediction is compared
_LARGE = 2.0  # a ratio of at least this, or at most its inverse, is written as a factor


def measured_breakdown(medians: StepMedians) -> dict[str, float] | None:
    """The median over steps of each of SHARES, rescaled to sum to 1, as in every step; None if none is known."""
    shares = {name: share for name in SHARES if (share := medians.median(name)) is not None}
    total = sum(shares.values())
    return {name: share / (total or 1.0) for name, share in shares.items()} or None


def show_shares(
    console: Console, kinds: Mapping[str, Mapping[str, float] | None], ideal_bubble: float, plan: "Plan"
) -> None:
    """Shows a small table, a line for each kind of breakdown that is known, and the ideal bubble, 0 to 1.

    % of a step  compute recompute  update    idle =  bubble imbalance transfer set-up
    measured        58.0      18.3     2.2    21.5 =    14.2       1.5     2.3    3.5
    """
    rows = [("% of a step", [*map(share_label, BUSY), "  idle", "=", *map(share_label, IDLE)])]
    for kind, breakdown in kinds.items():
        if breakdown is not None:
            shown = {name: f"{share:.1f}" for name, share in to_percent(breakdown).items()}
            rows.append((kind, [*map(shown.__getitem__, (*BUSY, "idle")), "=", *map(shown.__getitem__, IDLE)]))
    print_fields(console, align_or_stack(console, rows))
    ideal = f"{percent(ideal_bubble)}, (K-1)/(M+K-1) for K equal devices that only compute"
    if any(breakdown["bubble"] < ideal_bubble for breakdown in kinds.values() if breakdown):
        one_each = len(plan.balance) == len(plan.device_bytes)  # interleaved is then 1f1b
        formula_holds = (plan.chosen_order or plan.config.schedule) in ("gpipe", "1f1b", *["interleaved"] * one_each)
        causes = [] if formula_holds else [f"schedule={plan.schedule_name} idles less"]
        causes += ["recomputation fills part of the idle time"] * any(plan.recomputed)
        whole = "it is a share of the whole step, the update and other idle time included"
        ideal += f"; above it is smaller, as {' and '.join(causes) or whole}"
    print_fields(console, [("ideal bubble", ideal)])


def share_label(name: str) -> str:
    """`set-up` for `set_up`."""
    return name.replace("_", "-")


def compare_with_prediction(result: RunResult) -> Iterable[tuple[str, str]]:
    """Labelled lines: predicted and measured step and, if they were counted, the saved activations of a
    mini-batch."""
    prediction, seconds = result.prediction, result.step_seconds
    assert prediction is not None
    assert seconds is not None
    low, high = step_range = prediction.step_range or (prediction.step_seconds, prediction.step_seconds)
    nearest = min(max(seconds, low), high)
    times = f"{duration_range(step_range)} a step, measured {duration(seconds)}"
    yield "predicted", f"{times} ({format_difference(nearest, seconds, 'as long')})"
    if result.predicted_activation_bytes and (counted_bytes := result.activation_bytes):
        stages = range(len(counted_bytes))
        fullest = max(stages, key=lambda stage: counted_bytes[stage])
        for stage in stages if len(stages) <= STAGES_SHOWN else [fullest]:
            name = f"stage {stage}" if len(stages) <= STAGES_SHOWN else f"stage {stage}, the fullest"
            predicted, counted = result.predicted_activation_bytes[stage], counted_bytes[stage]
            sizes = f"{size(predicted)} of activations, counted {size(counted)}"
            yield "", f"{name}: {sizes} ({format_difference(predicted, counted)})"
    if not prediction.measured:
        yield "", f"predicted from {prediction.source}; hardware=auto cost=profile times your layers"


def format_difference(predicted: float, measured: float, times: str = "as much") -> str:
    """`4 % more`, `12 % less`, `as predicted`; a large one `2.4 times as much`."""
    if predicted <= 0:
        return "as predicted" if measured == predicted else "nothing was predicted"
    factor = measured / predicted
    if not 1 / _LARGE < factor < _LARGE:
        return f"{factor:,.{0 if factor >= 10 else 1 if factor >= 1 else 2}f} times {times}"
    share = round(100 * (factor - 1))
    return "as predicted" if share == 0 else f"{abs(share)} % {'more' if share > 0 else 'less'}"
