"""The models of timm and which of them are chains, read from timm_models.csv, which `.ci/list_timm_models.py` writes:
building all takes many minutes."""

import csv
from difflib import get_close_matches
from fnmatch import filter as matching
from importlib import resources

from gpipe_cli.errors import InputError

Row = tuple[str, str, int, int]  # name, family, layers, parameters


def timm_models() -> dict[str, list[str]]:
    """The name of each of timm's models -> the rest of its row in the file; [] for a model that is not a chain."""
    text = resources.files("gpipe_cli.models").joinpath("timm_models.csv").read_text("utf-8")
    return {name: rest for name, *rest in csv.reader(text.splitlines())}


def list_sequential_models(pattern: str) -> tuple[list[Row], int]:
    """Timm's models that match a shell pattern and are chains, and how many other names match. Raises InputError if
    no name matches."""
    rows = timm_models()
    names = matching(rows, pattern)
    if not names:
        near = get_close_matches(pattern.strip("*"), rows, n=3)
        remedy = f"did you mean {' or '.join(near)}?" if near else "write it as 'resnet*'"
        raise InputError(f"{pattern}: timm has no model of such a name; {remedy}")
    matches = [(name, rows[name][0], int(rows[name][1]), int(rows[name][2])) for name in names if rows[name]]
    return matches, len(names) - len(matches)
