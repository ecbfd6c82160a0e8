"""What the workers of a training or an evaluation send to the parent while they run. Process 0 alone sends them,
but for the message that it was stopped."""

from dataclasses import dataclass

Notes = tuple[tuple[str, str], ...]  # lines of the banner: label, fact


@dataclass(frozen=True)
class DataFacts:
    """What the banner says of the data."""

    train_samples: int | None = None  # None, as of the next one: not opened, as in a dry run
    test_samples: int | None = None
    vocabulary: int | None = None  # tokens in it; text only, as all that follows
    languages: int | None = None  # languages of a translation
    unigram_perplexity: float | None = None  # the test set's, if a model knows only how frequent tokens are
    notes: Notes = ()


@dataclass(frozen=True)
class LayersCompiled:
    """What compile=true has done, in all processes together."""

    layers: int
    sizes: tuple[int, ...]  # samples in each micro-batch
    graphs: int  # graphs of layers: equal layers in a process share one for each size
    made: int  # forwards and backwards of these that were compiled
    found: int  # kernels found on disk
    seconds: float  # the process that took longest


@dataclass(frozen=True)
class Scores:
    """Scores on the test set: as in a step, but the loss is the cross-entropy."""

    tokens: int | None
    loss: float
    top1: float
    top5: float | None
    averaged: bool  # whether the weights were the moving average


@dataclass(frozen=True)
class Tested:
    """The test set after some step."""

    step: int
    epoch: int
    scores: Scores


@dataclass(frozen=True)
class TrainingReady:
    """Everything is open and connected; the first step comes next."""

    data: DataFacts
    notes: Notes
    first_step: int  # steps done before this run began
    steps_per_epoch: int
    gpu_names: tuple[str, ...]
    compiled: LayersCompiled | None = None
    test: Tested | None = None  # the last one before the first step, as of the next one
    best: Tested | None = None


@dataclass(frozen=True)
class StepDone:
    """One optimizer step, sent during the next one. Loss and shares are means over the samples of its mini-batch, for
    text over its tokens."""

    step: int  # steps done, this one included: the first is 1
    epoch: int  # the first is 1
    position: int  # steps done in this epoch, this one included: the last is steps_per_epoch
    samples: int
    tokens: int | None  # tokens to predict, padding not counted; None for images
    lengths: tuple[int, ...]  # lengths that its sentences were padded to; () for images
    seconds: float
    loss: float  # the loss minimized, with label smoothing and the auxiliary head
    cross_entropy: float  # unit: nats
    top1: float  # share of right predictions, 0 to 1
    top5: float | None  # None for text
    learning_rate: float
    gradient_norm: float  # over all stages, before clipping
    memory_bytes: tuple[int, ...]  # peak of each stage so far
    without_core: tuple[float, ...]  # per stage, the share of its computing time without a core; 0 on a GPU
    # Counted in one of the first steps; None in the others.
    activation_bytes: tuple[int, ...] | None  # per stage, the most that was saved at once
    library_bytes: tuple[int, ...] | None  # per stage, that of its process at that time; 0 on a GPU


@dataclass(frozen=True)
class StepRecorded:
    """When the stages did what in the step that was sent last."""

    seconds: list[list[float]]  # per stage, as `Recording.seconds` gives them
    began_seconds: float  # on the same clock


@dataclass(frozen=True)
class Evaluated(Tested):
    """One evaluation for a step."""

    is_best: bool
    translations: tuple["Translation", ...]  # some of them; () where there is nothing to translate


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint is complete on disk."""

    step: int


@dataclass(frozen=True)
class CheckpointFailed:
    """A checkpoint could not be written; the training goes on."""

    step: int
    why: str  # one line


@dataclass(frozen=True)
class CheckpointAwaited:
    """The training waited after a step, as the checkpoint of an earlier one, or of the last one, was not complete."""

    step: int
    awaited_step: int
    seconds: float


@dataclass(frozen=True)
class TrainingStopped:
    """The training has ended before its last step, as asked, with a checkpoint. Every process sends it."""

    step: int


@dataclass(frozen=True)
class EvaluationReady:
    """`gpipe evaluate`: the checkpoint is loaded, the test set comes next."""


@dataclass(frozen=True)
class SentencesDecoded:
    """`gpipe evaluate`: how many sentences of how many are translated."""

    done: int
    of: int


@dataclass(frozen=True)
class EvaluationDone:
    """`gpipe evaluate`: the answer."""

    samples: int
    scores: Scores
    seconds: float
    unigram_perplexity: float | None  # text only
    translation: "TranslationScores | None"  # None: nothing was decoded


@dataclass(frozen=True)
class ModelWritten:
    """`gpipe export`: the file is complete."""

    bytes: int
    holds: str  # `122 tensors`
    call: str  # the call of a function that reads it


@dataclass(frozen=True)
class FileEvaluated:
    """`gpipe export`: the test set, by the file alone."""

    scores: Scores
    by: str  # the program that has read it


@dataclass(frozen=True)
class Translation:
    """One sentence of the test set, as the model translates it."""

    pair: str  # `de-en`
    source: str
    reference: str
    translation: str


@dataclass(frozen=True)
class TranslationScores:
    """How well a test set was translated, by sentences decoded without sight of their references; scores 0 to 100."""

    bleu: float
    chrf: float
    bleu_copy: float  # BLEU of the sources taken for translations
    chrf_copy: float
    sentences: int  # decoded
    of: int  # sentences of the test set
    beam: int
    seconds: float  # time to decode
    bleu_signature: str  # how it was computed, in the words of the library that did
    chrf_signature: str
    examples: tuple[Translation, ...]
