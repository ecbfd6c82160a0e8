import pytest
from reporting_runs import plan

from gpipe_cli.reporting.plots.timeline_values import IDLE, SHARES, in_percent
from gpipe_cli.reporting.run.measurement import StepMedians
from gpipe_cli.reporting.run.step_breakdown import comparison, difference, measured_breakdown


def test_medians_are_scaled_to_a_whole() -> None:
    measured = StepMedians(warm_up_steps=0)
    assert measured_breakdown(measured) is None
    for name in ("bubble", "transfer", "update"):
        measured.add(dict.fromkeys(SHARES, 0.0) | {name: 0.4, "compute": 0.6})
    assert measured_breakdown(measured) == dict.fromkeys(SHARES, 0.0) | {"compute": 1.0}  # medians: 0.6, all others 0


def test_what_is_shown_adds_up() -> None:
    """Rounded by themselves the seven would be 100.1 %, and the idle ones 0.1 less than idle."""
    thirds = dict(zip(SHARES, (0.40046, 0.1, 0.05, 0.22484, 0.11247, 0.06174, 0.05049), strict=True))
    shown = in_percent(thirds)
    assert sum(shown[name] for name in SHARES) == pytest.approx(100)
    assert shown["idle"] == pytest.approx(sum(shown[name] for name in IDLE))
    assert all(abs(shown[name] - 100 * thirds[name]) < 0.1 for name in SHARES)
    assert set(in_percent(dict.fromkeys(SHARES, 0.0)).values()) == {0}


def test_of_many_stages_the_fullest_is_told() -> None:
    sizes = tuple(2**20 * n for n in (5, 9, 7, 3, 2))
    lines = list(comparison(plan(), 0.06, sizes, [n - 2**20 for n in sizes]))
    assert lines == [
        ("predicted", "60.0 ms a step, measured 60.0 ms (as predicted)"),
        ("", "the fullest, stage 1: 9.0 MiB of activations, counted 8.0 MiB (11 % less)"),
    ]


@pytest.mark.parametrize(
    ("predicted", "found", "words"),
    [
        (100, 88, "12 % less"),
        (100, 100.4, "as predicted"),
        (1, 21, "21 times as much"),
        (3, 1, "0.33 times as much"),
        (0, 5, "nothing was predicted"),
    ],
)
def test_differences_in_words(predicted: float, found: float, words: str) -> None:
    assert difference(predicted, found) == words
