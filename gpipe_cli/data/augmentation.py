"""From the pixels of a data set to the tensor a model sees (paper, Section 4 and its supplement).

The ImageNet runs used Inception preprocessing, which in the authors' TPU code is a random crop of 10-100 % of the area,
a random flip and values scaled to [-1, 1]; evaluation is on one central 87.5 % crop. The transfer runs used a random
flip and cutout. The steps are torchvision's, except cutout, which torchvision does not have.

Departs from the paper: no colour distortion; a random crop that does not fit is tried 10 times (torchvision), not 100.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Augmentation", "Cutout", "build_transform"]


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied; evaluation never is.

    random_resized_crop: range of the crop's area as a share of the image's, e.g. (0.1, 1.0); None keeps the framing of
    evaluation. horizontal_flip: mirror every second image. cutout: side of a grey square in pixels of the final image,
    0 is off. shift: translate by up to this many pixels of the final image, black where nothing was, 0 is off.

    Raises ValueError for values that mean nothing.
    """

    random_resized_crop: tuple[float, float] | None = None
    horizontal_flip: bool = False
    cutout: int = 0
    shift: int = 0

    def __post_init__(self) -> None:
        if self.random_resized_crop is not None:
            area = tuple(self.random_resized_crop)
            if len(area) != 2 or not 0 < area[0] <= area[1] <= 1:
                raise ValueError(
                    f"dataset.augmentation.random_resized_crop={list(area)}: must be two shares of the image's area, "
                    "0 < least <= most <= 1; use [0.1,1.0], or null to switch it off"
                )
        for setting, pixels in (("cutout", self.cutout), ("shift", self.shift)):
            if pixels < 0:
                raise ValueError(
                    f"dataset.augmentation.{setting}={pixels}: must be 0 pixels or more; use 0 to switch it off"
                )

    def check(self, image_size: int) -> None:
        """Raise ValueError where a length does not fit images of `image_size` pixels."""
        for setting, pixels in (("cutout", self.cutout), ("shift", self.shift)):
            if pixels >= image_size:
                raise ValueError(
                    f"dataset.augmentation.{setting}={pixels}: the images are only {image_size} pixels wide "
                    f"(dataset.image_size); use {image_size - 1} or less, or 0 to switch it off"
                )


@dataclass(frozen=True)
class Cutout:
    """Set a square of `side` pixels to 0, the middle of [-1, 1] (DeVries and Taylor 2017).

    The centre is uniform over the image, so the square may hang over the border, as in that paper.
    """

    side: int

    def __call__(self, image: Tensor) -> Tensor:
        """(C, H, W) -> a new tensor of that shape."""
        import torch

        height, width = image.shape[-2:]
        top = int(torch.randint(height, ())) - self.side // 2
        left = int(torch.randint(width, ())) - self.side // 2
        image = image.clone()
        image[..., max(top, 0) : top + self.side, max(left, 0) : left + self.side] = 0
        return image


def build_transform(
    image_size: int, centre_share: float, augmentation: Augmentation | None
) -> Callable[[Tensor], Tensor]:
    """The steps from (3, H, W), uint8 or float32 in [0, 1], to float32 (3, image_size, image_size) in [-1, 1].

    centre_share: the share of the shorter side that the single centre crop keeps: 0.875 for photographs (the TPU code's
    evaluation), 1.0 for the whole image. augmentation: None for evaluation. Random steps draw from torch's default
    generator.
    """
    import torch
    from torchvision.transforms import v2

    vary = augmentation if augmentation is not None else Augmentation()
    vary.check(image_size)
    steps: list[Callable[[Tensor], Tensor]] = []
    if vary.random_resized_crop is not None:
        # Aspect ratio 3/4 to 4/3, bilinear: torchvision's defaults and the TPU code's.
        steps.append(v2.RandomResizedCrop(image_size, scale=vary.random_resized_crop))
    else:
        steps.append(v2.Resize(max(image_size, round(image_size / centre_share))))
        steps.append(v2.CenterCrop(image_size))
    if vary.horizontal_flip:
        steps.append(v2.RandomHorizontalFlip())
    if vary.shift > 0:
        steps.append(v2.RandomCrop(image_size, padding=vary.shift))
    steps.append(v2.ToDtype(torch.float32, scale=True))
    # x -> 2x - 1, the TPU code's scaling to [-1, 1], here for every data set instead of its own mean and deviation.
    steps.append(v2.Normalize(mean=[0.5] * 3, std=[0.5] * 3))
    if vary.cutout > 0:
        steps.append(Cutout(vary.cutout))
    return v2.Compose(steps)
