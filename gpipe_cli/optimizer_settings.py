"""How weights are updated and by how much: the paper's RMSProp and decay, and what its Transformers and today's
models are trained with.

`name` tells the choices apart.
"""

from dataclasses import dataclass
from typing import Literal

from gpipe_cli.typed import above_zero, at_least, share


@dataclass(frozen=True, slots=True)
class RMSPropConfig:
    name: Literal["rmsprop"]
    decay: float
    momentum: float
    epsilon: float
    weight_decay: float

    def __post_init__(self) -> None:
        share("optimizer.decay", self.decay)
        share("optimizer.momentum", self.momentum)
        above_zero("optimizer.epsilon", self.epsilon)
        at_least("optimizer.weight_decay", self.weight_decay, 0)


@dataclass(frozen=True, slots=True)
class SGDConfig:
    name: Literal["sgd"]
    momentum: float
    nesterov: bool
    weight_decay: float

    def __post_init__(self) -> None:
        share("optimizer.momentum", self.momentum)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        if self.nesterov and not self.momentum:
            raise ValueError("optimizer.nesterov=true: needs a momentum; use optimizer.momentum=0.9")


@dataclass(frozen=True, slots=True)
class AdamConfig:
    name: Literal["adam"]
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    decoupled: bool

    def __post_init__(self) -> None:
        share("optimizer.beta1", self.beta1)
        share("optimizer.beta2", self.beta2)
        above_zero("optimizer.epsilon", self.epsilon)
        at_least("optimizer.weight_decay", self.weight_decay, 0)


@dataclass(frozen=True, slots=True)
class AdafactorConfig:
    name: Literal["adafactor"]
    beta2_decay: float
    clipping: float
    weight_decay: float

    def __post_init__(self) -> None:
        if not -1 <= self.beta2_decay < 0:
            raise ValueError(f"optimizer.beta2_decay={self.beta2_decay}: must be -1 to below 0; use -0.8")
        above_zero("optimizer.clipping", self.clipping)
        at_least("optimizer.weight_decay", self.weight_decay, 0)


@dataclass(frozen=True, slots=True)
class PaperLearningRateConfig:
    name: Literal["paper"]
    per_sample: float  # times batch_size: the initial learning rate
    decay: float
    every_epochs: float
    warmup_epochs: float

    def __post_init__(self) -> None:
        above_zero("learning_rate.per_sample", self.per_sample)
        above_zero("learning_rate.decay", self.decay, most=1)
        above_zero("learning_rate.every_epochs", self.every_epochs)
        at_least("learning_rate.warmup_epochs", self.warmup_epochs, 0)

    @property
    def scale(self) -> str:
        """The setting that makes all rates smaller."""
        return "per_sample"


@dataclass(frozen=True, slots=True)
class InverseSqrtLearningRateConfig:
    name: Literal["inverse_sqrt"]
    peak: float
    warmup_steps: int

    def __post_init__(self) -> None:
        above_zero("learning_rate.peak", self.peak)
        at_least("learning_rate.warmup_steps", self.warmup_steps, 1)

    @property
    def scale(self) -> str:
        return "peak"


@dataclass(frozen=True, slots=True)
class CosineLearningRateConfig:
    name: Literal["cosine"]
    peak: float
    warmup_epochs: float
    final_share: float

    def __post_init__(self) -> None:
        above_zero("learning_rate.peak", self.peak)
        at_least("learning_rate.warmup_epochs", self.warmup_epochs, 0)
        share("learning_rate.final_share", self.final_share)

    @property
    def scale(self) -> str:
        return "peak"


@dataclass(frozen=True, slots=True)
class ConstantLearningRateConfig:
    name: Literal["constant"]
    peak: float
    warmup_epochs: float

    def __post_init__(self) -> None:
        above_zero("learning_rate.peak", self.peak)
        at_least("learning_rate.warmup_epochs", self.warmup_epochs, 0)

    @property
    def scale(self) -> str:
        return "peak"


OptimizerConfig = RMSPropConfig | SGDConfig | AdamConfig | AdafactorConfig
LearningRateConfig = (
    PaperLearningRateConfig | InverseSqrtLearningRateConfig | CosineLearningRateConfig | ConstantLearningRateConfig
)
