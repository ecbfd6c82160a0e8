"""How weights are updated and by how much: the paper's RMSProp and decay, and what its Transformers and today's
models are trained with.

`name` identifies the choice.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from gpipe_cli.config.typed import SMALLEST, Count, NotNegative, Positive, RefusedError, Share, Within

Epochs = Annotated[float, Within(0, 10**9)]


@dataclass(frozen=True, slots=True)
class RMSPropConfig:
    name: Literal["rmsprop"]
    decay: Share
    momentum: Share
    epsilon: Positive
    weight_decay: NotNegative


@dataclass(frozen=True, slots=True)
class SGDConfig:
    name: Literal["sgd"]
    momentum: Share
    nesterov: bool
    weight_decay: NotNegative

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise RefusedError("optimizer.nesterov", True, "needs a momentum; use optimizer.momentum=0.9")


@dataclass(frozen=True, slots=True)
class AdamConfig:
    name: Literal["adam"]
    beta1: Share
    beta2: Share
    epsilon: Positive
    weight_decay: NotNegative
    decoupled: bool


@dataclass(frozen=True, slots=True)
class AdafactorConfig:
    name: Literal["adafactor"]
    beta2_decay: Annotated[float, Within(-1, 0, below=True, use=-0.8)]
    clipping: Positive
    weight_decay: NotNegative


@dataclass(frozen=True, slots=True)
class PaperLearningRateConfig:
    name: Literal["paper"]
    per_sample: Positive  # times batch_size: the initial learning rate
    decay: Annotated[float, Within(SMALLEST, 1)]
    every_epochs: Annotated[float, Within(SMALLEST, 10**9, use=3)]
    warmup_epochs: Epochs


@dataclass(frozen=True, slots=True)
class InverseSqrtLearningRateConfig:
    name: Literal["inverse_sqrt"]
    peak: Positive
    warmup_steps: Count


@dataclass(frozen=True, slots=True)
class CosineLearningRateConfig:
    name: Literal["cosine"]
    peak: Positive
    warmup_epochs: Epochs
    final_share: Share


@dataclass(frozen=True, slots=True)
class ConstantLearningRateConfig:
    name: Literal["constant"]
    peak: Positive
    warmup_epochs: Epochs


OptimizerConfig = RMSPropConfig | SGDConfig | AdamConfig | AdafactorConfig
LearningRateConfig = (
    PaperLearningRateConfig | InverseSqrtLearningRateConfig | CosineLearningRateConfig | ConstantLearningRateConfig
)
