"""The data that a process reads: inputs for the first stage, targets for the last, the catalogue in every process.

A catalogue says how many samples a split has and how long they are. From it, the seed and the settings, every process
cuts the same mini-batches, so that their sizes need not be sent.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from gpipe_cli.assembly.build import find_data, greatest_lengths, open_data, pretrained_classes
from gpipe_cli.config.groups import IMAGES, TEXTS, HuggingFaceConfig, TextConfig
from gpipe_cli.config.settings import AUTO_BATCH, SplitName, TrainConfig
from gpipe_cli.data.batches import Catalogue, MiniBatches, Split, TrainedOn
from gpipe_cli.data.cache import digest_of
from gpipe_cli.data.corpora import languages_of
from gpipe_cli.data.images import ImageSplit, same_classes
from gpipe_cli.data.loading import Coming, LoadedBatches, UnreadableError, coming
from gpipe_cli.data.masked_text import SELECTED, MaskedText
from gpipe_cli.data.micro_batches import Share, share_of
from gpipe_cli.data.photographs import DECODED
from gpipe_cli.data.pretrained_tokenizer import PretrainedTokenizer
from gpipe_cli.data.readers import Files
from gpipe_cli.data.splits import OWN_VALIDATION, Splits, split_names
from gpipe_cli.data.text import TextSplit, unigram_perplexity
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.data.vocabulary import IGNORED, Vocabulary
from gpipe_cli.distributed.control_group import ControlGroup, Stop
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.planner.layout import Layout
from gpipe_cli.planner.model_profile import check_single_samples
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.system.files import read_bytes, write_whole
from gpipe_cli.system.machine import free_shared_memory_bytes, usable_cores, usable_memory_bytes
from gpipe_cli.system.phase import phase
from gpipe_cli.training.checkpoint.files import Progress, read_index, run_of
from gpipe_cli.training.events import DataFacts, Notes
from gpipe_cli.training.milestones import Milestones
from gpipe_cli.units import first_few, plural

VOCABULARY = "vocabulary.model"  # SentencePiece's file, in the run folder
TOKENIZER = "tokenizer"  # the folder there with the files of dataset.tokenizer
_MAX_VOCABULARY_BYTES = 2**28  # ten times the size of a million pieces


@dataclass(frozen=True)
class Reading:
    """The training set or the test set as a process reads it."""

    split: Split | None  # None in processes without the first or the last stage
    batches: MiniBatches
    loaded: LoadedBatches | None  # the inputs of the first stage; None in processes without it

    @cached_property
    def elements(self) -> torch.Tensor:
        """int32 (samples,): how many elements there are to predict in each sample, -1 as long as it has not been read:
        a replica need not read the targets of all others in every epoch, which may be files."""
        return torch.full((self.batches.catalogue.samples,), -1, dtype=torch.int32)

    def watch(self, control: ControlGroup) -> None:
        """From now on `control.stops` tells all processes if a mini-batch cannot be read, and nothing is raised."""
        if (loaded := self.loaded) is None:
            return
        asked, loaded.gives_zeros = control.reason, True

        def reason() -> Stop:
            unread = Stop.UNREAD if loaded.gave_zeros else Stop.UNREADABLE
            return unread if loaded.unreadable else asked()

        control.reason = reason

    def check_read(self, control: ControlGroup) -> None:
        """Raises UnreadableError, in all processes, once a mini-batch could not be read."""
        if control.stops() >= Stop.UNREADABLE:
            whys = control.collect("" if self.loaded is None else self.loaded.unreadable)
            raise UnreadableError(next(filter(None, whys)))

    def close(self) -> None:
        if self.loaded is not None:
            self.loaded.close()


@dataclass(frozen=True)
class MiniBatch:
    """Mini-batch `position` of `epoch` as a process reads it: the share of its pipeline. `inputs` must be called for
    mini-batches in the order in which they are loaded, that of `coming_batches`."""

    reading: Reading
    epoch: int
    position: int

    @property
    def share(self) -> Share:
        """The samples of this mini-batch for this pipeline, and their micro-batches."""
        return self.reading.batches.share(self.epoch, self.position)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths, in tokens, to which its sentences are padded; () for images."""
        return self.reading.batches.lengths(self.epoch, self.position)

    def inputs(self) -> tuple[torch.Tensor, ...] | None:
        """The share's inputs, (N, ...) each, as `Split.inputs` has them; call it once. None in processes without the
        first stage."""
        if self.reading.loaded is None:
            return None
        return self.reading.loaded.take(self.reading.split, self.epoch, self.position, sum(self.share.sizes))

    def targets(self) -> tuple[torch.Tensor, int] | None:
        """The share's targets, int64 (n,), (n, T) or (n, S, S), and the number of elements to predict in the whole
        mini-batch, the denominator of its loss. None in processes without the first or the last stage."""
        if self.reading.split is None:
            return None
        split, indices = self.reading.split, self.reading.batches.indices(self.epoch, self.position)
        if self.reading.batches.replicas == 1:
            whole = split.targets_of(self.epoch, indices, self.lengths)
            return whole, int((whole != IGNORED).sum())
        elements, in_share = self.reading.elements, torch.zeros(len(indices), dtype=torch.bool)
        in_share[self.share.samples] = True
        needed = in_share | (elements[indices] < 0)
        needed[0] |= not needed.any()  # for the shape, where this replica has no sample
        targets = split.targets_of(self.epoch, indices[needed], self.lengths)
        to_predict = (targets != IGNORED).reshape(len(targets), targets.shape[1:].numel())
        elements[indices[needed]] = to_predict.sum(dim=1, dtype=torch.int32)
        return targets[in_share[needed]], int(elements[indices].sum())


def saved_vocabulary(run: Path) -> bytes | None:
    """The content of the SentencePiece model in the folder of a run; None if there is none.

    Raises InputError if it cannot be read.
    """
    try:
        return read_bytes(run / VOCABULARY, _MAX_VOCABULARY_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{run / VOCABULARY}: cannot be read ({error.strerror}); put back that of the run") from error


def saved_tokenizer(run: Path) -> dict[str, bytes]:
    """Name -> content of the files of a run's tokenizer; {} if there are none. Raises OSError."""
    files = sorted(path for path in (run / TOKENIZER).rglob("*") if path.is_file())
    return {path.relative_to(run / TOKENIZER).as_posix(): path.read_bytes() for path in files}


def _as_trained(config: TrainConfig, checkpoint: Path | None, *, required: bool) -> tuple[TrainConfig, TrainedOn]:
    """`config` with the tokenizer that was saved by the run whose `checkpoint` is used, if any, as what the setting
    names may have changed since; and what its weights were trained on. `required`: other classes are refused.

    Raises InputError if the vocabulary or the tokenizer is missing, DamagedError for a checkpoint that is damaged.
    """
    dataset = config.dataset
    if checkpoint is None:
        return config, TrainedOn(classes=pretrained_classes(config), required=False)
    if not isinstance(dataset, TextConfig):
        return config, TrainedOn(classes=read_index(checkpoint).classes, required=required)
    run = run_of(checkpoint)
    if dataset.tokenizer is not None:
        if not (run / TOKENIZER).is_dir():
            raise InputError(f"{run / TOKENIZER}: there is no such folder; put back the tokenizer of the run")
        return replace(config, dataset=replace(dataset, tokenizer=str(run / TOKENIZER))), TrainedOn()
    vocabulary = saved_vocabulary(run)
    if vocabulary is None and not TEXTS[dataset.name].synthetic:
        why = "and with another, learned from the text that is there now, every token would mean something else"
        raise InputError(f"{run / VOCABULARY}: there is no such file, {why}; put back that of the run")
    return config, TrainedOn(vocabulary)


def look_for_data(
    config: TrainConfig, checkpoint: Path | None, *, required: bool, with_headers: bool = False
) -> Splits[Catalogue]:
    """The catalogues of the data that the weights of `checkpoint`, if any, are used with. Arguments as of
    `_as_trained` and `find_data`. Raises InputError as they do, and for data that cannot be read."""
    phase("looking for the data")
    return find_data(*_as_trained(config, checkpoint, required=required), with_headers=with_headers)


def check_data(config: TrainConfig, auto: Collection[str] = (), source: Path | None = None) -> None:
    """Raises InputError, before anything slow, if the data cannot be read or its number of samples does not suit the
    settings, of which those in `auto` have no values yet. `source`: the checkpoint that the run begins with."""
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
        """Open the data with the first or the last stage; with the first, start loading the training set from `start`
        on and, unless `only_steps`, the others for each evaluation; if `start` is None, the test set. `source`: the
        checkpoint that the weights come from, whose tokens and classes are used.

        Loader processes are forked here, before this process has threads, connections or a CUDA context. Raises
        InputError if an epoch of the resumed run had another number of steps, or the data have other classes than the
        run that is evaluated or resumed.
        """
        stages = spec.layout.stages_of(process)
        self._config, self._source = config, source
        self._first = 0 in stages  # whether this process has the first stage
        self._replica = spec.layout.replica_of(process)
        self._splits: Splits[Split] | None = None
        self._trained_on = TrainedOn()  # of the weights that the run begins with
        self.classes: tuple[str, ...] = ()  # names by output, () if the data name none; known once it is read
        self._readings: dict[SplitName, Reading] = {}  # empty without the first stage
        if self._first or spec.partitions - 1 in stages:  # stages in between never see a sample
            required = start is None or config.resume is not None
            config, self._trained_on = _as_trained(config, source, required=required)
            self._splits = open_data(config, self._trained_on)
        if self._splits is None or not self._first:
            return
        batches = {
            name: mini_batches(config, split.catalogue, training=name == "training", replica=self._replica)
            for name, split in self._splits.each()
            if start is not None or name == "test"
        }
        if start is None:
            order = coming("test", batches["test"])
        else:
            steps_per_epoch = batches["training"].steps_per_epoch
            if start.steps_per_epoch not in (0, steps_per_epoch):
                raise InputError(
                    f"resume={config.resume}: an epoch had {start.steps_per_epoch} steps there and has "
                    f"{steps_per_epoch} now, so the data is another; put back the data, and leave out the "
                    "dataset's settings"
                )
            order = coming_batches(batches, start, Milestones(config, steps_per_epoch, only_steps))
        splits = dict(self._splits.each())
        loaded = LoadedBatches(splits, order, *loaders(config, spec.layout, splits[next(iter(batches))]))
        self._readings = {name: Reading(splits[name], batches[name], loaded) for name in batches}

    def reading(self, control: ControlGroup, name: SplitName) -> Reading:
        """A split as this process reads it. Call it in every process once they are connected: those without samples
        receive the catalogue and the classes. Raises InputError if processes read data with different tokens, classes
        or numbers of samples."""
        split = None if self._splits is None else dict(self._splits.each())[name]
        own_catalogue = split.catalogue if split is not None and self._first else None
        meaning = None if split is None else _meaning_of(split)
        catalogues, meanings = zip(*control.collect((own_catalogue, meaning)), strict=True)
        first, *others = (meaning for meaning in meanings if meaning is not None)
        if any(other != first for other in others):
            why = "the processes read data with different tokens, classes or numbers of samples"
            raise InputError(f"dataset={self._config.dataset.name}: {why}; give every machine the same files")
        _, _, self.classes = first
        if name in self._readings:
            return self._readings[name]
        catalogue = next(catalogue for catalogue in catalogues if catalogue is not None)
        batches = mini_batches(self._config, catalogue, training=name == "training", replica=self._replica)
        return Reading(split, batches, None)

    def readings(self, control: ControlGroup) -> Splits[Reading]:
        """Each split of a training, as `reading` returns it."""
        names: list[SplitName] = ["training", "test"]
        if self._config.dataset.validation is not None:
            names.append("validation")
        return Splits(*(self.reading(control, name) for name in names))

    def facts(self) -> DataFacts:
        """What the banner says about the data. Call it only in the process of the first stage."""
        assert self._splits is not None
        train, test, validation = self._splits
        held_out = None if validation is None else validation.catalogue.samples
        facts = DataFacts(train.catalogue.samples, test.catalogue.samples, held_out)
        notes = self._unused_validation()
        if isinstance(train, ImageSplit) and isinstance(train.samples.pixels, Files):
            notes += (("images", train.samples.pixels.described()),)
        not_images = [split.samples.skipped for _, split in self._splits.each() if isinstance(split, ImageSplit)]
        if skipped := sum(not_images, Counter[str]()):
            kinds = ", ".join(f"{count:,} of {ending}" for ending, count in skipped.most_common(4))
            notes += (("skipped", f"{plural(skipped.total(), 'file')}, not read as images: {kinds}"),)
        if isinstance(train, MaskedText) and isinstance(test, MaskedText):
            notes += (("masked", f"{SELECTED:.0%} of the tokens, which are predicted; others are not counted"),)
            train, test = train.windows, test.windows
        if isinstance(train, TextSplit | PairSplit) and isinstance(test, TextSplit | PairSplit):
            size, asked = train.vocabulary.size, self._config.dataset.vocabulary  # type: ignore[union-attr]  # text
            facts = replace(facts, vocabulary=size, unigram_perplexity=unigram_perplexity(train, test))
            if size < asked and not isinstance(self._config.model, HuggingFaceConfig):  # which keeps its own vocabulary
                whose = "the tokenizer" if isinstance(train.vocabulary, PretrainedTokenizer) else "this text"
                fewer = f"dataset.vocabulary={asked} is more than {whose} has; {size} makes the model smaller"
                notes += (("vocabulary", fewer),)
        if isinstance(train, PairSplit) and isinstance(test, PairSplit):
            facts = replace(facts, languages=languages_of(train.pairs.languages))
            left = train.dropped + (validation.dropped if isinstance(validation, PairSplit) else 0)
            if left or test.dropped:
                left_out = f"{left:,} training and {test.dropped:,} test pairs longer than model.length"
                notes += (("left out", left_out),)
        return replace(facts, notes=notes + self.class_notes())

    def _unused_validation(self) -> Notes:
        """A line of the banner about a folder or a file `val` that is the test set, or that nothing uses."""
        dataset = self._config.dataset
        has_own = (IMAGES | TEXTS)[dataset.name].folders and getattr(dataset, "test", None) is None
        if not has_own or dataset.root is None or dataset.validation == OWN_VALIDATION:
            return ()
        for suffix in ("", ".tsv"):
            if (place := Path(dataset.root, OWN_VALIDATION + suffix)).exists():
                is_test = split_names(place.parent, suffix=suffix)[-1] == OWN_VALIDATION
                use = (
                    "is the test set, as there is no other"
                    if is_test
                    else "is not used; dataset.validation=val uses it"
                )
                return ((OWN_VALIDATION, f"{place} {use}"),)
        return ()

    def class_notes(self) -> Notes:
        """A line of the banner if nothing tells that the outputs of the weights that training begins with mean the
        classes of the data; () otherwise."""
        theirs, count = self._trained_on.classes, len(self.classes)
        if self._source is not None and theirs is None and self.classes:
            which = "its outputs" if self._trained_on.required else "outputs that are taken from it"
            what = f"{which} are taken for the classes of the data: {first_few(self.classes)}"
            return (("classes", f"that run kept no names; {what}"),)
        if self._source is None and theirs and len(theirs) == count and not same_classes(theirs, self.classes):
            what = f"the pretrained classifier is of others: {first_few(theirs)}"
            return (("classes", f"{what}; its weights are only where training begins"),)
        return ()

    def save_vocabulary(self, folder: Path) -> None:
        """Write the vocabulary of text into the run's folder. Call it only in the process of the first stage."""
        assert self._splits is not None
        vocabulary = _vocabulary_of(self._splits[0])
        if isinstance(vocabulary, Vocabulary):
            write_whole(folder / VOCABULARY, vocabulary.model)
        elif isinstance(vocabulary, PretrainedTokenizer):
            for name, content in vocabulary.files.items():
                (folder / TOKENIZER / name).parent.mkdir(parents=True, exist_ok=True)
                write_whole(folder / TOKENIZER / name, content)


def _meaning_of(split: Split) -> tuple[int, str | None, tuple[str, ...]]:
    """What must be the same of a split in all processes that open it: the number of samples, a digest of the vocabulary
    of text, and the names of the classes."""
    vocabulary = _vocabulary_of(split)
    tokens = None if vocabulary is None else digest_of("tokens", [], [vocabulary.model])
    classes = split.samples.class_names if isinstance(split, ImageSplit) else ()
    return split.catalogue.samples, tokens, classes


def _vocabulary_of(split: Split | None) -> Vocabulary | PretrainedTokenizer | None:
    """The object that maps text to tokens, None if there is no text."""
    return getattr(split.windows if isinstance(split, MaskedText) else split, "vocabulary", None)


def mini_batches(config: TrainConfig, catalogue: Catalogue, *, training: bool, replica: int = 0) -> MiniBatches:
    """The mini-batches of a training set, or of a test set: all of its samples, in the same order each time. `replica`
    is the pipeline whose share of each mini-batch is read.

    Raises InputError for a training set that is smaller than a mini-batch.
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


def check_last_mini_batch(config: TrainConfig, batches: MiniBatches) -> None:
    """Raises InputError if the model or a replica cannot train on the last mini-batch of an epoch, which may
    have fewer samples than the others."""
    if config.batch_size is not None:
        smallest = min(batches.size(0, position) for position in range(batches.steps_per_epoch))
        if smallest < config.replicas:
            why = f"the last mini-batch of an epoch has {plural(smallest, 'sample')}, less than one for each"
            raise InvalidSettingError("replicas", config.replicas, f"{why}; use dataset.drop_last=true")
        check_single_samples(config, smallest, last=smallest < config.batch_size)


def coming_batches(
    batches: Mapping[SplitName, MiniBatches], start: Progress, milestones: Milestones
) -> Iterator[Coming]:
    """The mini-batches of all splits in the order in which a training reads them from `start` on: after each step that
    is followed by an evaluation the set that chooses the best weights, and at the end, if that is not it, the test set.
    """
    training: MiniBatches = batches["training"]
    chooses: SplitName = "validation" if "validation" in batches else "test"
    places = training.stream(start.epoch, start.position, milestones.config.epochs)
    for step, place in enumerate(places, start.step + 1):
        yield from coming("training", training, [place])
        if milestones.evaluates_after(step):
            yield from coming(chooses, batches[chooses])
        if step == milestones.end_step:
            break
    if chooses != "test" and not milestones.only_steps:
        yield from coming("test", batches["test"])


def loaders(config: TrainConfig, layout: Layout, split: Split) -> tuple[int, int]:
    """The number of loader processes, `data_workers` or what suits the data set, and how many mini-batches each of them
    prepares ahead: so many, and so few processes, that the batches of all pipelines on this machine take at most a
    quarter of its memory. Raises InputError if the first sample of `split` cannot be read."""
    pipelines, workers = layout.first_stages_here, config.data_workers
    if workers is None and config.text:
        workers = 0  # a batch of text is a few look-ups, cheaper than sending it between processes
    elif workers is None:
        # Decoding image files keeps several cores busy; more than 8 rarely help the host of an accelerator. For images
        # in memory a single process is enough to overlap loading with the step.
        workers = min(max(1, usable_cores() // pipelines), 8) if config.dataset.name in DECODED else 1
    if workers == 0:
        return 0, 0
    lengths = greatest_lengths(config)
    share = share_of(mini_batch_samples(config, lengths), config.micro_batches, config.replicas)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a library would not survive the fork
    batch_bytes = sum(share.sizes) * sum(tensor.nbytes for tensor in split.inputs(0, [0], lengths))
    torch.set_num_threads(threads)
    fitting = min(usable_memory_bytes() // 4, free_shared_memory_bytes()) // (pipelines * batch_bytes)
    workers = max(1, min(workers, fitting))
    return workers, max(1, min(fitting // workers, 2))
