"""Colours of micro-batches, checked in the space that people see in."""

import math
from itertools import pairwise

import pytest

from gpipe_cli.reporting.plots.palette import Colour, colour, oklch, rgb


def oklab(colour: Colour) -> tuple[float, float, float]:
    """Lightness, green to red, blue to yellow: the way back from sRGB, with the numbers of its author."""
    parts = [part / 255 for part in rgb(colour)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    medium = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * medium - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * medium + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * medium - 0.8086757660 * short,
    )


def test_colours_are_mixed_as_asked_for() -> None:
    lightness, a, b = oklab(oklch(0.7, 0.08, 30))
    assert lightness == pytest.approx(0.7, abs=0.004)
    assert (math.hypot(a, b), math.degrees(math.atan2(b, a))) == (pytest.approx(0.08, abs=0.004), pytest.approx(30, 2))
    assert len(oklch(0.9, 0.5, 200)) == 7, "no screen shows this; the nearest is taken"


def test_lightness_tells_kinds_of_actions_and_yellow_micro_batches() -> None:
    """Blue against yellow is what most colour-blind people see; lightness belongs to the kind of action."""
    light = {}
    for what in ("R", "F", "B"):
        lightness, _, yellow = zip(*(oklab(colour(what, m, 16)) for m in range(16)), strict=True)  # type: ignore[arg-type]
        assert all(later > earlier - 0.003 for earlier, later in pairwise(yellow))  # whole numbers of 255 are coarse
        assert yellow[-1] - yellow[0] > 0.09
        assert max(lightness) - min(lightness) < 0.02
        light[what] = lightness[0]
    assert light["R"] > light["F"] + 0.1 > light["B"] + 0.25
