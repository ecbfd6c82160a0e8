"""Writes the list of timm's models in the package, for the installed timm: building all of them takes many minutes.

python .ci/list_timm_models.py > gpipe_cli/models/timm_models.csv
"""

import csv
import sys
import warnings

import timm
import torch

from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.models.timm_models import as_sequential


def describe_model(name: str) -> tuple[str, int, int] | None:
    """Family, number of layers and of parameters of a model of timm; None if it is not a chain. Allocates no memory."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = timm.create_model(name)
    try:
        layers = len(as_sequential(model))
    except InvalidSettingError:
        return None
    return type(model).__name__, layers, sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    rows = ((name, *(describe_model(name) or ())) for name in timm.list_models())
    csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
