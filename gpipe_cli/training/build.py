"""From settings to the model and the data they describe: the one place that knows every family by name."""

import torch
from torch import nn

from gpipe_cli.config import TrainConfig
from gpipe_cli.data.augmentation import Augmentation
from gpipe_cli.data.images import ImageSplit, open_images
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.pipeline.layer_cost import Boundary, BoundaryTensor


def build_model(config: TrainConfig) -> nn.Sequential:
    """The whole model on the meta device: layers with names and shapes, no memory. Raises ValueError for bad
    settings."""
    model = config.model
    with torch.device("meta"):
        return amoebanet(
            variant=model.variant,
            normal_cells=model.normal_cells,
            filters=model.filters,
            image_size=config.dataset.image_size,
            num_classes=config.dataset.num_classes,
            auxiliary_head=model.auxiliary_head,
            dropout=model.dropout,
            drop_path=model.drop_path,
            batch_norm_epsilon=model.batch_norm_epsilon,
            batch_norm_momentum=model.batch_norm_momentum,
            stem=model.stem,
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
        train_samples=dataset.train_samples or 0,
        test_samples=dataset.test_samples or 0,
    )
