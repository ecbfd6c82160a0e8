"""Requests for a training or a measurement."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpipe_cli.config.settings import (
    PER_INVOCATION,
    BenchSettings,
    TrainConfig,
    load_run_config,
    target_of,
)
from gpipe_cli.reporting.loggers.logger import check_installed
from gpipe_cli.results.run import run_result_or_none


@dataclass(frozen=True)
class RunRequest:
    """A configuration to train or, with `bench`, to measure."""

    config: TrainConfig
    auto: tuple[str, ...]  # keys of the settings to choose
    bench: BenchSettings | None = None
    saved: TrainConfig | None = None  # the configuration of the run that is resumed

    def __post_init__(self) -> None:
        check_installed(self.config.logger)

    def in_folder(self, folder: Path) -> "RunRequest":
        """This request with `folder` as its run folder."""
        return replace(self, config=replace(self.config, run_folder=str(folder)))

    def to_resume(self, folder: Path) -> "RunRequest":
        """A request to resume the run in `folder`, with the run's own settings except those in PER_INVOCATION. Raises
        InputError if they cannot be read."""
        changed = {key: getattr(self.config, key) for key in PER_INVOCATION} | {"resume": str(folder)}
        saved = load_run(folder, target_of(self.config))
        return replace(self, config=replace(saved, **changed), auto=(), saved=saved).in_folder(folder)


def load_run(folder: Path, target: str | None = None, fallbacks: Mapping[str, Any] | None = None) -> TrainConfig:
    """`load_run_config` of the run in `folder`, with its data where the run found them (`follow_data`)."""
    return follow_data(load_run_config(folder, target, fallbacks=fallbacks), folder)


def follow_data(config: TrainConfig, folder: Path) -> TrainConfig:
    """The configuration of the run in `folder` with the absolute path of its data: a relative dataset.root starts from
    the working directory in which the run was started or, if there is nothing any more, from this command's."""
    result = run_result_or_none(folder)
    root, started_in = config.dataset.root, result.starts[-1].folder if result and result.starts else ""
    if root is None or not started_in or not os.path.exists(followed := os.path.join(started_in, root)):
        return config
    if os.path.exists(root) and os.path.samefile(root, followed):
        return config
    return replace(config, dataset=replace(config.dataset, root=followed))
