"""The interface of a logger, and what loggers share.

To add a logger, write a module here, with a class `Logger` that has the methods of `RunLogger`, and add the module's
name to `Logger` in config/settings.py. Help, completion and checks of the setting `logger` follow from that.
"""

import importlib.util
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gpipe_cli.config.schema import allowed_words, setting_names
from gpipe_cli.config.settings import Logger, TrainConfig, flatten
from gpipe_cli.errors import InvalidSettingError, format_value
from gpipe_cli.reporting.run.description import RunContext
from gpipe_cli.system.files import read_json, write_atomic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROJECT = "gpipe"  # experiment in MLflow, project in W&B, unless MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT is set
_IDS = "loggers.json"  # a file in the run folder: logger -> the id of the run in MLflow or W&B

Value = bool | int | float | str  # value of a setting


class RunLogger(Protocol):
    """Receives the events of a run; it ignores those whose method it does not define. `step` counts optimizer steps.
    Any method may raise any exception."""

    # Whether it may be a server. A remote logger is dropped at its first failure: training never waits for a server
    # repeatedly. A local logger keeps what it could not write for the next `flush`: a full disk may be temporary.
    remote: ClassVar[bool]
    needs: ClassVar[tuple[str, str] | None]  # the module it imports, and the package that provides it

    def __init__(self, folder: Path, run: RunContext, facts: Mapping[str, str]) -> None:
        """`facts`: the folder, the command line and the commit, under MLflow's names for them."""

    def settings(self, values: Mapping[str, Value]) -> None:
        """The settings by their dotted keys; called once, before all other methods."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each curve: tag -> value."""

    def text(self, name: str, step: int, text: str, markdown: bool) -> None: ...

    def picture(self, name: str, step: int, picture: "NDArray[np.uint8]") -> None:
        """An image of shape (height, width, 3)."""

    def flush(self) -> None:
        """Writes or sends what is pending."""

    def end(self, status: str, files: Sequence[Path]) -> None:
        """The run has ended with `status`, as in result.json; `files` are worth keeping with the run."""


def check_installed(loggers: Sequence[Logger]) -> None:
    """Raises InvalidSettingError for a logger whose package is not installed."""
    for name in loggers:
        module, package = logger_class(name).needs or ("sys", "")
        if importlib.util.find_spec(module) is None:
            why = f"{name} needs {package}, which is not installed; pip install {package}, or remove {name}"
            raise InvalidSettingError("logger", loggers, why)


def read_run_id(folder: Path, logger: Logger) -> str | None:
    """The id under which `logger` has the run of this folder, which a resume continues; None if it has none yet."""
    with suppress(OSError, ValueError):
        run_id: str | None = read_json(folder / _IDS).get(logger)
        return run_id
    return None


def store_run_id(folder: Path, logger: Logger, run_id: str) -> None:
    """Stores the id that `logger` gave the run; if that fails, a resume will appear as a new run there."""
    ids: dict[str, str] = {}
    with suppress(OSError, ValueError):
        ids = read_json(folder / _IDS)
    with suppress(OSError):
        write_atomic(folder / _IDS, json.dumps(ids | {logger: run_id}) + "\n")


def logger_class(logger: Logger) -> type[RunLogger]:
    kind: type[RunLogger] = import_module(f"gpipe_cli.reporting.loggers.{logger}").Logger
    return kind


def hyperparameters(config: TrainConfig) -> dict[str, Value]:
    """The settings by their dotted keys, `model.filters`: finite numbers and switches unchanged, all others as text.
    Null settings are left out, so that no column mixes text and numbers."""
    values = flatten(asdict(config), whole=all_settings())  # free arguments of a custom model stay together

    def plain(value: Any) -> Value:
        return value if isinstance(value, int | float) and math.isfinite(value) else format_value(value)

    return {key: plain(value) for key, value in values if value is not None}


@cache
def all_settings() -> dict[str, bool]:
    """Every setting that some run may have, without groups -> whether it is a switch, true or false."""
    keys = setting_names(TrainConfig)
    groups = {key.rpartition(".")[0] for key in keys}
    return {key: allowed_words(TrainConfig, key) == ["true", "false"] for key in keys if key not in groups}
