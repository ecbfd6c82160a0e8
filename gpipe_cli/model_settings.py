"""The models of an experiment: what each family can be told.

The families are those of the paper's sections 3 to 5, timm's, and one's own. `name` tells them apart.
"""

from dataclasses import dataclass
from typing import Any, Literal

from gpipe_cli.typed import above_zero, at_least, share


@dataclass(frozen=True, slots=True)
class AmoebaNetConfig:
    name: Literal["amoebanet"]
    variant: Literal["b", "d"]
    normal_cells: int
    filters: int
    auxiliary_head: bool
    auxiliary_weight: float
    dropout: float
    drop_path: float
    batch_norm_epsilon: float
    batch_norm_momentum: float
    stem: Literal["auto", "imagenet", "small"]

    def __post_init__(self) -> None:
        at_least("model.normal_cells", self.normal_cells, 3)
        at_least("model.filters", self.filters, 1)
        at_least("model.auxiliary_weight", self.auxiliary_weight, 0)
        share("model.dropout", self.dropout)
        share("model.drop_path", self.drop_path)
        above_zero("model.batch_norm_epsilon", self.batch_norm_epsilon)
        above_zero("model.batch_norm_momentum", self.batch_norm_momentum, most=1)


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    name: Literal["resnet"]
    depth: int
    dropout: float
    drop_path: float

    def __post_init__(self) -> None:
        if self.depth not in (18, 34, 50, 101, 152):
            raise ValueError(f"model.depth={self.depth}: must be 18, 34, 50, 101 or 152; use model.depth=50")
        share("model.dropout", self.dropout)
        share("model.drop_path", self.drop_path)


@dataclass(frozen=True, slots=True)
class CustomConfig:
    """A function of one's own."""

    name: Literal["custom"]
    target: str  # package.module:function
    arguments: dict[str, Any] | None
    length: int | None  # tokens, for text

    def __post_init__(self) -> None:
        at_least("model.length", self.length, 2)


@dataclass(frozen=True, slots=True)
class TimmConfig:
    """Any of timm's models that is a chain; its `name` is timm's."""

    name: str
    pretrained: bool
    weights: str | None
    dropout: float
    drop_path: float

    def __post_init__(self) -> None:
        share("model.dropout", self.dropout)
        share("model.drop_path", self.drop_path)


@dataclass(frozen=True, slots=True)
class TransformerLMConfig:
    """Table 1's Transformer-L."""

    name: Literal["transformer_lm"]
    layers: int
    width: int
    hidden: int
    heads: int
    length: int
    dropout: float
    attention_dropout: float

    def __post_init__(self) -> None:
        for key in ("layers", "width", "hidden", "heads"):
            at_least(f"model.{key}", getattr(self, key), 1)
        at_least("model.length", self.length, 2)
        share("model.dropout", self.dropout)
        share("model.attention_dropout", self.attention_dropout)


@dataclass(frozen=True, slots=True)
class TransformerNMTConfig:
    """Section 5's T(L, H, A)."""

    name: Literal["transformer_nmt"]
    layers: int
    hidden: int
    heads: int
    width: int
    head_width: int
    length: int
    dropout: float
    attention_dropout: float
    depth_scaled: bool
    logit_clip: float
    shared_embedding: bool

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "heads", "width", "head_width"):
            at_least(f"model.{key}", getattr(self, key), 1)
        at_least("model.length", self.length, 2)
        share("model.dropout", self.dropout)
        share("model.attention_dropout", self.attention_dropout)
        at_least("model.logit_clip", self.logit_clip, 0)


ModelConfig = AmoebaNetConfig | ResNetConfig | TransformerLMConfig | TransformerNMTConfig | CustomConfig | TimmConfig


def choice_of(config: Any) -> str:
    """The file in `conf/` that a group's settings came from."""
    return "timm" if isinstance(config, TimmConfig) else str(config.name)
