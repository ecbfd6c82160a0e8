"""Each step of the augmentation does what it says, measured on images whose pixels tell where they came from."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from image_files import PLAIN
from torchvision.transforms import v2

from gpipe_cli.data.augmentation import Cutout, build_transform
from gpipe_cli.data.seeds import seeded


def test_whole_image_is_enlarged_bilinearly() -> None:
    image = torch.rand(3, 8, 8)
    out = build_transform(32, 1.0, None)(image)
    expected = torch.nn.functional.interpolate(image[None], size=32, mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(out, 2 * expected - 1)


@pytest.mark.parametrize(
    ("setting", "step"),
    [
        ({"random_resized_crop": (0.25, 0.5)}, v2.RandomResizedCrop(40, scale=(0.25, 0.5))),
        ({"horizontal_flip": True}, v2.RandomHorizontalFlip()),
        ({"shift": 2}, v2.RandomCrop(40, padding=2)),
    ],
    ids=["crop", "flip", "shift"],
)
def test_random_steps_are_torchvisions(setting: dict[str, Any], step: v2.Transform) -> None:
    transform = build_transform(40, 1.0, replace(PLAIN, **setting))
    image = torch.rand(3, *((50, 60) if "random_resized_crop" in setting else (40, 40)))
    results = []
    for seed in range(8):
        with seeded(seed):
            results.append(transform(image))
        with seeded(seed):
            torch.testing.assert_close(results[-1], 2 * step(image) - 1)
    assert len({float(result.sum()) for result in results} | {float(result[0, 0, 0]) for result in results}) > 2


@pytest.mark.parametrize("side", [1, 4])
def test_cutout_is_a_grey_square_that_may_extend_over_the_border(side: int) -> None:
    image = torch.ones(3, 12, 12)
    sizes = set()
    for seed in range(300):
        with seeded(seed):
            out = Cutout(side)(image)
        hole = out[0] == 0
        assert torch.equal(out, torch.where(hole, 0.0, 1.0).expand(3, 12, 12))
        rows, columns = hole.any(dim=1), hole.any(dim=0)
        assert torch.equal(hole, rows[:, None] & columns[None])  # a full rectangle
        assert int(rows.diff().sum()) <= 2  # in one piece
        sizes.add((int(rows.sum()), int(columns.sum())))
    assert (side, side) in sizes
    assert max(max(size) for size in sizes) == side
    assert min(min(size) for size in sizes) == (side + 1) // 2
    assert torch.equal(image, torch.ones(3, 12, 12))  # the stored image is not touched
    with seeded(3):  # 0 is the middle of the range
        out = build_transform(12, 1.0, replace(PLAIN, cutout=side))(torch.full((3, 12, 12), 255, dtype=torch.uint8))
    assert set(out.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("setting", ["cutout", "shift"])
def test_lengths_must_fit_the_image(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"^dataset\.augmentation\.{setting}=8: [^\n]*use 7 or less[^\n]*$"):
        build_transform(8, 1.0, replace(PLAIN, **{setting: 8}))  # type: ignore[arg-type]
