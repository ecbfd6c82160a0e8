"""From settings to the model and the data they describe: the one place that knows every family by name."""

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import nn

from gpipe_cli.config.dataset import ImagesConfig, TextConfig
from gpipe_cli.config.model import (
    AmoebaNetConfig,
    CustomConfig,
    ModelConfig,
    ResNetConfig,
    TimmConfig,
    TransformerLMConfig,
    TransformerNMTConfig,
)
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.batches import Split
from gpipe_cli.data.images import open_images
from gpipe_cli.data.text import open_text
from gpipe_cli.data.vocabulary import PAD
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.custom import build_custom
from gpipe_cli.models.timm_models import build_timm
from gpipe_cli.models.transformer_lm import transformer_lm
from gpipe_cli.models.transformer_nmt import transformer_nmt
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor

MEMORY_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def build_model(config: TrainConfig) -> nn.Sequential:
    """The whole model on the meta device: layers with names and shapes, no memory. Raises ValueError for bad
    settings."""
    with torch.device("meta"):
        return _model(config, weights=False)


def real_model(config: TrainConfig, *, begins: bool) -> Callable[[], nn.Sequential] | None:
    """How to build the whole model with values, where its layers cannot be initialised one by one; or None.

    timm's models, and those of users, set their initial values while they are built: every process builds all of it,
    from the same seed, and keeps its own layers; once, however many stages it has. Weights from elsewhere are for a run
    that `begins`: all others come from a checkpoint.
    """
    if isinstance(config.model, (AmoebaNetConfig, TransformerLMConfig, TransformerNMTConfig)):
        return None
    return cache(lambda: _model(config, weights=begins))


def _model(config: TrainConfig, *, weights: bool) -> nn.Sequential:
    model, dataset = config.model, config.dataset
    if isinstance(model, CustomConfig):
        return build_custom(model.target, model.arguments or {})
    return (
        _reads_text(model, dataset)
        if isinstance(dataset, TextConfig)
        else _sees_images(model, dataset, weights=weights)
    )


def _sees_images(model: ModelConfig, dataset: ImagesConfig, *, weights: bool) -> nn.Sequential:
    match model:
        case AmoebaNetConfig():
            return amoebanet(
                variant=model.variant,
                normal_cells=model.normal_cells,
                filters=model.filters,
                image_size=dataset.image_size,
                num_classes=dataset.model_classes,
                auxiliary_head=model.auxiliary_head,
                dropout=model.dropout,
                drop_path=model.drop_path,
                batch_norm_epsilon=model.batch_norm_epsilon,
                batch_norm_momentum=model.batch_norm_momentum,
                stem=model.stem,
            )
        case ResNetConfig() | TimmConfig():
            return build_timm(
                model.name if isinstance(model, TimmConfig) else f"resnet{model.depth}",
                num_classes=dataset.model_classes,
                image_size=dataset.image_size,
                dropout=model.dropout,
                drop_path=model.drop_path,
                pretrained=isinstance(model, TimmConfig) and model.pretrained and weights,
                weights=model.weights if isinstance(model, TimmConfig) and weights else None,
            )
    raise AssertionError(f"{model.name} was let through to images")


def _reads_text(model: ModelConfig, dataset: TextConfig) -> nn.Sequential:
    match model:
        case TransformerLMConfig():
            return transformer_lm(
                layers=model.layers,
                width=model.width,
                hidden=model.hidden,
                heads=model.heads,
                vocabulary=dataset.vocabulary,
                length=model.length,
                dropout=model.dropout,
                attention_dropout=model.attention_dropout,
            )
        case TransformerNMTConfig():
            return transformer_nmt(
                layers=model.layers,
                hidden=model.hidden,
                heads=model.heads,
                width=model.width,
                head_width=model.head_width,
                vocabulary=dataset.vocabulary,
                length=model.length,
                dropout=model.dropout,
                attention_dropout=model.attention_dropout,
                depth_scaled=model.depth_scaled,
                logit_clip=model.logit_clip,
                shared_embedding=model.shared_embedding,
                pad=PAD,
            )
    raise AssertionError(f"{model.name} was let through to text")


def model_inputs(config: TrainConfig) -> Boundary:
    """What the first layer is given: images (N, 3, S, S), tokens (N, S), or sources (N, S) and targets so far (N, T)"""
    if isinstance(config.dataset, ImagesConfig):
        size = config.dataset.image_size
        return (BoundaryTensor((0, 3, size, size), (1, 0, 0, 0), torch.float32, False),)
    dimensions = len(greatest_lengths(config))
    # number i is as long as length number i says, and does not depend on the others
    grows = [tuple((0, int(other == own)) for other in range(dimensions)) for own in range(dimensions)]
    return tuple(BoundaryTensor((0, 0), (1, 0), torch.int64, False, per_length) for per_length in grows)


def greatest_lengths(config: TrainConfig) -> tuple[int, ...]:
    """The most tokens of what the first layer is given; () for images."""
    if isinstance(config.dataset, ImagesConfig):
        return ()
    length = config.model.length  # type: ignore[union-attr]  # models of images were refused
    assert length is not None
    return (length,) * (2 if config.task == "translation" else 1)


def memory_format_of(config: TrainConfig) -> Literal["contiguous", "channels_last"]:
    """How images, and the weights of a model that sees them, lie in memory: a key of MEMORY_FORMATS."""
    if config.memory_format != "auto":
        return config.memory_format
    # convolutions are faster channels last, on GPUs as on CPUs (there by half: recipes/measurements/side_by_side.py)
    return "channels_last" if config.task == "classification" else "contiguous"


def outputs_of(config: TrainConfig) -> int:
    """Among how many classes, or tokens, the model chooses."""
    dataset = config.dataset
    return dataset.model_classes if isinstance(dataset, ImagesConfig) else dataset.vocabulary


def open_data(config: TrainConfig, pieces: bytes | None = None) -> tuple[Split, Split]:
    """The training and the test split; `pieces` is the vocabulary of an earlier run, for text.

    Raises ValueError, one line, for a folder that is missing, empty or different.
    """
    if isinstance(config.dataset, ImagesConfig):
        return open_images(config.dataset, config.seed)
    length, pairs = greatest_lengths(config)[0], config.task == "translation"
    return open_text(config.dataset, length=length, seed=config.seed, pairs=pairs, pieces=pieces)
