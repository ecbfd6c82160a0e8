"""Messages that workers send to the parent during a training, an evaluation or an export. Only process 0 sends them,
except `TrainingStopped`, which every process sends."""

from dataclasses import dataclass

from gpipe_cli.config.settings import SplitName

Notes = tuple[tuple[str, str], ...]  # lines of the banner: label, fact


@dataclass(frozen=True)
class DataFacts:
    """The banner's facts about the data."""

    train_samples: int | None = None  # None if the data was not opened, as in a dry run
    test_samples: int | None = None  # None if the data was not opened
    validation_samples: int | None = None  # None if there is no validation set
    vocabulary: int | None = None  # number of tokens; None for images
    languages: int | None = None  # number of languages; None except for translation
    unigram_perplexity: float | None = None  # of the test set, by token frequencies alone; None for images
    notes: Notes = ()


@dataclass(frozen=True)
class LayersCompiled:
    """What compile=true has compiled, over all processes."""

    layers: int
    sizes: tuple[int, ...]  # sizes of micro-batches, in samples
    graphs: int  # graphs of layers: equal layers in a process share a graph per size
    made: int  # forwards and backwards of these graphs that were compiled
    found: int  # found in torch's cache on disk; a forward and a backward that are found together count once
    seconds: float  # time of the slowest process


@dataclass(frozen=True)
class GraphsCaptured:
    """Which stages are replayed as graphs, over all processes."""

    stages: int  # number of stages that are replayed
    fallback_reasons: tuple[str, ...]  # for each other stage: its index, the layer, and why it cannot be replayed
    seconds: float  # time of the slowest process


@dataclass(frozen=True)
class Scores:
    """Scores on the test or the validation set, as in `StepDone`, but the loss is the plain cross-entropy in nats."""

    tokens: int | None
    loss: float
    top1: float
    top5: float | None
    averaged: bool  # whether these are the scores of the weights' moving averages


@dataclass(frozen=True)
class EvalRecord:
    """The scores on a set after step `step`."""

    step: int
    epoch: int
    scores: Scores


@dataclass(frozen=True)
class TrainingReady:
    """Everything is open and connected; the first step comes next."""

    data: DataFacts
    notes: Notes
    first_step: int  # steps done before this run began
    steps_per_epoch: int | None  # None in a dry run, which has not opened the data
    gpu_names: tuple[str, ...] = ()
    compiled: LayersCompiled | None = None
    graphs: GraphsCaptured | None = None
    test: EvalRecord | None = None  # the last evaluation before the first step, of a resumed run
    best: EvalRecord | None = None  # the best evaluation before the first step


@dataclass(frozen=True)
class StepDone:
    """An optimizer step, sent during the next step. Losses and top-1/top-5 are means over the mini-batch's elements:
    samples, pixels with a class, or tokens; 0 if it has none."""

    step: int  # steps done, with this step: the first is 1
    epoch: int  # the first is 1
    position: int  # steps done in this epoch, with this step: the last is steps_per_epoch
    samples: int
    tokens: int | None  # tokens to predict, padding not counted; None for images
    lengths: tuple[int, ...]  # lengths, in tokens, to which the sentences were padded; () for images
    seconds: float
    loss: float  # the loss minimized, with label smoothing and the auxiliary head
    cross_entropy: float  # in nats
    top1: float  # fraction of correct predictions, 0 to 1
    top5: float | None  # for images with a single class; else None
    epoch_cross_entropy: float  # mean over the elements of the epoch so far, including steps before a resume
    epoch_top1: float  # the same for top1
    learning_rate: float
    gradient_norm: float  # over all stages, before clipping
    memory_bytes: tuple[int, ...]  # peak memory of each stage so far
    cpu_starved_share: tuple[float, ...]  # per stage, the share of its computing time without a core; 0 on a GPU
    # The next two are counted in one of the first steps, `overhead_bytes` also in the first; else they are None.
    activation_bytes: tuple[int, ...] | None  # per stage, the peak bytes of saved activations
    overhead_bytes: tuple[int, ...] | None  # per stage, memory of its process's libraries; None on GPUs


@dataclass(frozen=True)
class StepRecorded:
    """The timeline of the step of the last `StepDone`."""

    seconds: list[list[float]]  # per stage, as returned by `StepTimings.seconds`
    began_seconds: float  # when the step was launched and stage 0 was free, on the same clock


@dataclass(frozen=True)
class Evaluated(EvalRecord):
    """An evaluation during training; with a validation set, also the evaluation on the test set after the last step,
    with the weights of the best step."""

    split: SplitName
    is_best: bool
    translations: tuple["Translation", ...]  # of some test sentences; () if the task is not translation


@dataclass(frozen=True)
class CheckpointReady:
    """A checkpoint is written except for its name, which it gets once all earlier reports are on disk."""

    step: int


@dataclass(frozen=True)
class CheckpointEnded:
    """A checkpoint is complete on disk, or could not be written; the training continues."""

    step: int
    failure: str | None = None  # the cause, a line; None if the checkpoint is complete


@dataclass(frozen=True)
class CheckpointStalled:
    """After `step`, the training waited because the checkpoint of `stalled_step` was not complete."""

    step: int
    stalled_step: int
    seconds: float


@dataclass(frozen=True)
class TrainingStopped:
    """The training was asked to stop by a signal, and ended before its last step with a checkpoint. Every process sends
    this."""

    signal: int


@dataclass(frozen=True)
class EvaluationReady:
    """`gpipe evaluate`: the checkpoint is loaded, the test set comes next."""


@dataclass(frozen=True)
class SentencesDecoded:
    """`gpipe evaluate`: `done` sentences out of `of` are translated."""

    done: int
    of: int


@dataclass(frozen=True)
class EvaluationDone:
    """`gpipe evaluate`: the result."""

    samples: int
    scores: Scores
    seconds: float  # time of the pass over the test set, without decoding
    unigram_perplexity: float | None  # None for images
    translation: "TranslationScores | None"  # None if nothing was decoded
    notes: Notes = ()


@dataclass(frozen=True)
class ModelWritten:
    """`gpipe export`: the file is complete."""

    bytes: int
    contents: str  # of the file, such as `122 tensors`
    call: str  # the Python expression that reads the file


@dataclass(frozen=True)
class FileEvaluated:
    """`gpipe export`: the scores on the test set of the model in the file."""

    scores: Scores
    program: str  # name and version of the program that read the file


@dataclass(frozen=True)
class Translation:
    """A sentence of the test set, with the model's translation."""

    pair: str  # `de-en`
    source: str
    reference: str
    translation: str


@dataclass(frozen=True)
class PairScores:
    """Scores, 0 to 100, of the sentences of a language pair."""

    pair: str  # `de-en`
    sentences: int
    bleu: float
    chrf: float
    bleu_signature: str  # names the tokenizer that sacreBLEU recommends for the target language


@dataclass(frozen=True)
class TranslationScores:
    """Scores, 0 to 100, of sentences of the test set that were decoded without teacher forcing."""

    bleu: float  # of all sentences as a corpus, each tokenized as its pair
    chrf: float
    bleu_copy: float  # BLEU of the sources, taken as translations
    chrf_copy: float  # chrF of the sources
    sentences: int  # sentences decoded
    of: int  # sentences in the test set
    beam: int
    seconds: float  # time to decode
    bleu_signature: str  # sacreBLEU's description of how `bleu` was computed
    chrf_signature: str  # the same for `chrf`
    examples: tuple[Translation, ...]
    pairs: tuple[PairScores, ...]
