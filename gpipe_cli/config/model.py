"""The models of an experiment: the settings of each family.

The families are those of the paper's sections 3 to 5, timm's, and one's own. `name` identifies the family.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from gpipe_cli.config.typed import SMALLEST, NotNegative, Positive, Share, Within

Layers = Annotated[int, Within(1, 10_000)]
Channels = Annotated[int, Within(1, 1_000_000)]
Heads = Annotated[int, Within(1, 10_000)]
Tokens = Annotated[int, Within(2, 1_000_000)]  # of a sequence


@dataclass(frozen=True, slots=True)
class AmoebaNetConfig:
    name: Literal["amoebanet"]
    variant: Literal["b", "d"]
    normal_cells: Annotated[int, Within(3, 1000)]
    filters: Annotated[int, Within(1, 65_536)]
    auxiliary_head: bool
    auxiliary_weight: NotNegative
    dropout: Share
    drop_path: Share
    batch_norm_epsilon: Positive
    batch_norm_momentum: Annotated[float, Within(SMALLEST, 1)]
    stem: Literal["auto", "imagenet", "small"]


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    name: Literal["resnet"]
    depth: Literal[18, 34, 50, 101, 152]
    dropout: Share
    drop_path: Share


@dataclass(frozen=True, slots=True)
class CustomConfig:
    """A function of one's own."""

    name: Literal["custom"]
    target: str  # package.module:function
    arguments: dict[str, Any] | None
    length: Tokens | None  # tokens, for text


@dataclass(frozen=True, slots=True)
class TimmConfig:
    """Any of timm's models that is a chain; its `name` is timm's."""

    name: str
    pretrained: bool
    weights: str | None
    dropout: Share
    drop_path: Share


@dataclass(frozen=True, slots=True)
class TransformerLMConfig:
    """Table 1's Transformer-L."""

    name: Literal["transformer_lm"]
    layers: Layers
    width: Channels
    hidden: Channels
    heads: Heads
    length: Tokens
    dropout: Share
    attention_dropout: Share


@dataclass(frozen=True, slots=True)
class TransformerNMTConfig:
    """Section 5's T(L, H, A)."""

    name: Literal["transformer_nmt"]
    layers: Layers
    hidden: Channels
    heads: Heads
    width: Channels
    head_width: Annotated[int, Within(1, 10_000)]
    length: Tokens
    dropout: Share
    attention_dropout: Share
    depth_scaled: bool
    logit_clip: NotNegative
    shared_embedding: bool


ModelConfig = AmoebaNetConfig | ResNetConfig | TransformerLMConfig | TransformerNMTConfig | CustomConfig | TimmConfig


def choice_of(config: Any) -> str:
    """The file in `conf/` that a group's settings came from."""
    return "timm" if isinstance(config, TimmConfig) else str(config.name)
