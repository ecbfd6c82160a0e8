"""What a process reads: inputs where the first stage is, targets where the last one is, the catalogue everywhere.

A catalogue has how many samples a split has and how long they are. From it, the seed and the settings every process
makes the same mini-batches, so that their sizes need not be sent.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpipe_cli.assembly.build import open_data, outputs_of
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.data.batches import Catalogue, MiniBatches, Split
from gpipe_cli.data.corpora import languages_of
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.data.micro_batches import Share
from gpipe_cli.data.photographs import DECODED
from gpipe_cli.data.text import TextSplit, unigram_perplexity
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.errors import InputError
from gpipe_cli.planner.model_profile import refuse_single_samples
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.system.files import read_bytes, write_whole
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.training.checkpoint.files import Progress
from gpipe_cli.training.events import DataFacts, Notes
from gpipe_cli.units import plural

VOCABULARY = "vocabulary.model"  # SentencePiece's file, in the run folder
_MOST_VOCABULARY_BYTES = 2**28  # a million pieces take a tenth of it


@dataclass(frozen=True)
class Reading:
    """A split as one process needs it."""

    split: Split | None  # only in processes with the first or the last stage
    batches: MiniBatches
    loaded: LoadedBatches | None  # the first stage's inputs, in its process

    def close(self) -> None:
        if self.loaded is not None:
            self.loaded.close()


@dataclass(frozen=True)
class MiniBatch:
    """Mini-batch `position` of `epoch`, as one process needs it: its pipeline's share. Mini-batches are asked for their
    inputs in the order in which they are loaded."""

    reading: Reading
    epoch: int
    position: int

    @property
    def share(self) -> Share:
        """Which of its samples are this pipeline's, in which micro-batches."""
        return self.reading.batches.share(self.epoch, self.position)

    @property
    def lengths(self) -> tuple[int, ...]:
        """What its sentences are padded to; empty for images."""
        return self.reading.batches.lengths(self.epoch, self.position)

    def inputs(self) -> tuple[torch.Tensor, ...] | None:
        """The share's inputs, in the process of the first stage. The next call is that of the next mini-batch."""
        return None if self.reading.loaded is None else next(self.reading.loaded)

    def targets(self) -> tuple[torch.Tensor, int] | None:
        """The share's targets, in processes of the first or the last stage; and the elements to predict in the whole
        mini-batch: the denominator of its loss."""
        if self.reading.split is None:
            return None
        indices, share = self.reading.batches.indices(self.epoch, self.position), self.share
        if not self.lengths:
            return self.reading.split.targets_of(indices[share.samples], ()), len(indices)
        whole = self.reading.split.targets_of(indices, self.lengths)
        return whole[share.samples], int((whole != IGNORED).sum())


def saved_vocabulary(run: Path) -> bytes | None:
    """The content of the SentencePiece model in the folder of a run; None where there is none.

    Raises InputError if it cannot be read.
    """
    try:
        return read_bytes(run / VOCABULARY, _MOST_VOCABULARY_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{run / VOCABULARY}: cannot be read ({error.strerror}); put back that of the run") from error


class Data:
    """What a process has opened before the processes are connected, and what it reads afterwards."""

    def __init__(
        self, config: TrainConfig, spec: PipelineSpec, process: int, start: Progress | None, source: Path | None
    ) -> None:
        """Open the data where the first or the last stage is, and start loading: training from `start` on, or the
        test set alone. `source` is the folder of the run whose weights there will be; text is read with its vocabulary.

        Loader processes are forked here, before this process has threads, connections or a CUDA context. Raises
        InputError if an epoch of the run that is resumed had another number of steps.
        """
        stages = spec.layout.stages_of(process)
        self._config, self._first, self._replica = config, 0 in stages, spec.layout.replica_of(process)
        self._splits: tuple[Split, Split] | None = None
        # of the training set (True) and the test set, where the first stage is
        self._readings: dict[bool, Reading] = {}
        if self._first or spec.partitions - 1 in stages:  # stages in between never see a sample
            saved = None if source is None or config.task == "classification" else saved_vocabulary(source)
            self._splits = open_data(config, saved)
        if self._splits is None or not self._first:
            return
        # Last the only loader that pins memory: it starts a thread that opens a CUDA context.
        pin = spec.layout.device_of(process) != "cpu"
        for training, split in zip((False, True), reversed(self._splits), strict=True):
            if training and start is None:
                continue
            batches = mini_batches(config, split.catalogue, training=training, replica=self._replica)
            span = 0, 0, 1 if start is None else config.epochs + 1
            if training and start is not None:
                if start.steps_per_epoch not in (0, batches.steps_per_epoch):
                    raise InputError(
                        f"resume={config.resume}: an epoch had {start.steps_per_epoch} steps there and has "
                        f"{batches.steps_per_epoch} now, so the data is another; put back the data, and leave out the "
                        "dataset's settings"
                    )
                span = start.epoch, start.position, config.epochs
            loaded = LoadedBatches(split, batches, *span, workers_of(config), pin and training)
            self._readings[training] = Reading(split, batches, loaded)

    def reading(self, control: ControlGroup, *, training: bool) -> Reading:
        """The training set or the test set as this process reads it. Called in every process once they are connected:
        those without samples are sent the catalogue."""
        split = None if self._splits is None else self._splits[0 if training else 1]
        known = split.catalogue if split is not None and self._first else None
        catalogue = next(catalogue for catalogue in control.collect(known) if catalogue is not None)
        if training in self._readings:
            return self._readings[training]
        batches = mini_batches(self._config, catalogue, training=training, replica=self._replica)
        return Reading(split, batches, None)

    def facts(self) -> DataFacts:
        """What the banner says of the data; called where the first stage is."""
        assert self._splits is not None
        train, test = self._splits
        facts = DataFacts(train.catalogue.samples, test.catalogue.samples)
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


def mini_batches(config: TrainConfig, catalogue: Catalogue, *, training: bool, replica: int = 0) -> MiniBatches:
    """The mini-batches of a training set, or of a test set: there every sample once, and in the same order each time.
    `replica` gets a share of each mini-batch.

    Raises InputError for a training set that is smaller than one mini-batch.
    """
    if training and config.batch_size is not None and config.batch_size > catalogue.samples:
        raise InputError(
            f"batch_size={config.batch_size}: the training set has only {catalogue.samples} samples; "
            f"use {catalogue.samples} or fewer"
        )
    return MiniBatches(
        catalogue,
        batch_size=config.batch_size,
        batch_tokens=config.batch_tokens,
        seed=config.seed,
        shuffle=training,
        temperature=getattr(config.dataset, "temperature", None) if training else None,
        drop_last=config.dataset.drop_last and training,
        micro_batches=config.micro_batches,
        replicas=config.replicas,
        replica=replica,
    )


def refuse_short_last(config: TrainConfig, batches: MiniBatches) -> None:
    """Raises InputError if the model, or one of the replicas, cannot train on the last mini-batch of an epoch, which
    may be short."""
    if config.batch_size is not None:
        smallest = min(batches.size(0, position) for position in range(batches.steps_per_epoch))
        if smallest < config.replicas:
            why = f"the last mini-batch of an epoch has {plural(smallest, 'sample')}, less than one for each"
            raise RefusedError("replicas", config.replicas, f"{why}; use dataset.drop_last=true")
        refuse_single_samples(config, smallest, last=smallest < config.batch_size)


def workers_of(config: TrainConfig) -> int:
    """The number of loader processes: as the settings say, or what suits the data set."""
    if config.data_workers is not None:
        return config.data_workers
    if config.task != "classification":
        return 0  # a batch of text is a few look-ups, less than it takes to hand it over
    # Decoding files takes several cores at full speed; more than 8 rarely help one accelerator's host. Images in memory
    # need one process, enough to overlap with the step.
    return min(usable_cores(), 8) if config.dataset.name in DECODED else 1
