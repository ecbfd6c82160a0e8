"""Each step of the augmentation does what it says, measured on images whose pixels tell where they came from."""

from dataclasses import replace

import pytest
import torch
from image_files import PLAIN

from gpipe_cli.data.augmentation import Cutout, build_transform
from gpipe_cli.data.seeds import seeded


def coordinates(height: int, width: int) -> torch.Tensor:
    """Float image in [0, 1]: channel 0 is (column + 1/2) / width, channel 1 is (row + 1/2) / height."""
    columns = ((torch.arange(width) + 0.5) / width).expand(height, width)
    rows = ((torch.arange(height) + 0.5) / height).unsqueeze(1).expand(height, width)
    return torch.stack([columns, rows, torch.zeros(height, width)])


def test_evaluation_is_the_central_seven_eighths_scaled_to_minus_one_and_one() -> None:
    """The aspect ratio stays."""
    image = torch.randint(256, (3, 64, 100), dtype=torch.uint8)
    out = build_transform(56, 0.875, None)(image)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, image[:, 4:60, 22:78] / 127.5 - 1)


def test_whole_image_is_enlarged_bilinearly() -> None:
    image = torch.rand(3, 8, 8)
    out = build_transform(32, 1.0, None)(image)
    expected = torch.nn.functional.interpolate(image[None], size=32, mode="bilinear", align_corners=False)[0]
    torch.testing.assert_close(out, 2 * expected - 1)


def test_flip_mirrors_about_half_of_the_images() -> None:
    image = torch.rand(3, 6, 6)
    plain = build_transform(6, 1.0, None)(image)
    flip = build_transform(6, 1.0, replace(PLAIN, horizontal_flip=True))
    mirrored = 0
    for seed in range(200):
        with seeded(seed):
            out = flip(image)
        is_mirrored = torch.equal(out, plain.flip(-1))
        assert is_mirrored or torch.equal(out, plain)
        mirrored += is_mirrored
    assert 70 <= mirrored <= 130  # 100 expected, deviation 7


def test_random_resized_crop_covers_the_asked_area() -> None:
    transform = build_transform(40, 1.0, replace(PLAIN, random_resized_crop=(0.25, 0.5)))
    image = coordinates(200, 300)
    areas = []
    for seed in range(60):
        with seeded(seed):
            out = (transform(image) + 1) / 2
        # The image is linear in its coordinates, so an inner piece of the output tells the scale of the crop exactly.
        width = 300 * float(out[0, 20, 30] - out[0, 20, 10]) * 2
        height = 200 * float(out[1, 30, 20] - out[1, 10, 20]) * 2
        assert 0.72 <= width / height <= 1.38  # 3/4 to 4/3, sides rounded to pixels
        areas.append(width * height / (200 * 300))
    assert 0.24 <= min(areas) < 0.3
    assert 0.45 < max(areas) <= 0.51


def test_shift_moves_in_both_directions_and_fills_with_black() -> None:
    image = torch.zeros(3, 9, 9)
    image[:, 4, 4] = 1
    transform = build_transform(9, 1.0, replace(PLAIN, shift=2))
    places = set()
    for seed in range(300):
        with seeded(seed):
            out = transform(image)
        (row, column) = (out[0] == 1).nonzero()[0].tolist()
        assert int((out == 1).sum()) == 3
        places.add((row, column))
    assert places == {(row, column) for row in range(2, 7) for column in range(2, 7)}
    with seeded(0):
        white = transform(torch.ones(3, 9, 9))
    assert set(white.unique().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize("side", [1, 4, 5])
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


def test_cutout_in_the_transform_is_the_middle_of_the_range() -> None:
    transform = build_transform(16, 1.0, replace(PLAIN, cutout=4))
    with seeded(3):
        out = transform(torch.full((3, 16, 16), 255, dtype=torch.uint8))
    assert set(out.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("setting", ["cutout", "shift"])
def test_lengths_must_fit_the_image(setting: str) -> None:
    with pytest.raises(ValueError, match=rf"^dataset\.augmentation\.{setting}=8: [^\n]*use 7 or less[^\n]*$"):
        build_transform(8, 1.0, replace(PLAIN, **{setting: 8}))  # type: ignore[arg-type]


def test_seeded_restores_the_default_generator() -> None:
    before = torch.get_rng_state()
    with seeded(1):
        first = torch.rand(4)
    with seeded(1):
        second = torch.rand(4)
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
