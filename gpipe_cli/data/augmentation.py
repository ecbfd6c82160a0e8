"""From the pixels of a data set to the tensor a model sees (paper, Section 4 and its supplement).

The ImageNet runs used Inception preprocessing, which in the authors' TPU code is a random crop of 10-100 % of the area,
a random flip and values scaled to [-1, 1]; evaluation is on one central 87.5 % crop. The transfer runs used a random
flip and cutout. The steps are torchvision's, except cutout, which torchvision does not have.

Departs from the paper: no colour distortion; a random crop that does not fit is tried 10 times (torchvision), not 100.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_cli.config.dataset import AugmentationConfig
from gpipe_cli.config.typed import RefusedError


@dataclass(frozen=True)
class Cutout:
    """Set a square of `side` pixels to 0, the middle of [-1, 1] (DeVries and Taylor 2017).

    The centre is uniform over the image, so the square may extend over the border, as in that paper.
    """

    side: int

    def __call__(self, image: Tensor) -> Tensor:
        """(C, H, W) -> a new tensor of that shape."""
        height, width = image.shape[-2:]
        top = int(torch.randint(height, ())) - self.side // 2
        left = int(torch.randint(width, ())) - self.side // 2
        image = image.clone()
        image[..., max(top, 0) : top + self.side, max(left, 0) : left + self.side] = 0
        return image


def build_transform(
    image_size: int, centre_share: float, augmentation: AugmentationConfig | None
) -> Callable[[Tensor], Tensor]:
    """The steps from (3, H, W), uint8 or float32 in [0, 1], to float32 (3, image_size, image_size) in [-1, 1].

    centre_share: the share of the shorter side that the single centre crop keeps: 0.875 for photographs (the TPU code's
    evaluation), 1.0 for the whole image. augmentation: None for evaluation. Random steps draw from torch's default
    generator.

    Raises ValueError where a length of the augmentation does not fit images of this size.
    """
    from torchvision.transforms import v2

    vary = augmentation or AugmentationConfig(None, horizontal_flip=False, cutout=0, shift=0)
    for setting, pixels in (("cutout", vary.cutout), ("shift", vary.shift)):
        if pixels >= image_size:
            why = f"the images are only {image_size} pixels wide; use {image_size - 1} or less, or 0 to switch it off"
            raise RefusedError(f"dataset.augmentation.{setting}", pixels, why)
    steps: list[Callable[[Tensor], Tensor]] = []
    if vary.random_resized_crop is not None:
        # Aspect ratio 3/4 to 4/3, bilinear: torchvision's defaults and the TPU code's.
        steps.append(v2.RandomResizedCrop(image_size, scale=vary.random_resized_crop))
    else:
        steps += [v2.Resize(max(image_size, round(image_size / centre_share))), v2.CenterCrop(image_size)]
    if vary.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip())
    if vary.shift > 0:
        steps.append(v2.RandomCrop(image_size, padding=vary.shift))  # black where nothing was
    # x -> 2x - 1, the TPU code's scaling to [-1, 1], here for every data set instead of its own mean and deviation.
    steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=[0.5] * 3, std=[0.5] * 3)]
    if vary.cutout > 0:
        steps.append(Cutout(vary.cutout))
    return v2.Compose(steps)
