"""What a training reports while it runs: the values that travel from the workers to the parent."""

from typing import NotRequired, TypedDict


class StepMessage(TypedDict):
    """One optimizer step, after it was done. Loss and shares are means over the samples of its mini-batch, for text
    over its tokens."""

    step: int  # steps done, this one included: the first is 1
    epoch: int  # the first is 1
    position: int  # steps done in this epoch, this one included: the last is steps_per_epoch
    samples: int
    tokens: int | None  # to be predicted, padding not counted; None for images
    seconds: float
    loss: float  # what was minimized: with label smoothing and the auxiliary head
    cross_entropy: float  # in nats
    top1: float  # share of right predictions, 0 to 1
    top5: float | None  # None for text
    learning_rate: float
    gradient_norm: float | None  # over all stages, before clipping
    memory_bytes: list[int]  # peak of each stage so far
    without_core: list[float]  # of each stage, the share of its computing time in which it had no core; 0 on a GPU
    lengths: NotRequired[tuple[int, ...]]  # that its sentences were padded to; () for images
    # The most that each stage held, counted once, in one of the first steps; and what was to be expected of that
    # mini-batch.
    activation_bytes: NotRequired[list[int] | None]
    predicted_activation_bytes: NotRequired[tuple[int, ...]]
    library_bytes: NotRequired[list[int] | None]  # of each stage's process at that time; 0 on a GPU


class RecordedMessage(TypedDict):
    """When the stages did what in a step: known once the next one was done, as nobody waits for it."""

    step: int
    breakdown: dict[str, float]  # timeline_view.SHARES -> share of stage-time, 0 to 1


class Translation(TypedDict):
    """One sentence of the test set, as the model translates it."""

    pair: str  # `de-en`
    source: str
    reference: str
    translation: str


class EvaluationMessage(TypedDict):
    """The test set after some step; one evaluation for a step."""

    step: int
    epoch: int
    tokens: int | None  # as in a step
    loss: float  # cross-entropy, mean over the samples or tokens
    top1: float
    top5: float | None
    averaged: bool  # whether the weights were the moving average
    is_best: bool
    translations: list[Translation]  # some of them; [] where there is nothing to translate


class TranslationResult(TypedDict):
    """How well a test set was translated, by sentences decoded without sight of their references; scores 0 to 100."""

    bleu: float
    chrf: float
    bleu_copy: float  # of the sources, taken for translations
    chrf_copy: float
    sentences: int  # decoded
    of: int  # sentences of the test set
    beam: int
    seconds: float  # to decode
    bleu_signature: str  # how it was computed, in the words of the library that did
    chrf_signature: str
    examples: list[Translation]
