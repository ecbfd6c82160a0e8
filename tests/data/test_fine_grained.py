"""The paper's sets of photographs, tiny but in the formats in which they are given out, read by the real readers."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import scipy.io
import torch
from image_files import opened, write_images
from PIL import Image

from gpipe_cli.data.fine_grained import FINE_GRAINED
from gpipe_cli.data.images import ImageSplit
from gpipe_cli.errors import InputError


class Tiny(NamedTuple):
    """What is in a set with two classes, whose training targets are 0, 1, 1."""

    test_targets: list[int]
    class_names: tuple[str, str]
    place: str  # of the test image of class 1


def write_imagenet(root: Path) -> Tiny:
    """Folders as most people have them; 'test' holds images without classes."""
    write_images(root / "train", "n01440764/n01440764_1.JPEG", "n02012849/a.JPEG", "n02012849/b.JPEG")
    write_images(root / "val", "n01440764/ILSVRC2012_val_00000001.JPEG", "n02012849/ILSVRC2012_val_00000002.JPEG")
    write_images(root / "test", "ILSVRC2012_test_00000001.JPEG")
    return Tiny([0, 1], ("n01440764", "n02012849"), "val/n02012849/ILSVRC2012_val_00000002.JPEG")


def write_stanford_cars(root: Path) -> Tiny:
    base = root / "stanford_cars"

    def annotations(place: str, classes: list[int]) -> None:
        boxes = [(column, float) for column in ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2", "class")]
        rows = [(1.0, 1.0, 1.0, 1.0, c, f"{number:05}.jpg") for number, c in enumerate(classes, 1)]
        scipy.io.savemat(base / place, {"annotations": np.array(rows, dtype=[*boxes, ("fname", object)])})

    (base / "devkit").mkdir(parents=True)
    annotations("devkit/cars_train_annos.mat", [1, 2, 2])
    annotations("cars_test_annos_withlabels.mat", [2, 1])
    names = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], dtype=object)
    scipy.io.savemat(base / "devkit/cars_meta.mat", {"class_names": names})
    write_images(base / "cars_train", "00001.jpg", "00002.jpg", "00003.jpg")
    write_images(base / "cars_test", "00001.jpg", "00002.jpg")
    return Tiny([1, 0], ("AM General Hummer SUV 2000", "Acura RL Sedan 2012"), "stanford_cars/cars_test/00001.jpg")


def write_oxford_pets(root: Path) -> Tiny:
    base = root / "oxford-iiit-pet"
    for breed, numbers in (("Abyssinian", (1, 2, 9)), ("american_bulldog", (1, 7, 8))):
        write_images(base / "images", *(f"{breed}_{number}.jpg" for number in numbers))
    (base / "annotations").mkdir()
    # Image, class from 1, cat or dog, breed from 1.
    trainval = "Abyssinian_1 1 1 1\namerican_bulldog_7 2 2 1\namerican_bulldog_8 2 2 1\n"
    (base / "annotations/trainval.txt").write_text(trainval)
    (base / "annotations/test.txt").write_text("american_bulldog_1 2 2 1\nAbyssinian_2 1 1 1\n")
    return Tiny([1, 0], ("Abyssinian", "American Bulldog"), "oxford-iiit-pet/images/american_bulldog_1.jpg")


def write_food101(root: Path) -> Tiny:
    base = root / "food-101"
    write_images(
        base / "images", *(f"apple_pie/{n}.jpg" for n in (10, 11)), *(f"waffles/{n}.jpg" for n in (20, 21, 22))
    )
    (base / "meta").mkdir()
    (base / "meta/train.json").write_text('{"apple_pie": ["apple_pie/10"], "waffles": ["waffles/20", "waffles/21"]}')
    (base / "meta/test.json").write_text('{"waffles": ["waffles/22"], "apple_pie": ["apple_pie/11"]}')
    return Tiny([1, 0], ("apple_pie", "waffles"), "food-101/images/waffles/22.jpg")


def write_fgvc_aircraft(root: Path) -> Tiny:
    data = root / "fgvc-aircraft-2013b/data"
    write_images(data / "images", *(f"{number:07}.jpg" for number in range(5)))
    (data / "variants.txt").write_text("707-320\nBAE 146-200\n")
    (data / "images_variant_trainval.txt").write_text("0000003 707-320\n0000001 BAE 146-200\n0000002 BAE 146-200\n")
    (data / "images_variant_test.txt").write_text("0000004 BAE 146-200\n0000000 707-320\n")
    return Tiny([1, 0], ("707-320", "BAE 146-200"), "fgvc-aircraft-2013b/data/images/0000004.jpg")


WRITERS = {
    "imagenet": write_imagenet,
    "stanford_cars": write_stanford_cars,
    "oxford_pets": write_oxford_pets,
    "food101": write_food101,
    "fgvc_aircraft": write_fgvc_aircraft,
}


def open_tiny(name: str, root: Path, **settings: object) -> tuple[ImageSplit, ImageSplit]:
    """Image size 14 for ImageNet, 16 for the others: then no pixel of a tiny image is interpolated."""
    size = 14 if name == "imagenet" else 16
    return opened(name, root, image_size=size, **{"num_classes": 2, "partial": True, **settings})[:2]


def refusal(name: str, root: Path, **settings: object) -> str:
    """The one line that opening ends with."""
    with pytest.raises(InputError, match=r"^dataset\.[^\n]+$") as error:
        open_tiny(name, root, **settings)
    return str(error.value)


@pytest.mark.parametrize("name", WRITERS)
def test_targets_classes_and_pixels(tmp_path: Path, name: str) -> None:
    tiny = WRITERS[name](tmp_path)
    train, test = open_tiny(name, tmp_path)
    assert train.samples.class_names == test.samples.class_names == tiny.class_names
    assert train.samples.targets.tolist() == [0, 1, 1]
    assert test.samples.targets.tolist() == tiny.test_targets
    with Image.open(tmp_path / tiny.place) as file:
        pixels = torch.from_numpy(np.array(file)).permute(2, 0, 1)
    # ImageNet keeps the central 7/8 of the shorter side; of the others the whole shorter side stays.
    crop = pixels[:, 1:15, 3:17] if name == "imagenet" else pixels[:, :, 2:18]
    assert torch.equal(test[0, tiny.test_targets.index(1)], crop)
    assert refusal(name, tmp_path, num_classes=3).startswith(f"dataset.num_classes=3: {name} has 2 classes ")
    message = refusal(name, tmp_path / "nowhere")
    assert message.startswith(f"dataset.root={tmp_path / 'nowhere'}: ")
    assert message.endswith(f"{FINE_GRAINED[name].contents}; {FINE_GRAINED[name].get}")


def test_sizes_must_be_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller ones are accepted when that is asked for, larger ones never."""
    name = "food101"
    WRITERS[name](tmp_path)

    def paper_has(train: int, test: int) -> None:
        monkeypatch.setitem(FINE_GRAINED, name, FINE_GRAINED[name]._replace(train=train, test=test))

    paper_has(4, 2)
    assert refusal(name, tmp_path, partial=False).endswith("or set dataset.partial=true")
    open_tiny(name, tmp_path)
    paper_has(2, 2)
    assert refusal(name, tmp_path).endswith("2 training images, found 3; remove what is not part of it")
