"""The curves, texts and pictures that a run's loggers receive: all are sent from this file, in the parent process.

`step` counts the steps done; accuracies are fractions, 0 to 1.
"""

import html
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.config.settings import CONFIG_FILE, Logger
from gpipe_cli.errors import describe_error
from gpipe_cli.reporting.loggers.logger import RunLogger, hyperparameters, logger_class
from gpipe_cli.reporting.page.page import PAGE
from gpipe_cli.reporting.plots.timeline_values import idle_share
from gpipe_cli.reporting.run.description import RunContext, score_fields
from gpipe_cli.reporting.run.lines import LOG
from gpipe_cli.reporting.run.measurement import format_stages
from gpipe_cli.reporting.tables.table import Column, Table, to_markdown
from gpipe_cli.results.files import RESULT_FILE
from gpipe_cli.results.metrics import METRICS, hparam_metrics, select_metrics
from gpipe_cli.results.run import RunResult, StageMemory
from gpipe_cli.schedule.placement import stages_of_devices
from gpipe_cli.training.events import Evaluated, Scores, StepDone, Translation
from gpipe_cli.units import GIB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# whether a logger is remote -> a killed run loses at most its points of the last N seconds
_FLUSH_SECONDS = {False: 1.0, True: 10.0}  # a request each time
_UPLOADED_FILES = (
    CONFIG_FILE,
    RESULT_FILE,
    LOG,
    PAGE,
    "failure.txt",
)  # files of the run folder that loggers keep with a run


class LoggerGroup:
    """Turns the events of a run into curves, texts and pictures for its loggers. If a logger fails, `failed` is called
    with its name and the error, and the others still receive everything. A dry run has no remote loggers."""

    def __init__(
        self, folder: Path, run: RunContext, result: RunResult, failed: Callable[[str, OSError], None]
    ) -> None:
        self._folder, self._run, self._failed = folder, run, failed
        self._prediction = result.prediction
        config = run.config
        self._facts = _facts(folder, result)
        kinds = {name: logger_class(name) for name in config.logger}
        self._kinds = {name: kind for name, kind in kinds.items() if not (kind.remote and config.dry_run)}
        self._open: dict[Logger, RunLogger] = {}
        self._flushed = dict.fromkeys(_FLUSH_SECONDS, time.monotonic())
        # horizontal lines to compare measured curves with
        constants = select_metrics("bubble_ideal", "idle_predicted", "bubble_predicted")
        self._constants = {metric.tag: metric.value(result) for metric in constants}

    def describe(self, config_yaml: str, banner: str) -> None:
        """Sends the settings, and the configuration and the banner as texts, so that a killed run also has them."""
        values = hyperparameters(self._run.config)
        self._for_each_logger(lambda logger: logger.settings(values))
        for name, text in (("config", config_yaml), ("banner", banner)):
            self._text(name, self._run.ready.first_step, text)
        self.flush()

    def end(self, result: RunResult) -> None:
        """Sends the final results, and ends the loggers."""
        values = ((metric, metric.value(result)) for metric in hparam_metrics(result.task))
        points = {
            f"final/{metric.hparam}": value / metric.unit.curve_size for metric, value in values if value is not None
        }
        self._draw(result.steps, points)
        files = [path for name in _UPLOADED_FILES if (path := self._folder / name).is_file()]
        self._for_each_logger(lambda logger: logger.end(result.status, files))

    def step(self, message: StepDone) -> None:
        """The curves of training; what is None is left out."""
        since = {remote: time.monotonic() - flushed for remote, flushed in self._flushed.items()}
        # the last step is complete before a new point
        self.flush([remote for remote, seconds in _FLUSH_SECONDS.items() if since[remote] >= seconds])
        scores = Scores(message.tokens, message.cross_entropy, message.top1, message.top5, averaged=False)
        named = {f"train/{name}": value for name, value in score_fields(self._run.config.task, scores).items()}
        whole = message.samples == (self._run.config.batch_size or message.samples)  # the last batch may be short
        if self._prediction is not None and whole:
            named |= _keyed_by_tag({"step_over_predicted": message.seconds / self._prediction.step_seconds})
        memory = _memory_curves(message, self._run.spec.layout.device_of_stage)
        self._draw(message.step, named | _training_curves(message) | memory)

    def add_breakdown(self, step: int, breakdown: Mapping[str, float]) -> None:
        shares = {f"step/{share}": value for share, value in breakdown.items()}
        measured = _keyed_by_tag({"idle_measured": idle_share(breakdown), "bubble_measured": breakdown["bubble"]})
        self._draw(step, {**measured, **shares, **self._constants})

    def memory(self, step: int, processes: Iterable[StageMemory]) -> None:
        """The parts of each process's peak memory in GiB, which add up to it."""
        for process in processes:
            name = "all_stages" if process.stage is None else f"stage_{process.stage}"
            parts = {part: size / GIB for part, size in asdict(process).items() if part != "stage"}
            self._draw(step, {f"memory_parts/{name}_{part}_gib": size for part, size in parts.items()})

    def add_evaluation(self, message: Evaluated) -> None:
        """The curves of the test or the validation set, and some of its sentences with their translations."""
        scores = score_fields(self._run.config.task, message.scores)
        self._draw(message.step, {f"{message.split}/{name}": value for name, value in scores.items()})
        if message.translations:
            self._text("translations", message.step, _translation_table(message.translations), markdown=True)
        self.flush()

    def picture(self, name: str, step: int, picture: "NDArray[np.uint8]") -> None:
        """An image of shape (height, width, 3)."""
        self._for_each_logger(lambda logger: logger.picture(name, step, picture))
        self.flush()

    def flush(self, kinds: Collection[bool] = (False, True)) -> None:
        """Has the local loggers (False), and the remote ones (True), write what is pending."""
        self._flushed |= dict.fromkeys(kinds, time.monotonic())
        self._for_each_logger(lambda logger: logger.flush() if logger.remote in kinds else None)

    def _draw(self, step: int, points: Mapping[str, float | None]) -> None:
        values = {tag: value for tag, value in points.items() if value is not None}
        self._for_each_logger(lambda logger: logger.scalars(step, values))

    def _text(self, name: str, step: int, text: str, markdown: bool = False) -> None:
        self._for_each_logger(lambda logger: logger.text(name, step, text, markdown))

    def _for_each_logger(self, call: Callable[[RunLogger], None]) -> None:
        """Calls `call` with every logger, which is opened if needed."""
        for name, kind in list(self._kinds.items()):
            try:
                if (logger := self._open.get(name)) is None:  # opened late, as imports take seconds
                    logger = self._open[name] = kind(self._folder, self._run, self._facts)
                call(logger)
            except Exception as error:  # whatever a logger's library raises
                if kind.remote:
                    del self._kinds[name]
                    error = OSError(f"logger={name}: {describe_error(error)}")
                elif not isinstance(error, OSError):
                    raise
                self._failed(name, error)


def _facts(folder: Path, result: RunResult) -> dict[str, str]:
    """The run's folder, its command line and its commit, under MLflow's names."""
    facts = {"gpipe.folder": str(folder.absolute()), "mlflow.source.type": "LOCAL"}
    if starts := result.starts:
        facts["mlflow.source.name"] = starts[-1].command
        codes = starts[-1].code
        if (commit := codes.get("model") or codes["gpipe"]) is not None:
            facts["mlflow.source.git.commit"] = commit["commit"]
    return facts


def _keyed_by_tag(values: Mapping[str, float | None]) -> dict[str, float | None]:
    """The values, keyed by the tags of the measures' curves instead of by the measures' keys."""
    return {METRICS[key].tag: value for key, value in values.items()}


def _training_curves(message: StepDone) -> dict[str, float | None]:
    return _keyed_by_tag({
        "train_loss": message.loss,
        "train_cross_entropy": message.cross_entropy,
        "train_learning_rate": message.learning_rate,
        "train_gradient_norm": message.gradient_norm,
        "samples_per_second": message.samples / message.seconds,
        "tokens_per_second": None if message.tokens is None else message.tokens / message.seconds,
        "step_seconds": message.seconds,
    })  # fmt: skip


def _memory_curves(message: StepDone, device_of_stage: Sequence[int]) -> dict[str, float | None]:
    """Peak memory in GiB; stages that share a device, or a process on a CPU, share one curve."""
    if not message.memory_bytes:
        return {}
    of_stages = {
        f"memory/stage{'s' * (len(stages) > 1)}_{format_stages(stages)}_gib": message.memory_bytes[stages[0]] / GIB
        for stages in stages_of_devices(device_of_stage)
    }
    return _keyed_by_tag({"memory_bytes_fullest": max(message.memory_bytes) / GIB}) | of_stages


def _translation_table(translations: Iterable[Translation]) -> str:
    """Sentences as a Markdown table, with the special characters of Markdown and HTML escaped."""

    def escape_markdown(text: str) -> str:
        return re.sub(r"([\\`*_{}\[\]])", r"\\\1", html.escape(" ".join(text.split()), quote=False))

    rows = [[*map(escape_markdown, astuple(shown))] for shown in translations]
    headings = ("pair", "source", "reference", "translation")
    return to_markdown(Table.of_rows("", map(Column, headings), rows))
