"""The settings of a run as sinks get them: by dotted keys, as numbers, switches and texts."""

import math
from dataclasses import asdict
from functools import cache
from typing import Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import choices, settings, show
from gpipe_cli.reporting.sinks.sink import Value
from gpipe_cli.results.files import flattened


def hyperparameters(config: TrainConfig) -> dict[str, Value]:
    """The settings by their dotted keys, `model.filters`: numbers and switches as they are, all else as text. What is
    null is left out, so that no column has text beside numbers."""
    known = flattened(asdict(config), whole=all_settings())  # the free arguments of a custom model are one setting

    def plain(value: Any) -> Value:
        return value if isinstance(value, int | float) and math.isfinite(value) else show(value)

    return {key: plain(value) for key, value in known if value is not None}


@cache
def all_settings() -> dict[str, bool]:
    """Every setting that some run may have, without groups, and whether it is a switch."""
    keys = settings(TrainConfig)
    groups = {key.rpartition(".")[0] for key in keys}
    return {key: choices(TrainConfig, key) == ["true", "false"] for key in keys if key not in groups}
