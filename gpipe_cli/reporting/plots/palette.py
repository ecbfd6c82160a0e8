"""The colours of a timeline: hue encodes the micro-batch, lightness the kind of action.

Hues run from blue through red to yellow: a later micro-batch is always yellower, a difference that the common kinds of
colour blindness preserve. Lightness is uniform across hues, because colours are mixed in OKLCH (Ottosson, 2020, "A
perceptual color space for image processing"). Bars that are not actions are grey.
"""

import math
from functools import cache

from gpipe_cli.reporting.plots.timeline_values import BarKind

Colour = str  # `#1f77b4`

FIRST_HUE, LAST_HUE = 262.0, 448.0  # degrees: from blue to yellow, 88 + 360
_LIGHTNESS_AND_CHROMA = {"F": (0.76, 0.12), "R": (0.91, 0.055), "B": (0.55, 0.13), "I": (0.6, 0.135), "W": (0.43, 0.1)}

INK, PALE_INK, GRID = "#25262c", "#71737d", "#d5d6dc"
IDLE, IDLE_LINE = "#f0f0f2", "#d0d0d6"  # background of an idle device, and the lines of its hatching
WAITING, TRANSFER, UPDATE = "#e0e0e5", "#8a8c96", "#3e404a"
_NEUTRAL_COLOURS = {"waiting": WAITING, "transfer": TRANSFER, "update": UPDATE}
KIND_NAMES = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "backward for inputs",
    "W": "backward for weights",
    "waiting": "waiting",
    "transfer": "transfer",
    "update": "weight update",
}
OTHERWISE_IDLE = "other idle time"  # legend entry for time without a bar


@cache
def colour(what: BarKind, micro_batch: int | None, micro_batches: int) -> Colour:
    """The colour of a bar; ``micro_batches`` is M."""
    if what in _NEUTRAL_COLOURS:
        return _NEUTRAL_COLOURS[what]
    return _blue_to_yellow(*_LIGHTNESS_AND_CHROMA[what], micro_batch or 0, micro_batches)


def run_colour(position: int, count: int) -> Colour:
    """The colour of run ``position`` (from 0) of ``count``, from the hues of micro-batches."""
    return _blue_to_yellow(0.58, 0.15, position, count)


def _blue_to_yellow(lightness: float, chroma: float, position: int, count: int) -> Colour:
    share = position / max(1, count - 1)
    return oklch(lightness, chroma, FIRST_HUE + share * (LAST_HUE - FIRST_HUE))


def oklch(lightness: float, chroma: float, hue_degrees: float) -> Colour:
    """The sRGB colour; chroma is reduced until the colour is in the sRGB gamut."""
    hue = math.radians(hue_degrees)
    while True:
        linear = _linear(lightness, chroma * math.cos(hue), chroma * math.sin(hue))
        if all(-1e-4 <= part <= 1 + 1e-4 for part in linear) or chroma < 1e-3:
            shown = (min(1.0, max(0.0, part)) for part in linear)
            gamma = (12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055 for part in shown)
            return "#" + bytes(round(255 * part) for part in gamma).hex()
        chroma *= 0.97


def _linear(lightness: float, a: float, b: float) -> tuple[float, float, float]:
    """Oklab to linear sRGB, with Ottosson's coefficients."""
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
