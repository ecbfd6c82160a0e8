"""The data that a process reads: inputs for the first stage, targets for the last, the SplitIndex in every process.

A SplitIndex has the number and the lengths of a split's samples. From it, the seed and the settings, every process
cuts the same mini-batches, so that their sizes need not be sent.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from gpipe_cli.assembly.build import find_data, max_lengths, open_data, pretrained_classes
from gpipe_cli.config.groups import IMAGE_DATASETS, TEXT_DATASETS, HuggingFaceConfig, TextConfig
from gpipe_cli.config.settings import AUTO_BATCH, SplitName, TrainConfig
from gpipe_cli.data.batches import MiniBatches, OutputLabels, Split, SplitIndex
from gpipe_cli.data.cache import compute_digest
from gpipe_cli.data.corpora import count_languages
from gpipe_cli.data.fine_grained import DECODED_FROM_FILES
from gpipe_cli.data.images import ImageSplit, same_classes
from gpipe_cli.data.loading import BatchRequest, PrefetchedBatches, UnreadableError, batch_requests
from gpipe_cli.data.masked_text import SELECTED_SHARE, MaskedText
from gpipe_cli.data.micro_batches import Shard, shard_of
from gpipe_cli.data.pretrained_tokenizer import HFTokenizer
from gpipe_cli.data.readers import ImageFiles
from gpipe_cli.data.splits import VALIDATION_NAME, Splits, split_names
from gpipe_cli.data.text import TextSplit, unigram_perplexity
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.data.vocabulary import IGNORED, SentencePieceTokenizer
from gpipe_cli.distributed.control_group import ControlGroup, Stop
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.planner.model_profile import check_single_samples
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.planner.process_layout import Layout
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.system.files import read_bytes, write_atomic
from gpipe_cli.system.machine import free_shared_memory_bytes, usable_cores, usable_memory_bytes
from gpipe_cli.system.status_line import phase
from gpipe_cli.training.checkpoint.files import Progress, read_index, run_folder_of
from gpipe_cli.training.events import DataFacts, Notes
from gpipe_cli.training.milestones import Milestones
from gpipe_cli.units import first_few, plural

VOCABULARY = "vocabulary.model"  # SentencePiece's file, in the run folder
TOKENIZER = "tokenizer"  # the folder with the files of dataset.tokenizer, in the run folder
_MAX_VOCABULARY_BYTES = 2**28  # ten times the size of a million pieces


@dataclass(frozen=True)
class SplitReader:
    """The training set or the test set as a process reads it."""

    split: Split | None  # None in processes without the first or the last stage
    batches: MiniBatches
    prefetched: PrefetchedBatches | None  # the inputs of the first stage; None in processes without it

    @cached_property
    def elements(self) -> torch.Tensor:
        """int32 (samples,): the number of elements to predict in each sample; -1 until it is read: a replica need not
        read in every epoch the targets of all others, which may be files."""
        return torch.full((self.batches.split_index.samples,), -1, dtype=torch.int32)

    def watch(self, control: ControlGroup) -> None:
        """From now on a mini-batch that cannot be read raises nothing: `control.any_stop_asked` tells all processes."""
        if (prefetched := self.prefetched) is None:
            return
        asked, prefetched.gives_zeros = control.reason, True

        def reason() -> int:
            unread = Stop.EVALUATION_UNREADABLE if prefetched.gave_zeros else Stop.UNREADABLE
            return unread if prefetched.unreadable else asked()

        control.reason = reason

    def check_read(self, control: ControlGroup) -> None:
        """Raises UnreadableError, in all processes, once a mini-batch could not be read."""
        if control.any_stop_asked() >= Stop.UNREADABLE:
            whys = control.collect("" if self.prefetched is None else self.prefetched.unreadable)
            raise UnreadableError(next(filter(None, whys)))

    def close(self) -> None:
        if self.prefetched is not None:
            self.prefetched.close()


@dataclass(frozen=True)
class MiniBatch:
    """Mini-batch `position` of `epoch` as a process reads it: its pipeline's shard. `inputs` must be called in the
    order in which mini-batches are loaded, `training_batch_order`."""

    reader: SplitReader
    epoch: int
    position: int

    @property
    def shard(self) -> Shard:
        """The samples of this mini-batch for this pipeline, and their micro-batches."""
        return self.reader.batches.shard(self.epoch, self.position)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths, in tokens, to which its sentences are padded; () for images."""
        return self.reader.batches.lengths(self.epoch, self.position)

    def inputs(self) -> tuple[torch.Tensor, ...] | None:
        """The shard's inputs, (N, ...) each, as from `Split.inputs`; call it once. None in processes without the first
        stage."""
        if self.reader.prefetched is None:
            return None
        return self.reader.prefetched.take(self.reader.split, self.epoch, self.position, sum(self.shard.sizes))

    def targets(self) -> tuple[torch.Tensor, int] | None:
        """The shard's targets, int64 (n,), (n, T) or (n, S, S), and the number of elements to predict in the whole
        mini-batch, the denominator of its loss. None in processes without the first or the last stage."""
        if self.reader.split is None:
            return None
        split, indices = self.reader.split, self.reader.batches.indices(self.epoch, self.position)
        if self.reader.batches.replicas == 1:
            whole = split.targets_of(self.epoch, indices, self.lengths)
            return whole, int((whole != IGNORED).sum())
        elements, in_shard = self.reader.elements, torch.zeros(len(indices), dtype=torch.bool)
        in_shard[self.shard.samples] = True
        needed = in_shard | (elements[indices] < 0)
        needed[0] |= not needed.any()  # for the shape, where this replica has no sample
        targets = split.targets_of(self.epoch, indices[needed], self.lengths)
        to_predict = (targets != IGNORED).reshape(len(targets), targets.shape[1:].numel())
        elements[indices[needed]] = to_predict.sum(dim=1, dtype=torch.int32)
        return targets[in_shard[needed]], int(elements[indices].sum())


def saved_vocabulary(run: Path) -> bytes | None:
    """The content of the SentencePiece model in the folder of a run; None if there is none.

    Raises InputError if it cannot be read.
    """
    try:
        return read_bytes(run / VOCABULARY, _MAX_VOCABULARY_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{run / VOCABULARY}: cannot be read ({error.strerror}); put back the run's file") from error


def saved_tokenizer(run: Path) -> dict[str, bytes]:
    """Name -> content of the files of a run's tokenizer; {} if there are none. Raises OSError."""
    files = sorted(path for path in (run / TOKENIZER).rglob("*") if path.is_file())
    return {path.relative_to(run / TOKENIZER).as_posix(): path.read_bytes() for path in files}


def _with_saved_tokenizer(
    config: TrainConfig, checkpoint: Path | None, *, required: bool
) -> tuple[TrainConfig, OutputLabels]:
    """`config` with the tokenizer saved by the run whose `checkpoint` is used, if any, as the one that the setting
    names may have changed; and what its weights were trained on. `required`: other classes are refused.

    Raises InputError if the vocabulary or the tokenizer is missing, CorruptCheckpointError for a checkpoint that is
    damaged.
    """
    dataset = config.dataset
    if checkpoint is None:
        return config, OutputLabels(classes=pretrained_classes(config), required=False)
    if not isinstance(dataset, TextConfig):
        return config, OutputLabels(classes=read_index(checkpoint).classes, required=required)
    run = run_folder_of(checkpoint)
    if dataset.tokenizer is not None:
        if not (run / TOKENIZER).is_dir():
            raise InputError(f"{run / TOKENIZER}: there is no such folder; put back the tokenizer of the run")
        return replace(config, dataset=replace(dataset, tokenizer=str(run / TOKENIZER))), OutputLabels()
    vocabulary = saved_vocabulary(run)
    if vocabulary is None and not TEXT_DATASETS[dataset.name].synthetic:
        reason = "and with another, learned from the text as it is now, every token would mean something else"
        raise InputError(f"{run / VOCABULARY}: there is no such file, {reason}; put back the run's file")
    return config, OutputLabels(vocabulary)


def look_for_data(
    config: TrainConfig, checkpoint: Path | None, *, required: bool, with_headers: bool = False
) -> Splits[SplitIndex]:
    """The SplitIndex of each split that the weights of `checkpoint`, if any, are used with. Arguments and errors as in
    `_with_saved_tokenizer` and `find_data`; also raises InputError for data that cannot be read."""
    phase("looking for the data")
    return find_data(*_with_saved_tokenizer(config, checkpoint, required=required), with_headers=with_headers)


def check_data(config: TrainConfig, auto: Collection[str] = (), source: Path | None = None) -> None:
    """Raises InputError, before anything slow, if the data cannot be read or its number of samples does not fit the
    settings; those in `auto` have no values yet. `source`: the checkpoint that the run begins with."""
    train = look_for_data(config, source, required=config.resume is not None, with_headers=True).training
    if not set(AUTO_BATCH) & set(auto):
        batches = mini_batches(config, train, training=True)
        if not auto:
            if config.batch_size is not None:
                check_single_samples(config, config.batch_size)
            check_last_mini_batch(config, batches)


class Data:
    """The data that a process opens before the processes are connected, and reads afterwards."""

    def __init__(
        self,
        config: TrainConfig,
        spec: PipelineSpec,
        process: int,
        start: Progress | None,
        source: Path | None,
        *,
        only_steps: bool = False,
    ) -> None:
        """In processes with the first or the last stage, open the data; with the first, start loading the training set
        from `start` and, unless `only_steps`, the other splits for each evaluation; if `start` is None, the test set.
        `source`: the checkpoint that the weights come from, whose tokens and classes are used.

        Loader processes are forked here, before this process has threads, connections or a CUDA context. Raises
        InputError if an epoch of the resumed run had another number of steps, or the data has other classes than the
        run that is evaluated or resumed.
        """
        stages = spec.layout.stages_of(process)
        self._config, self._source = config, source
        self._first = 0 in stages  # whether this process has the first stage
        self._replica = spec.layout.replica_of(process)
        self._splits: Splits[Split] | None = None
        self._output_labels = OutputLabels()  # of the weights that the run begins with
        self.classes: tuple[str, ...] = ()  # names by output, () if the data names none; known once it is read
        self._readers: dict[SplitName, SplitReader] = {}  # empty without the first stage
        if self._first or spec.partitions - 1 in stages:  # stages in between never see a sample
            required = start is None or config.resume is not None
            config, self._output_labels = _with_saved_tokenizer(config, source, required=required)
            self._splits = open_data(config, self._output_labels)
        if self._splits is None or not self._first:
            return
        batches = {
            name: mini_batches(config, split.split_index, training=name == "training", replica=self._replica)
            for name, split in self._splits.each()
            if start is not None or name == "test"
        }
        if start is None:
            order = batch_requests("test", batches["test"])
        else:
            steps_per_epoch = batches["training"].steps_per_epoch
            if start.steps_per_epoch not in (0, steps_per_epoch):
                raise InputError(
                    f"resume={config.resume}: an epoch had {start.steps_per_epoch} steps there and has "
                    f"{steps_per_epoch} now, so the data has changed; put it back, and remove the dataset's settings"
                )
            order = training_batch_order(batches, start, Milestones(config, steps_per_epoch, only_steps))
        splits = dict(self._splits.each())
        prefetched = PrefetchedBatches(splits, order, *choose_loaders(config, spec.layout, splits[next(iter(batches))]))
        self._readers = {name: SplitReader(splits[name], batches[name], prefetched) for name in batches}

    def reader(self, control: ControlGroup, name: SplitName) -> SplitReader:
        """A split as this process reads it. Call it in every process once all are connected: those without samples
        receive the SplitIndex and the classes. Raises InputError if processes read data with different tokens, classes
        or numbers of samples."""
        split = None if self._splits is None else dict(self._splits.each())[name]
        local_split_index = split.split_index if split is not None and self._first else None
        fingerprint = None if split is None else _split_fingerprint(split)
        split_indexes, fingerprints = zip(*control.collect((local_split_index, fingerprint)), strict=True)
        first, *others = (fingerprint for fingerprint in fingerprints if fingerprint is not None)
        if any(other != first for other in others):
            why = "the processes read data with different tokens, classes or numbers of samples"
            raise InputError(f"dataset={self._config.dataset.name}: {why}; give every machine the same files")
        _, _, self.classes = first
        if name in self._readers:
            return self._readers[name]
        split_index = next(split_index for split_index in split_indexes if split_index is not None)
        batches = mini_batches(self._config, split_index, training=name == "training", replica=self._replica)
        return SplitReader(split, batches, None)

    def readers(self, control: ControlGroup) -> Splits[SplitReader]:
        """Each split of a training, as `reader` returns it."""
        names: list[SplitName] = ["training", "test"]
        if self._config.dataset.validation is not None:
            names.append("validation")
        return Splits(*(self.reader(control, name) for name in names))

    def facts(self) -> DataFacts:
        """The banner's facts about the data. Call it only in the process of the first stage."""
        assert self._splits is not None
        train, test, validation = self._splits
        held_out = None if validation is None else validation.split_index.samples
        facts = DataFacts(train.split_index.samples, test.split_index.samples, held_out)
        notes = self._unused_validation()
        if isinstance(train, ImageSplit) and isinstance(train.samples.pixels, ImageFiles):
            notes += (("images", train.samples.pixels.describe()),)
        not_images = [split.samples.skipped for _, split in self._splits.each() if isinstance(split, ImageSplit)]
        if skipped := sum(not_images, Counter[str]()):
            kinds = ", ".join(f"{count:,} of {ending}" for ending, count in skipped.most_common(4))
            notes += (("skipped", f"{plural(skipped.total(), 'file')}, not read as images: {kinds}"),)
        if isinstance(train, MaskedText) and isinstance(test, MaskedText):
            notes += (("masked", f"{SELECTED_SHARE:.0%} of the tokens, which are predicted; others are not counted"),)
            train, test = train.windows, test.windows
        if isinstance(train, TextSplit | PairSplit) and isinstance(test, TextSplit | PairSplit):
            size, asked = train.vocabulary.size, self._config.dataset.vocabulary  # type: ignore[union-attr]  # text
            facts = replace(facts, vocabulary=size, unigram_perplexity=unigram_perplexity(train, test))
            if size < asked and not isinstance(self._config.model, HuggingFaceConfig):  # which keeps its own vocabulary
                whose = "the tokenizer" if isinstance(train.vocabulary, HFTokenizer) else "this text"
                fewer = f"dataset.vocabulary={asked} is more than {whose} has; {size} makes the model smaller"
                notes += (("vocabulary", fewer),)
        if isinstance(train, PairSplit) and isinstance(test, PairSplit):
            facts = replace(facts, languages=count_languages(train.pairs.languages))
            left = train.dropped + (validation.dropped if isinstance(validation, PairSplit) else 0)
            if left or test.dropped:
                left_out = f"{left:,} training and {test.dropped:,} test pairs longer than model.length"
                notes += (("left out", left_out),)
        return replace(facts, notes=notes + self.class_notes())

    def _unused_validation(self) -> Notes:
        """A line of the banner about a folder or a file `val` that is the test set, or that nothing uses."""
        dataset = self._config.dataset
        has_folders = (IMAGE_DATASETS | TEXT_DATASETS)[dataset.name].folders and getattr(dataset, "test", None) is None
        if not has_folders or dataset.root is None or dataset.validation == VALIDATION_NAME:
            return ()
        for suffix in ("", ".tsv"):
            if (place := Path(dataset.root, VALIDATION_NAME + suffix)).exists():
                is_test = split_names(place.parent, suffix=suffix)[-1] == VALIDATION_NAME
                unused = "is not used; dataset.validation=val uses it"
                use = "is the test set, as there is no other" if is_test else unused
                return ((VALIDATION_NAME, f"{place} {use}"),)
        return ()

    def class_notes(self) -> Notes:
        """A line of the banner if it is not known that the outputs of the initial weights mean the classes of the data;
        () otherwise."""
        theirs, count = self._output_labels.classes, len(self.classes)
        if self._source is not None and theirs is None and self.classes:
            which = "its outputs" if self._output_labels.required else "outputs that are taken from it"
            what = f"{which} are taken for the classes of the data: {first_few(self.classes)}"
            return (("classes", f"that run kept no names; {what}"),)
        if self._source is None and theirs and len(theirs) == count and not same_classes(theirs, self.classes):
            what = f"the pretrained classifier is of others: {first_few(theirs)}"
            return (("classes", f"{what}; its weights are only where training begins"),)
        return ()

    def save_vocabulary(self, folder: Path) -> None:
        """Write the vocabulary of text into the run's folder. Call it only in the process of the first stage."""
        assert self._splits is not None
        vocabulary = _tokenizer_of(self._splits[0])
        if isinstance(vocabulary, SentencePieceTokenizer):
            write_atomic(folder / VOCABULARY, vocabulary.model)
        elif isinstance(vocabulary, HFTokenizer):
            for name, content in vocabulary.files.items():
                (folder / TOKENIZER / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / TOKENIZER / name, content)


def _split_fingerprint(split: Split) -> tuple[int, str | None, tuple[str, ...]]:
    """What all processes that open a split must agree on: the number of samples, a digest of the vocabulary of text,
    and the names of the classes."""
    vocabulary = _tokenizer_of(split)
    tokens = None if vocabulary is None else compute_digest("tokens", [], [vocabulary.model])
    classes = split.samples.class_names if isinstance(split, ImageSplit) else ()
    return split.split_index.samples, tokens, classes


def _tokenizer_of(split: Split | None) -> SentencePieceTokenizer | HFTokenizer | None:
    """The tokenizer of a split of text; None for images."""
    return getattr(split.windows if isinstance(split, MaskedText) else split, "vocabulary", None)


def mini_batches(config: TrainConfig, split_index: SplitIndex, *, training: bool, replica: int = 0) -> MiniBatches:
    """The mini-batches of a training set, or of a test set: all of its samples, in the same order each time. `replica`
    is the pipeline whose shard of each mini-batch is read.

    Raises InputError for a training set that is smaller than a mini-batch.
    """
    if training and config.batch_size is not None and config.batch_size > split_index.samples:
        raise InputError(
            f"batch_size={config.batch_size}: the training set has only {split_index.samples} samples; "
            f"use {split_index.samples} or fewer"
        )
    return MiniBatches(
        split_index,
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


def check_last_mini_batch(config: TrainConfig, batches: MiniBatches) -> None:
    """Raises InputError if the model or a replica cannot train on the last mini-batch of an epoch, which may
    have fewer samples than the others."""
    if config.batch_size is not None:
        smallest = min(batches.size(0, position) for position in range(batches.steps_per_epoch))
        if smallest < config.replicas:
            why = f"the last mini-batch of an epoch has {plural(smallest, 'sample')}, less than one for each"
            raise InvalidSettingError("replicas", config.replicas, f"{why}; use dataset.drop_last=true")
        check_single_samples(config, smallest, last=smallest < config.batch_size)


def training_batch_order(
    batches: Mapping[SplitName, MiniBatches], start: Progress, milestones: Milestones
) -> Iterator[BatchRequest]:
    """The mini-batches of all splits in the order in which a training reads them from `start`: after each step with an
    evaluation, the set that chooses the best weights; and at the end the test set, if that is another set.
    """
    training: MiniBatches = batches["training"]
    chooses: SplitName = "validation" if "validation" in batches else "test"
    places = training.stream(start.epoch, start.position, milestones.config.epochs)
    for step, place in enumerate(places, start.step + 1):
        yield from batch_requests("training", training, [place])
        if milestones.evaluates_after(step):
            yield from batch_requests(chooses, batches[chooses])
        if step == milestones.end_step:
            break
    if chooses != "test" and not milestones.only_steps:
        yield from batch_requests("test", batches["test"])


def choose_loaders(config: TrainConfig, layout: Layout, split: Split) -> tuple[int, int]:
    """The number of loader processes, `data_workers` or a default for the data set, and how many mini-batches each
    prepares ahead; both are limited so that the batches of all pipelines on this machine take at most a quarter of its
    memory. Raises InputError if the first sample of `split` cannot be read."""
    pipelines, workers = layout.local_first_stages, config.data_workers
    if workers is None and config.text:
        workers = 0  # a batch of text is a few look-ups, cheaper than sending it between processes
    elif workers is None:
        # Decoding image files keeps several cores busy; more than 8 rarely help the host of an accelerator. For images
        # in memory a single process is enough to overlap loading with the step.
        workers = min(max(1, usable_cores() // pipelines), 8) if config.dataset.name in DECODED_FROM_FILES else 1
    if workers == 0:
        return 0, 0
    lengths = max_lengths(config)
    shard = shard_of(mini_batch_samples(config, lengths), config.micro_batches, config.replicas)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a library would not survive the fork
    batch_bytes = sum(shard.sizes) * sum(tensor.nbytes for tensor in split.inputs(0, [0], lengths))
    torch.set_num_threads(threads)
    fitting = min(usable_memory_bytes() // 4, free_shared_memory_bytes()) // (pipelines * batch_bytes)
    workers = max(1, min(workers, fitting))
    return workers, max(1, min(fitting // workers, 2))
