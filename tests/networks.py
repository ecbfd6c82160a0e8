"""Small networks of every kind of the paper, for the tests of models."""

from typing import Any

import torch
from torch import Tensor, nn

from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer import transformer_lm, transformer_nmt

VOCABULARY = 50
KINDS = ("language model", "shared embedding", "separate embeddings")  # of Transformers


def small_amoebanet(**settings: Any) -> nn.Sequential:
    sizes = {"variant": "d", "normal_cells": 3, "filters": 16, "image_size": 32, "num_classes": 10}
    return amoebanet(**{**sizes, "auxiliary_head": False, "batch_norm_momentum": 0.0003, **settings})


def small_transformer(kind: str, dropout: float = 0.0, **settings: Any) -> nn.Sequential:
    sizes = {"width": 16, "hidden": 32, "heads": 4, "vocabulary": VOCABULARY, "length": 12}
    rates = {"dropout": dropout, "attention_dropout": dropout}
    if kind == "language model":
        return transformer_lm(**{"layers": 3, **sizes, **rates, **settings})  # type: ignore[arg-type]
    options = {"depth_scaled": False, "logit_clip": 0.0, "shared_embedding": kind == "shared embedding"}
    return transformer_nmt(**{"layers": 2, "head_width": 8, **sizes, **rates, **options, **settings})  # type: ignore[arg-type]


def sentences(kind: str) -> tuple[Tensor, ...]:
    """What the network takes, three sequences each; the target is shorter, and the second source ends early."""
    batches = tuple(torch.randint(1, VOCABULARY, (3, length)) for length in ((9,) if kind == KINDS[0] else (9, 8)))
    for batch in batches[:-1]:
        batch[1, 6:] = 0
    return batches
