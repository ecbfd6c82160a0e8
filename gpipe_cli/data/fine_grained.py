"""The six sets of photographs of the paper (Table 4 of v5): ImageNet and five that it transfers to.

An accuracy is comparable with the paper's only on the paper's splits, so this file holds their sizes and checks the
files on disk against them before the first step. torchvision reads the annotations, whose formats differ.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_cli.data.cache import file_lock
from gpipe_cli.data.readers import Samples, read_folders
from gpipe_cli.data.splits import Splits, split_names
from gpipe_cli.errors import InvalidSettingError, describe_error

_DOWNLOAD = "set dataset.download=true"


class FineGrainedSet(NamedTuple):
    """One row of the paper's Table 4, and where its files come from."""

    train: int  # images
    test: int  # images
    contents: str  # what the folder must hold
    get: str = _DOWNLOAD  # how a user gets the data
    folder: str = ""  # below dataset.root
    reader: str | None = None  # torchvision's class, if annotations list the images
    train_split: str = "train"  # torchvision's name of the training split


FINE_GRAINED = {
    "imagenet": FineGrainedSet(
        1_281_167,
        50_000,
        "train/<wnid>/*.JPEG and val/<wnid>/*.JPEG, or ILSVRC2012_devkit_t12.tar.gz with the two archives "
        "ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar",
        "the archives are given out by image-net.org after registration",
    ),
    "stanford_cars": FineGrainedSet(
        8_144,
        8_041,
        "cars_train, cars_test, devkit and cars_test_annos_withlabels.mat",
        "its first address is gone; it must be copied from elsewhere",
        folder="stanford_cars",
        reader="StanfordCars",
    ),
    # 3,669 test images are the official split; the paper prints 3,369, for which no list of images is known.
    "oxford_pets": FineGrainedSet(
        3_680,
        3_669,
        "images and annotations",
        folder="oxford-iiit-pet",
        reader="OxfordIIITPet",
        train_split="trainval",
    ),
    "food101": FineGrainedSet(75_750, 25_250, "images and meta", folder="food-101", reader="Food101"),
    # The official training and validation parts together; classes are the 100 variants (737-700), the finest level.
    "fgvc_aircraft": FineGrainedSet(
        6_667,
        3_333,
        "data/images, data/variants.txt and data/images_variant_*.txt",
        folder="fgvc-aircraft-2013b",
        reader="FGVCAircraft",
        train_split="trainval",
    ),
    "birdsnap": FineGrainedSet(
        47_386,
        2_443,
        "train/<class>/*.jpg and test/<class>/*.jpg",
        "its authors give out a list of addresses, many of them dead; sort the images into folders",
    ),
}

DECODED_FROM_FILES = ("image_folder", "image_masks", *FINE_GRAINED)
"""Data sets whose images are decoded from files, which is the work of several loader processes."""


def read_fine_grained(name: str, root: Path, *, download: bool, partial: bool) -> Splits[Samples]:
    """The training and the test split of the set `name`, a key of FINE_GRAINED, from the files below `root`.

    download: fetch what is missing; the settings allow it if torchvision can. partial: accept fewer images than the
    paper used; images that are listed but have no file are left out.

    Raises InputError for files that are missing or damaged, and for sizes that are not the paper's.
    """
    fine_grained = FINE_GRAINED[name]
    expected = f"{name} is expected as {fine_grained.contents}; {fine_grained.get}"
    if name == "imagenet":
        train, test = _read_imagenet(root, expected)
    elif fine_grained.reader is None:
        train, test = read_folders(root, expected, *split_names(root))
    else:
        train, test = (
            _read_listed(name, root, expected, split, download=download, partial=partial)
            for split in ("training", "test")
        )
    for what, wanted, present in (
        ("training images", fine_grained.train, len(train.targets)),
        ("test images", fine_grained.test, len(test.targets)),
    ):
        if present == wanted or (partial and 0 < present < wanted):
            continue
        remedy = "remove what is not part of it"
        if present < wanted:
            remedy = _completion_remedy(name, root) + (" or set dataset.partial=true" if present else "")
        raise InvalidSettingError("dataset.root", root, f"{name} has {wanted:,} {what}, found {present:,}; {remedy}")
    return Splits(train, test)


def _read_imagenet(root: Path, expected: str) -> tuple[Samples, Samples]:
    """ImageNet-2012 from its class folders; classes are sorted by WordNet id.

    torchvision's ImageNet unpacks the archives into these folders and writes the words of each class to meta.bin. Most
    people have the folders only; then the WordNet ids alone are the names: `n02012849`, or `n02012849 crane`.
    """
    from torchvision.datasets import ImageNet
    from torchvision.datasets.imagenet import ARCHIVE_META, META_FILE, load_meta_file

    meta, devkit = root / META_FILE, root / ARCHIVE_META["devkit"][0]
    try:
        # Only unpacking may need a writable disk.
        if (meta.is_file() or devkit.is_file()) and os.access(root, os.W_OK):
            with file_lock(root / ".download.lock"):
                if not (meta.is_file() and (root / "train").is_dir() and (root / "val").is_dir()):
                    for split in ("train", "val"):
                        ImageNet(str(root), split=split)
        words = load_meta_file(str(root))[0] if meta.is_file() else {}
    except Exception as error:  # archives and pickles fail in many ways
        why = f"the archives or '{META_FILE}' of imagenet are missing or damaged ({describe_error(error)}); {expected}"
        raise InvalidSettingError("dataset.root", root, why) from error
    # Not the folder 'test': the challenge's test images have no labels.
    train, test = (
        replace(
            split, class_names=tuple(f"{wnid} {', '.join(words.get(wnid, ()))}".rstrip() for wnid in split.class_names)
        )
        for split in read_folders(root, expected, "train", "val")
    )
    return train, test


def _read_listed(name: str, root: Path, expected: str, split: str, *, download: bool, partial: bool) -> Samples:
    """One split of a set whose annotations list its images; without `partial` every listed image must be there."""
    from torchvision import datasets

    fine_grained = FINE_GRAINED[name]
    assert fine_grained.reader is not None
    folder = root / fine_grained.folder
    part = fine_grained.train_split if split == "training" else split
    try:
        with file_lock(root / ".download.lock") if download else nullcontext():
            reader: Any = getattr(datasets, fine_grained.reader)(str(root), split=part, download=download)
        # torchvision has no public access to the paths: indexing a reader decodes the image.
        if name == "stanford_cars":
            paths, labels = zip(*reader._samples, strict=True)
        else:
            paths, labels = reader._images if name == "oxford_pets" else reader._image_files, reader._labels
        listed = [(str(path), int(label)) for path, label in zip(paths, labels, strict=True)]
        classes = tuple(map(str, reader.classes))
        if not all(0 <= target < len(classes) for _, target in listed):
            raise ValueError(f"a {split} image has a class that is not among the {len(classes)} named")
    except Exception as error:  # the network, archives and broken annotations make torchvision and scipy raise anything
        if download:
            why = f"could not download {name} to '{root}' or read what is there ({describe_error(error)})"
            use = f"check the network, delete '{folder}' and its archive, and try again"
            raise InvalidSettingError("dataset.download", True, f"{why}; {use}") from error
        fault = f"is damaged or incomplete ({describe_error(error)})" if folder.is_dir() else "is missing"
        raise InvalidSettingError("dataset.root", root, f"'{folder}' {fault}; {expected}") from error
    # Listing the folders is faster on a network disk than asking for each of 75,750 files.
    folders = {os.path.dirname(path) for path, _ in listed}
    existing_paths = {entry.path for folder in folders if os.path.isdir(folder) for entry in os.scandir(folder)}
    kept = [(path, target) for path, target in listed if path in existing_paths]
    if len(kept) < len(listed) and not partial:
        missing = next(path for path, _ in listed if path not in existing_paths)
        why = f"{len(listed) - len(kept):,} of {len(listed):,} {split} images that {name} lists are missing"
        use = f"{_completion_remedy(name, root)} or set dataset.partial=true"
        raise InvalidSettingError("dataset.root", root, f"{why}, e.g. '{missing}'; {use}")
    return Samples.of_files(kept, classes)


def _completion_remedy(name: str, root: Path) -> str:
    """The remedy for data with files missing. torchvision takes an existing folder for a finished download."""
    if FINE_GRAINED[name].get == _DOWNLOAD:
        return f"complete the data (delete '{root / FINE_GRAINED[name].folder}' and {_DOWNLOAD})"
    return "complete the data"
