"""Where the pixels of sample i come from: memory, a file, or a formula.

The paper's images are files of every size (Table 4), its speed tables need no data at all. A source gives the pixels of
one sample and knows nothing of epochs, order or augmentation, so that each of these is written once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpipe_cli.data.seeds import seed_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Files", "Noise", "Source", "Stored"]


class Source(Protocol):
    """Pixels by index; picklable, because loader workers get a copy."""

    def read(self, index: int) -> Tensor:
        """(3, H, W): uint8, or float32 in [0, 1]."""
        ...


@dataclass(frozen=True, eq=False)
class Stored:
    """All images in one tensor (n, 3, H, W); workers share its memory."""

    images: Tensor

    def read(self, index: int) -> Tensor:
        """(3, H, W) of sample `index`."""
        return self.images[index]


@dataclass(frozen=True, eq=False)
class Files:
    """One image file per sample, of any size and colour mode."""

    paths: tuple[str, ...]

    def read(self, index: int) -> Tensor:
        """uint8 (3, H, W) of file `index`; ValueError naming the file if it cannot be decoded."""
        from PIL import Image
        from torchvision.transforms.v2.functional import pil_to_tensor

        path = Path(self.paths[index])
        try:
            with path.open("rb") as file, Image.open(file) as image:
                return pil_to_tensor(image.convert("RGB"))
        except Exception as error:  # damaged bytes make Pillow raise OSError, SyntaxError, ValueError, struct.error, …
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"image file '{path}': cannot be read ({reason}); replace or delete it") from error


@dataclass(frozen=True)
class Noise:
    """Random bytes made from (seed, index): any number of samples, any size, nothing stored, nothing to learn."""

    seed: int
    image_size: int

    def read(self, index: int) -> Tensor:
        """uint8 (3, S, S), uniform over 0..255."""
        import torch

        shape = (3, self.image_size, self.image_size)
        generator = torch.Generator().manual_seed(seed_of("noise", self.seed, index))
        # Eight pixels from each 64-bit number: one number per pixel would take eight times as long.
        words = torch.empty(-(-math.prod(shape) // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        return words.view(torch.uint8)[: math.prod(shape)].view(shape)
