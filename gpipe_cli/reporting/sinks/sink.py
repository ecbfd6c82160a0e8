"""What a sink is, and the sinks of a run as one. A dry run has no remote sinks.

To add a sink, write its file here, with a class `Writer` that has the methods of `Sink`, and add the file's name to
`Logger` in config/settings.py. The setting `logger`, its help, completion and refusals follow from that.
"""

import importlib.util
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gpipe_cli.config.settings import Logger, TrainConfig
from gpipe_cli.config.typed import RefusedError, choices, settings, show, with_type
from gpipe_cli.results.files import flattened
from gpipe_cli.system.files import read_json, write_whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PROJECT = "gpipe"  # experiment or project of runs in MLflow and W&B, without MLFLOW_EXPERIMENT_NAME and WANDB_PROJECT
FLUSH_SECONDS = 10.0  # a run that is killed loses the points of no longer than this
_IDS = "loggers.json"  # a file in the run folder: logger -> the id of the run in MLflow or W&B

Value = bool | int | float | str  # value of a setting


@dataclass(frozen=True)
class SinkRun:
    """What sinks know of a run from the beginning."""

    folder: Path
    config: TrainConfig
    first_step: int  # optimizer steps done before this process began; above 0 only for a run that was resumed
    predicted: bool  # whether curves of the prediction stand beside the measured ones
    final: Sequence[str]  # tags of the final results of a run of any task, those of this run's task first
    facts: Mapping[str, str]  # the folder, the command line and the commit, under MLflow's names for them


class Sink(Protocol):
    """A place that gets what happens in a run. Steps count the optimizer steps done. Any method may raise anything."""

    # Whether it may be a server. After its first failure a remote sink gets nothing more, as no training waits for a
    # server again and again. Any other sink keeps what it could not write for the next `flush`: a disk may be full for
    # a moment only.
    remote: ClassVar[bool]
    needs: ClassVar[tuple[str, str] | None]  # the module that it imports, and the package that has that module

    def __init__(self, run: SinkRun) -> None: ...

    def settings(self, values: Mapping[str, Value]) -> None:
        """The settings by their dotted keys: once, before all else."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A point of each curve, by its tag."""

    def text(self, name: str, step: int, text: str, markdown: bool) -> None: ...

    def picture(self, name: str, step: int, picture: "NDArray[np.uint8]") -> None:
        """An image of shape (height, width, 3)."""

    def flush(self) -> None:
        """Writes or sends what waits."""

    def end(self, status: str, files: Sequence[Path]) -> None:
        """The run has ended, with this status of result.json. `files` are those worth keeping with the run."""


class Sinks:
    """All sinks of a run as one: where one fails, `failed` is called with the error, and the others still get all."""

    def __init__(self, run: SinkRun, failed: Callable[[OSError], None]) -> None:
        kinds = {name: _writer(name) for name in run.config.logger}
        self._run, self._failed = run, failed
        self._kinds = {name: kind for name, kind in kinds.items() if not (kind.remote and run.config.dry_run)}
        self._open: dict[Logger, Sink] = {}
        self._flushed = time.monotonic()

    def each(self, use: Callable[[Sink], None]) -> None:
        """Calls a method of every sink."""
        if due := time.monotonic() - self._flushed >= FLUSH_SECONDS:  # before the next point: the last step is complete
            self._flushed = time.monotonic()
        for name, kind in list(self._kinds.items()):
            try:
                sink = self._open.get(name) or self._open.setdefault(name, kind(self._run))  # imports take seconds
                if due:
                    sink.flush()
                use(sink)
            except Exception as error:  # whatever the libraries of a sink raise
                if kind.remote:
                    del self._kinds[name]
                    error = OSError(f"logger={name}: {with_type(error)}")
                elif not isinstance(error, OSError):
                    raise
                self._failed(error)


def refuse_missing(loggers: Sequence[Logger]) -> None:
    """Raises RefusedError for a logger whose package is not installed."""
    for name in loggers:
        module, package = _writer(name).needs or ("sys", "")
        if importlib.util.find_spec(module) is None:
            why = f"{name} needs {package}, which is not installed; pip install {package}, or leave {name} out"
            raise RefusedError("logger", loggers, why)


def known_id(run: SinkRun, logger: Logger) -> str | None:
    """The id that the run of this folder has there, if it has been there: resumed, it goes on there."""
    with suppress(OSError, ValueError):
        found: str | None = read_json(run.folder / _IDS).get(logger)
        return found
    return None


def keep_id(run: SinkRun, logger: Logger, run_id: str) -> None:
    """Notes the id; where it cannot be written, the run will be another one there after a resume."""
    ids: dict[str, str] = {}
    with suppress(OSError, ValueError):
        ids = read_json(run.folder / _IDS)
    with suppress(OSError):
        write_whole(run.folder / _IDS, json.dumps(ids | {logger: run_id}) + "\n")


def _writer(logger: Logger) -> type[Sink]:
    kind: type[Sink] = import_module(f"gpipe_cli.reporting.sinks.{logger}").Writer
    return kind


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
