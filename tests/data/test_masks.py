"""Data sets with a mask for each image: what is drawn, what is read from files, and what a user can get wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import opened, write_image
from PIL import Image

from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.images import ImageSplit
from gpipe_cli.data.masks import MaskFiles
from gpipe_cli.data.readers import ImageFiles, Samples
from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.training.data_feed import MiniBatch, SplitReader

FIRST = torch.tensor([0])


def test_synthetic_masks_are_a_function_of_seed_and_index() -> None:
    def train(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        split, test, _ = opened(
            "synthetic_masks", image_size=32, num_classes=3, seed=seed, train_samples=6, test_samples=4,
            augmentation=None,
        )  # fmt: skip
        assert [one.split_index.samples for one in (split, test)] == [6, 4]
        assert not torch.equal(split[0, 0], test[0, 0])
        indices = [3, 0, 1, 2]
        return split.inputs(0, indices)[0], split.targets_of(0, torch.tensor(indices))

    (images, masks), (again, same), (others, _) = train(1), train(1), train(2)
    assert torch.equal(images, again)
    assert torch.equal(masks, same)
    assert not torch.equal(images, others)
    assert (images.shape, images.dtype, masks.shape, masks.dtype) == (
        (4, 3, 32, 32),
        torch.float32,
        (4, 32, 32),
        torch.int64,
    )
    assert {*masks.unique().tolist()} == {0, 1, 2}


def folder(root: Path) -> Path:
    """An image of 12 x 8 pixels with its mask, in each split: the left half is class 1, a corner nothing."""
    mask = np.zeros((8, 12), dtype=np.uint8)
    mask[:, :6], mask[:2, :4] = 1, 255
    for split in ("train", "val"):
        write_image(root / split / "images" / "a.jpg", size=(12, 8))
        (root / split / "masks").mkdir()
        palette = Image.fromarray(mask).convert("L")
        palette.putpalette(3 * [*range(256)])  # as Pascal VOC has it
        palette.save(root / split / "masks" / "a.png")
    return root


def test_masks_are_read_from_files_and_cut_as_their_images(tmp_path: Path) -> None:
    root = folder(tmp_path)
    for name in ("Thumbs.db", "b.heic", "._a.jpg"):
        (root / "train" / "images" / name).write_bytes(b"not read")
    train, test, _ = opened("image_masks", root, num_classes=2, augmentation=None)
    assert train.samples.skipped == {".db": 1, ".heic": 1}
    mask = train.targets_of(0, FIRST)[0]
    assert torch.equal(mask, test.targets_of(0, FIRST)[0])
    assert train[0, 0].shape == (3, 8, 8)
    wanted = torch.zeros(8, 8, dtype=torch.int64)  # columns 2 to 9 of the file
    wanted[:, :4], wanted[:2, :2] = 1, IGNORED
    assert torch.equal(mask, wanted)


def test_a_mask_is_turned_as_its_image(tmp_path: Path) -> None:
    """By separate tags: without one, a mask was drawn on the turned image. Pixels may have 16 bits, or one."""
    root, tag = folder(tmp_path), Image.Exif()
    tag[0x0112] = 8  # turned to the left
    values = np.zeros((8, 12), dtype=np.uint8)
    values[:, :6] = 1
    write_image(root / "train" / "images" / "a.jpg", size=(8, 12))
    with Image.open(root / "train" / "images" / "a.jpg") as image:
        image.rotate(-90, expand=True).save(root / "train" / "images" / "a.jpg", exif=tag)
    wanted = torch.from_numpy(np.rot90(values)[2:10].astype(np.int64))
    upright = np.ascontiguousarray(np.rot90(values))
    for mask, exif in ((values, tag), (upright, None), (upright.astype(np.uint16), None), (upright.astype(bool), None)):
        Image.fromarray(mask).save(root / "train" / "masks" / "a.png", **({} if exif is None else {"exif": exif}))
        train, _, _ = opened("image_masks", root, num_classes=2, augmentation=None)
        assert torch.equal(train.targets_of(0, FIRST)[0], wanted)


def test_masks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    root = folder(tmp_path)
    mask = root / "train" / "masks" / "a.png"
    for size, mode, why in (((6, 4), "L", "12 x 8"), ((12, 8), "RGB", "mode RGB"), ((12, 8), "L", "num_classes=2")):
        write_image(mask, size=size, mode=mode)
        with pytest.raises(InputError, match=rf"^mask '{mask}': .*{why}"):
            opened("image_masks", root, num_classes=2, augmentation=None)
    Image.fromarray(np.eye(8, 12, dtype=np.uint8) * 255).save(mask)  # all of 255 was left out without a word
    with pytest.raises(InvalidSettingError, match=r"^dataset\.root=.*only the values 0 and 255.*1 for the other class"):
        opened("image_masks", root, num_classes=2, augmentation=None)
    twin = root / "train" / "images" / "a.png"
    write_image(twin, size=(12, 8))
    with pytest.raises(
        InvalidSettingError, match=r"^dataset\.root=.*a\.jpg' and '.*a\.png' have the same name; remove or rename"
    ):
        opened("image_masks", root, num_classes=2, augmentation=None)
    twin.unlink()
    mask.unlink()
    with pytest.raises(
        InvalidSettingError, match=r"^dataset\.root=.*no mask for 1 of 1 images \(a, \.\.\.\); add them"
    ):
        opened("image_masks", root, num_classes=2, augmentation=None)


def test_a_split_without_a_valid_target_is_refused(tmp_path: Path) -> None:
    """A training set ended as diverged; a test set in a ZeroDivisionError, after an epoch. Classes that are cut off do
    not count; one mask is enough."""
    root = folder(tmp_path)
    values = np.full((8, 12), 255, dtype=np.uint8)
    values[:, :2] = 1
    for split, name in (("train", "training"), ("val", "test")):
        mask = root / split / "masks" / "a.png"
        whole = mask.read_bytes()
        Image.fromarray(values).save(mask)
        with pytest.raises(
            InvalidSettingError, match=rf"^dataset\.root=.*the {name} images .*255.*give masks with classes$"
        ):
            opened("image_masks", root, num_classes=2, augmentation=None)
        write_image(root / split / "images" / "b.jpg", size=(12, 8))
        (root / split / "masks" / "b.png").write_bytes(whole)
    opened("image_masks", root, num_classes=2, augmentation=None)
    with pytest.raises(
        InvalidSettingError, match=r"another fraction dataset\.validation$"
    ):  # of which a set has no class
        opened("image_masks", root, num_classes=2, augmentation=None, validation=0.5)


def test_masks_are_scaled_as_torchvision_scales_them(tmp_path: Path) -> None:
    functional = pytest.importorskip("torchvision.transforms.v2.functional")
    path, image = tmp_path / "mask.png", tmp_path / "image.png"
    generator = np.random.default_rng(0)
    for width, height, side in ((13, 9, 8), (9, 31, 12), (64, 48, 37), (8, 20, 8), (11, 11, 30)):
        values = generator.integers(0, 256, (height, width), dtype=np.uint8)
        Image.fromarray(values).save(path)
        write_image(image, size=(width, height))
        whole = torch.from_numpy(values.astype(np.int64))[None]
        scaled = functional.resize(whole, [side], interpolation=functional.InterpolationMode.NEAREST)
        wanted = functional.center_crop(scaled, [side])[0]
        found = MaskFiles((str(image),), (str(path),), side, 256)[FIRST][0]
        assert torch.equal(found, wanted.masked_fill(wanted == 255, IGNORED))


def test_a_replica_reads_the_masks_of_others_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only to count what there is to learn in the whole mini-batch, each of them decoded every mask in every step."""
    for number in range(5):
        mask = np.full((8, 8), 255, dtype=np.uint8)
        mask[:number] = number % 2  # number 0 has nothing to learn
        write_image(tmp_path / "images" / f"{number}.png", size=(8, 8))
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    files = [tuple(str(tmp_path / kind / f"{number}.png") for number in range(5)) for kind in ("images", "masks")]
    read, decode = list[int](), MaskFiles._read
    monkeypatch.setattr(MaskFiles, "_read", lambda self, index: (read.append(index), decode(self, index))[1])
    split = ImageSplit(Samples(ImageFiles(files[0]), MaskFiles(*files, 8, 2), ()), lambda image: image, None)
    cut = {"batch_size": 5, "seed": 0, "shuffle": True, "micro_batches": 1, "replicas": 3}
    readers = [SplitReader(split, MiniBatches(split.split_index, replica=replica, **cut), None) for replica in range(3)]
    for epoch in (0, 1):
        read.clear()
        parts = [MiniBatch(reader, epoch, 0).targets() for reader in readers]
        indices = readers[0].batches.indices(epoch, 0)
        assert sorted(read) == sorted(indices.tolist() * (1 if epoch else 3))
        assert torch.equal(torch.cat([part[0] for part in parts if part]), split.targets_of(epoch, indices))
        assert [part[1] for part in parts if part] == [8 * (0 + 1 + 2 + 3 + 4)] * 3
    few = SplitReader(split, MiniBatches(split.split_index, replica=2, **cut | {"batch_size": 2}), None)
    for _ in range(2):  # the third replica has no sample of two
        targets, elements = MiniBatch(few, 0, 0).targets() or (FIRST, 0)
        assert (targets.shape, elements) == ((0, 8, 8), 8 * int(few.batches.indices(0, 0).sum()))
