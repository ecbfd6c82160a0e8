"""The six sets of photographs of the paper (Table 4 of v5): ImageNet and five that it transfers to.

An accuracy compares with the paper's only on the paper's splits, so this file holds their sizes and checks the files on
disk against them before the first step. Readers only give paths and targets; pixels are decoded as for anybody's own
photographs. torchvision reads the annotations, each set has its own format.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.data.readers import Samples, one_process_at_a_time, read_folders
from gpipe_cli.data.sources import Files

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DECODED", "PHOTOGRAPHS", "PhotographSet", "read_photographs"]


@dataclass(frozen=True)
class PhotographSet:
    """One row of the paper's Table 4, and where its files come from."""

    train: int  # images
    test: int  # images
    classes: int
    folder: str  # below dataset.root; "": dataset.root itself
    contents: str  # what must be in that folder
    get: str  # how a user gets the data
    download: bool = False  # torchvision can fetch it
    counted: str = "in the paper"


PHOTOGRAPHS: Mapping[str, PhotographSet] = {
    "imagenet": PhotographSet(
        1_281_167,
        50_000,
        1000,
        folder="",
        contents="train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, or ILSVRC2012_devkit_t12.tar.gz beside the two archives "
        "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar",
        get="the archives are given out by image-net.org after registration",
    ),
    "stanford_cars": PhotographSet(
        8_144,
        8_041,
        196,
        folder="stanford_cars",
        contents="cars_train, cars_test, devkit and cars_test_annos_withlabels.mat",
        get="its first address is gone, so it must come from somebody's copy",
    ),
    # 3,669 test images are the official split; the paper prints 3,369, for which no list of images is known.
    "oxford_pets": PhotographSet(
        3_680,
        3_669,
        37,
        folder="oxford-iiit-pet",
        contents="images and annotations",
        get="set dataset.download=true",
        download=True,
        counted="in its official split",
    ),
    "food101": PhotographSet(
        75_750,
        25_250,
        101,
        folder="food-101",
        contents="images and meta",
        get="set dataset.download=true",
        download=True,
    ),
    # The official training and validation parts together; classes are the 100 variants (737-700), the finest level.
    "fgvc_aircraft": PhotographSet(
        6_667,
        3_333,
        100,
        folder="fgvc-aircraft-2013b",
        contents="data/images, data/variants.txt and data/images_variant_*.txt",
        get="set dataset.download=true",
        download=True,
    ),
    "birdsnap": PhotographSet(
        47_386,
        2_443,
        500,
        folder="",
        contents="train/<class>/*.jpg and test/<class>/*.jpg",
        get="its authors give out a list of addresses, many of them dead; sort the images into folders",
    ),
}

DECODED = ("image_folder", *PHOTOGRAPHS)
"""Data sets whose images are decoded from files, which is the work of several loader processes."""


def read_photographs(name: str, *, root: Path, download: bool, partial: bool) -> tuple[Samples, Samples]:
    """The training and the test split of the set `name`, a key of PHOTOGRAPHS, from the files below `root`.

    download: fetch what is missing, where torchvision can. partial: accept fewer images and classes than the paper
    used; images that are listed but have no file are left out.

    Raises ValueError (one line) for files that are missing or damaged, and for sizes that are not the paper's.
    """
    photographs = PHOTOGRAPHS[name]
    if download and not photographs.download:
        raise ValueError(
            f"dataset.download=true: {name} cannot be downloaded ({photographs.get}); put "
            f"{photographs.contents} into '{root / photographs.folder}'"
        )
    match name:
        case "imagenet":
            train, test = _read_imagenet(root)
        case "birdsnap":
            _expect(name, root, "train", "test" if (root / "test").is_dir() else "val")
            train, test = read_folders(root)
        case _:
            if download:
                _download(name, root)
            train, test = (_read_listed(name, root, split, partial) for split in ("train", "test"))
    _check_splits(name, root, train, test, partial)
    return train, test


def _expect(name: str, root: Path, *folders: str) -> None:
    """ValueError saying where the data come from, unless each of `folders` is in `root`."""
    for folder in folders:
        if not (root / folder).is_dir():
            raise ValueError(
                f"dataset.root={root}: no folder '{root / folder}'; {name} is expected as "
                f"{PHOTOGRAPHS[name].contents}; {PHOTOGRAPHS[name].get}"
            )


def _read_imagenet(root: Path) -> tuple[Samples, Samples]:
    """ImageNet-2012 from its class folders; classes are in the order of their WordNet numbers.

    torchvision's ImageNet unpacks the archives into these folders and writes the names of the classes to meta.bin. Most
    people have the folders only; then the WordNet numbers are the names.
    """
    from torchvision.datasets.imagenet import ARCHIVE_META, META_FILE, load_meta_file

    meta, devkit = root / META_FILE, root / ARCHIVE_META["devkit"][0]
    try:
        # Unpacking needs a disk that can be written to; reading must not.
        if (meta.is_file() or devkit.is_file()) and os.access(root, os.W_OK):
            _unpack_imagenet(root, meta)
        words = load_meta_file(str(root))[0] if meta.is_file() else {}
    except Exception as error:  # archives and pickles fail in many ways
        raise ValueError(
            f"dataset.root={root}: the archives or '{META_FILE}' of imagenet are missing or damaged "
            f"({_reason(error)}); expected {PHOTOGRAPHS['imagenet'].contents}; {PHOTOGRAPHS['imagenet'].get}"
        ) from error
    _expect("imagenet", root, "train", "val")
    # A folder 'test', which the challenge has too, holds images without classes.
    train, test = read_folders(root, test_names=("val",))
    # All words of a synset: two classes share the first one ("crane").
    names = tuple(", ".join(words.get(wnid, (wnid,))) for wnid in train.class_names)
    return Samples(train.source, train.targets, names), Samples(test.source, test.targets, names)


def _unpack_imagenet(root: Path, meta: Path) -> None:
    """Let torchvision unpack what is still an archive; the other processes of the run wait, then find the folders."""
    from torchvision.datasets import ImageNet

    with one_process_at_a_time(root):
        if not (meta.is_file() and (root / "train").is_dir() and (root / "val").is_dir()):
            for split in ("train", "val"):
                ImageNet(str(root), split=split)


def _download(name: str, root: Path) -> None:
    folder = root / PHOTOGRAPHS[name].folder
    try:
        with one_process_at_a_time(root):
            _open_listed(name, root, "train", download=True)
    except Exception as error:  # the network, the archive and the annotations fail in many ways
        raise ValueError(
            f"dataset.download=true: could not download {name} to '{root}' or read what is there ({_reason(error)}); "
            f"check the network, delete '{folder}' and its archive, and try again"
        ) from error


def _open_listed(name: str, root: Path, split: str, download: bool) -> Any:
    """torchvision's reader of one split; it checks that folders are there, and raises whatever parsing raises."""
    from torchvision import datasets

    match name:
        case "stanford_cars":
            return datasets.StanfordCars(str(root), split=split)
        case "oxford_pets":
            return datasets.OxfordIIITPet(str(root), split="trainval" if split == "train" else split, download=download)
        case "food101":
            return datasets.Food101(str(root), split=split, download=download)
        case _:
            assert name == "fgvc_aircraft", name
            return datasets.FGVCAircraft(
                str(root),
                split="trainval" if split == "train" else split,
                annotation_level="variant",
                download=download,
            )


def _read_listed(name: str, root: Path, split: str, partial: bool) -> Samples:
    """One split of a set whose annotations list its images; without `partial` every listed image must be there."""
    import torch

    photographs = PHOTOGRAPHS[name]
    folder = root / photographs.folder
    try:
        reader = _open_listed(name, root, split, download=False)
        # torchvision has no public way to the paths: indexing a reader decodes the image.
        match name:
            case "stanford_cars":
                listed = [(str(path), int(target)) for path, target in reader._samples]
            case "oxford_pets":
                listed = [(str(path), target) for path, target in zip(reader._images, reader._labels, strict=True)]
            case _:
                listed = [(str(path), target) for path, target in zip(reader._image_files, reader._labels, strict=True)]
        classes = tuple(map(str, reader.classes))
        if not all(0 <= target < len(classes) for _, target in listed):
            raise ValueError(f"a {split} image of a class that is none of the {len(classes)} named")
    except Exception as error:  # broken annotations make scipy, json and torchvision raise anything
        found = f"is damaged or incomplete ({_reason(error)})" if folder.is_dir() else "is missing"
        raise ValueError(
            f"dataset.root={root}: '{folder}' {found}; {name} is expected there as {photographs.contents}; "
            f"{photographs.get}"
        ) from error
    there = _there([path for path, _ in listed])
    missing = [path for path, _ in listed if path not in there]
    if missing and not partial:
        raise ValueError(
            f"dataset.root={root}: {len(missing):,} of {len(listed):,} {_images(split)} that {name} lists are missing, "
            f"e.g. '{missing[0]}'; {_complete(name, root)} or set dataset.partial=true"
        )
    kept = [(path, target) for path, target in listed if path in there]
    targets = torch.tensor([target for _, target in kept], dtype=torch.int64)
    return Samples(Files(tuple(path for path, _ in kept)), targets, classes)


def _there(paths: list[str]) -> set[str]:
    """Those of `paths` that exist. Folders are listed: asking for each of 75,750 files is slow on a network disk."""
    names = {
        folder: set(os.listdir(folder)) for folder in {os.path.dirname(path) for path in paths} if Path(folder).is_dir()
    }
    return {path for path in paths if os.path.basename(path) in names.get(os.path.dirname(path), ())}


def _check_splits(name: str, root: Path, train: Samples, test: Samples, partial: bool) -> None:
    """ValueError where the splits do not fit together, or are not the paper's in size.

    Also with `partial` a split has at least one image, and no more than the paper's: more means that something else is
    in the folders.
    """
    photographs = PHOTOGRAPHS[name]
    if train.class_names != test.class_names:
        odd = sorted(set(train.class_names) ^ set(test.class_names)) or ["their order"]
        raise ValueError(
            f"dataset.root={root}: the training and the test images of {name} must have the same classes, but "
            f"'{odd[0]}' ({len(odd)} differ) is only in one of them; {_complete(name, root)}"
        )
    found = len(train.class_names)
    if found > photographs.classes or (found < photographs.classes and not partial):
        _refuse(name, root, photographs.classes, "classes", found)
    for split, samples, expected in (("train", train, photographs.train), ("test", test, photographs.test)):
        found = len(samples.targets)
        if found > expected or found == 0 or (found < expected and not partial):
            _refuse(name, root, expected, _images(split), found)


def _refuse(name: str, root: Path, expected: int, what: str, found: int) -> None:
    if found > expected:
        remedy = "remove what is not part of it"
    else:
        remedy = _complete(name, root) + (" or set dataset.partial=true" if found else "")
    raise ValueError(
        f"dataset.root={root}: {name} has {expected:,} {what} {PHOTOGRAPHS[name].counted}, found {found:,}; {remedy}"
    )


def _complete(name: str, root: Path) -> str:
    """What to do about data with holes. torchvision takes a folder that is there for a finished download."""
    if PHOTOGRAPHS[name].download:
        return f"complete the data (delete '{root / PHOTOGRAPHS[name].folder}' and set dataset.download=true)"
    return "complete the data"


def _images(split: str) -> str:
    return "training images" if split == "train" else "test images"


def _reason(error: Exception) -> str:
    """An exception in one line, with its type: the text of a KeyError is only the key."""
    return " ".join(f"{type(error).__name__}: {error}".split())
