"""What a process reads: inputs where the first stage is, targets where the last one is, the catalogue everywhere.

A catalogue has how many samples a split has and how long they are. From it, the seed and the settings every process
makes the same mini-batches, so that their sizes need not be sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpipe_cli.assembly.build import open_data, outputs_of
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.batches import Catalogue, MiniBatches, Split
from gpipe_cli.data.language_model import TextSplit
from gpipe_cli.data.loading import LoadedBatches, default_workers
from gpipe_cli.data.pairs import languages_of
from gpipe_cli.data.text import unigram_perplexity
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.planner.model_profile import refuse_single_samples
from gpipe_cli.planner.placement import Placement
from gpipe_cli.system.files import write_whole
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.training.checkpoint.store import Progress
from gpipe_cli.training.events import DataFacts, Notes

VOCABULARY = "vocabulary.model"  # SentencePiece's file, in the run folder


@dataclass(frozen=True)
class Reading:
    """A split as one process needs it: samples only where the first or the last stage is, mini-batches everywhere.

    `loaded` yields what the first stage is given; None in other processes.
    """

    split: Split | None
    batches: MiniBatches
    loaded: LoadedBatches | None

    def inputs(self) -> tuple[torch.Tensor, ...] | None:
        """What the first stage is given of the next mini-batch."""
        return None if self.loaded is None else next(self.loaded)

    def targets(self, epoch: int, position: int) -> torch.Tensor | None:
        """What the last stage must find in a mini-batch."""
        if self.split is None:
            return None
        return self.split.targets_of(self.batches.indices(epoch, position), self.batches.lengths(epoch, position))

    def close(self) -> None:
        if self.loaded is not None:
            self.loaded.close()


class Data:
    """What a process has opened before the processes are connected, and the two readings that it has afterwards."""

    def __init__(
        self, config: TrainConfig, placement: Placement, process: int, start: Progress | None, source: Path | None
    ) -> None:
        """Open the data where the first or the last stage is, and start loading: training from `start` on, or the
        test set alone. `source` is the folder of the run whose weights there will be; text is read with its vocabulary.

        Loader processes are forked here, before this process has threads, connections or a CUDA context.
        """
        stages = placement.stages_of(process)
        self._config, self._first = config, 0 in stages
        self._splits: tuple[Split, Split] | None = None
        self._readings: list[Reading | None] = [None, None]
        if self._first or placement.partitions - 1 in stages:  # stages in between never see a sample
            self._splits = open_data(config, _saved_vocabulary(config, source))
        if self._splits is not None and self._first:
            train, test = self._splits
            workers = workers_of(config)
            pin = config.device != "cpu" and torch.cuda.device_count() > 0
            if start is not None:
                batches = training_batches(config, train.catalogue)
                check_epochs(config, start, batches.steps_per_epoch)  # before loading begins at a place there is not
                begin = start.epoch, start.position, config.epochs
                loaded = LoadedBatches(train, batches, *begin, workers, pin)
                self._readings[0] = Reading(train, batches, loaded)
            evaluations = 1 if start is None else config.epochs + 1
            batches = test_batches(config, test.catalogue)
            loaded = LoadedBatches(test, batches, 0, 0, evaluations, workers, pin)
            self._readings[1] = Reading(test, batches, loaded)

    def training_set(self, control: ControlGroup) -> Reading:
        """Called in every process, once they are connected: those without samples are sent the catalogue."""
        return self._share(control, 0, training_batches)

    def test_set(self, control: ControlGroup) -> Reading:
        """As `training_set`."""
        return self._share(control, 1, test_batches)

    def _share(
        self, control: ControlGroup, which: int, make: Callable[[TrainConfig, Catalogue], MiniBatches]
    ) -> Reading:
        split = None if self._splits is None else self._splits[which]
        known = split.catalogue if split is not None and self._first else None
        catalogue = next(catalogue for catalogue in control.collect(known) if catalogue is not None)
        return self._readings[which] or Reading(split, make(self._config, catalogue), None)

    def facts(self) -> DataFacts:
        """What the banner says of the data; called where the first stage is."""
        assert self._splits is not None
        train, test = self._splits
        facts = DataFacts(len(train), len(test))
        notes: Notes = ()
        if isinstance(train, TextSplit | PairSplit) and isinstance(test, TextSplit | PairSplit):
            size, asked = train.vocabulary.size, outputs_of(self._config)
            facts = replace(facts, vocabulary=size, unigram_perplexity=unigram_perplexity(train, test))
            if size < asked:
                fewer = f"dataset.vocabulary={asked} is more than this text has; {size} makes the model smaller"
                notes += (("vocabulary", fewer),)
        if isinstance(train, PairSplit) and isinstance(test, PairSplit):
            facts = replace(facts, languages=languages_of(train.pairs.languages))
            if train.dropped or test.dropped:
                left_out = f"{train.dropped:,} training and {test.dropped:,} test pairs longer than model.length"
                notes += (("left out", left_out),)
        return replace(facts, notes=notes)

    def save_vocabulary(self, folder: Path) -> None:
        """Write what the tokens mean into the run's folder; called where the first stage is."""
        assert self._splits is not None
        if isinstance(self._splits[0], TextSplit | PairSplit):
            write_whole(folder / VOCABULARY, self._splits[0].vocabulary.model)


def _saved_vocabulary(config: TrainConfig, source: Path | None) -> bytes | None:
    if source is None or config.task == "classification" or not (source / VOCABULARY).is_file():
        return None
    return (source / VOCABULARY).read_bytes()


def check_epochs(config: TrainConfig, start: Progress, steps_per_epoch: int) -> None:
    """Raises ValueError if an epoch of the run that is resumed had another number of steps."""
    if start.steps_per_epoch not in (0, steps_per_epoch):
        raise ValueError(
            f"resume={config.resume}: an epoch had {start.steps_per_epoch} steps there and has {steps_per_epoch} now, "
            "so the data is another; put back the data, and leave out the dataset's settings"
        )


def training_batches(config: TrainConfig, catalogue: Catalogue) -> MiniBatches:
    """The mini-batches of a training set. Raises ValueError if it is smaller than one."""
    if config.batch_size is not None and config.batch_size > catalogue.samples:
        raise ValueError(
            f"batch_size={config.batch_size}: the training set has only {catalogue.samples} samples; "
            f"use {catalogue.samples} or fewer"
        )
    return _batches(config, catalogue, shuffle=True)


def test_batches(config: TrainConfig, catalogue: Catalogue) -> MiniBatches:
    """The mini-batches of a test set: every sample once, in the same order each time."""
    return _batches(config, catalogue, shuffle=False)


def _batches(config: TrainConfig, catalogue: Catalogue, *, shuffle: bool) -> MiniBatches:
    return MiniBatches(
        catalogue,
        batch_size=config.batch_size,
        batch_tokens=config.batch_tokens,
        seed=config.seed,
        shuffle=shuffle,
        temperature=getattr(config.dataset, "temperature", None) if shuffle else None,
        drop_last=config.dataset.drop_last and shuffle,  # a test set is seen whole
    )


def refuse_short_last(config: TrainConfig, batches: MiniBatches) -> None:
    """Raises ValueError if the model cannot train on the last mini-batch of an epoch, which may be short."""
    if config.batch_size is not None:
        smallest = min(batches.size(0, position) for position in range(batches.steps_per_epoch))
        refuse_single_samples(config, smallest, last=smallest < config.batch_size)


def workers_of(config: TrainConfig) -> int:
    """Loader processes: what was asked for, or what suits the data set."""
    if config.data_workers is not None:
        return config.data_workers
    if config.task != "classification":
        return 0  # a batch of text is a few look-ups, less than it takes to hand it over
    return default_workers(config.dataset.name, usable_cores())
