"""From settings to the model and the data they describe: the one place that knows every family by name."""

from collections.abc import Callable

import torch
from torch import nn

from gpipe_cli.config import TrainConfig
from gpipe_cli.data.augmentation import Augmentation
from gpipe_cli.data.images import ImageSplit, open_images
from gpipe_cli.model_settings import AmoebaNetConfig, CustomConfig, ResNetConfig, TimmConfig
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.custom import build_custom
from gpipe_cli.models.timm_models import build_timm, resnet
from gpipe_cli.pipeline.layer_cost import Boundary, BoundaryTensor


def build_model(config: TrainConfig) -> nn.Sequential:
    """The whole model on the meta device: layers with names and shapes, no memory. Raises ValueError for bad
    settings."""
    with torch.device("meta"):
        return _model(config, real=False)


def real_model(config: TrainConfig) -> Callable[[], nn.Sequential] | None:
    """How to build the whole model with values, where its layers cannot be initialised one by one; or None.

    timm's models, and those of users, set their initial values while they are built: every process builds all of it,
    from the same seed, and keeps its own layers.
    """
    if isinstance(config.model, AmoebaNetConfig):
        return None
    return lambda: _model(config, real=True)


def _model(config: TrainConfig, *, real: bool) -> nn.Sequential:
    model, dataset = config.model, config.dataset
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
        case ResNetConfig():
            return resnet(
                model.depth,
                num_classes=dataset.model_classes,
                image_size=dataset.image_size,
                dropout=model.dropout,
                drop_path=model.drop_path,
            )
        case CustomConfig():
            return build_custom(model.target, model.arguments or {})
        case TimmConfig():
            return build_timm(
                model.name,
                num_classes=dataset.model_classes,
                image_size=dataset.image_size,
                dropout=model.dropout,
                drop_path=model.drop_path,
                pretrained=model.pretrained and real,
                weights=model.weights if real else None,
            )


def model_inputs(config: TrainConfig) -> Boundary:
    """What the first layer is given: images (N, 3, S, S)."""
    size = config.dataset.image_size
    return (BoundaryTensor((0, 3, size, size), (1, 0, 0, 0), torch.float32, False),)


def open_data(config: TrainConfig) -> tuple[ImageSplit, ImageSplit]:
    """The training and the test split. Raises ValueError, one line, for a folder that is missing, empty or
    different."""
    dataset = config.dataset
    augmentation = Augmentation(
        dataset.augmentation.random_resized_crop,
        dataset.augmentation.horizontal_flip,
        dataset.augmentation.cutout,
        dataset.augmentation.shift,
    )
    return open_images(
        dataset.name,
        root=dataset.root,
        image_size=dataset.image_size,
        num_classes=dataset.num_classes,
        seed=config.seed,
        augmentation=augmentation,
        download=dataset.download,
        partial=dataset.partial,
        classes=dataset.classes,
        train_samples=dataset.train_samples or 0,
        test_samples=dataset.test_samples or 0,
    )
