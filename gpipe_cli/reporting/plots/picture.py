"""Figures, their style and their files. Import this only to draw: importing matplotlib takes half a second."""

import io
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from numpy.typing import NDArray

from gpipe_cli.reporting.plots.palette import PALE_INK
from gpipe_cli.system.files import write_atomic

Picture = NDArray[np.uint8]  # shape (height, width, 3)

DPI = 160
WIDTH_INCHES = 11.0
# TensorBoard shows pictures about 350 pixels wide: in a figure this narrow, text stays readable.
NARROW_INCHES = 4.0


def new_figure(height_inches: float, width_inches: float = WIDTH_INCHES) -> Figure:
    return Figure(figsize=(width_inches, height_inches), dpi=DPI, facecolor="white")


def hide_frame(axes: Axes) -> None:
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(axis="both", which="both", length=0, pad=5, labelsize=9, labelcolor=PALE_INK)
    axes.set_axisbelow(True)


def to_pixels(figure: Figure) -> Picture:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def png(picture: Picture) -> bytes:
    content = io.BytesIO()
    imsave(content, picture, format="png", dpi=DPI)
    return content.getvalue()


def write_picture(path: Path, picture: Picture) -> None:
    write_atomic(path, png(picture))
