"""Requests for a training or a measurement."""

from dataclasses import dataclass, replace
from pathlib import Path

from gpipe_cli.config.settings import OF_INVOCATION, BenchSettings, TrainConfig, load, target_of
from gpipe_cli.reporting.sinks.sink import refuse_missing


@dataclass(frozen=True)
class RunRequest:
    """A configuration to train or, with `bench`, to measure."""

    config: TrainConfig
    auto: tuple[str, ...]  # keys of the settings to choose
    bench: BenchSettings | None = None

    def __post_init__(self) -> None:
        refuse_missing(self.config.logger)

    def into(self, folder: Path) -> "RunRequest":
        """This request with `folder` as its run folder."""
        return replace(self, config=replace(self.config, run_folder=str(folder)))

    def resuming(self, folder: Path) -> "RunRequest":
        """A request to resume the run in `folder`, with the run's own settings except those in OF_INVOCATION. Raises
        InputError if they cannot be read."""
        changed = {key: getattr(self.config, key) for key in OF_INVOCATION} | {"resume": str(folder)}
        return replace(self, config=replace(load(folder, target_of(self.config)), **changed), auto=()).into(folder)
