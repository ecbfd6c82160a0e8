"""The data sets in their real formats on tiny data: what is read, how it is split, and what a user can get wrong."""

from __future__ import annotations

import functools
import hashlib
import http.server
import pickle
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from gpipe_cli.data.augmentation import Augmentation
from gpipe_cli.data.images import ImageSplit, open_images
from gpipe_cli.data.readers import read_cifar

EVERYTHING = Augmentation(random_resized_crop=(0.2, 1.0), horizontal_flip=True, cutout=3, shift=2)


def write_image(path: Path, size: tuple[int, int] = (20, 16), mode: str = "RGB", seed: int = 0) -> None:
    """A random image of (width, height), its format by the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def write_folders(root: Path, test_name: str = "test") -> None:
    """Two classes; three, two training images and one, two test images."""
    for number, place in enumerate(
        (
            *("train/cat/b.png", "train/cat/a.jpg", "train/cat/deeper/c.png", "train/dog/x.png", "train/dog/y.JPEG"),
            *(f"{test_name}/cat/t.png", f"{test_name}/dog/u.webp", f"{test_name}/dog/v.bmp"),
        )
    ):
        write_image(root / place, seed=number)


def open_folder(root: Path, num_classes: int | None = 2) -> tuple[ImageSplit, ImageSplit]:
    return open_images("image_folder", root=root, image_size=14, num_classes=num_classes, seed=0)


# --- importing


def test_importing_the_data_rooms_does_not_import_torch() -> None:
    code = (
        "import sys, gpipe_cli.data, gpipe_cli.data.augmentation, gpipe_cli.data.batches, gpipe_cli.data.images, "
        "gpipe_cli.data.loading; "
        "heavy = {'torch', 'torchvision', 'sklearn', 'timm', 'numpy', 'PIL'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- digits


def test_digits_are_split_once_and_for_all() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    train, test = open_images("digits", image_size=8, num_classes=10, seed=0)
    assert (len(train), len(test)) == (1437, 360)
    everything = torch.cat([train.source.images, test.source.images])  # type: ignore[attr-defined]
    assert everything.shape == (1797, 3, 8, 8)

    # Disjoint and complete: as multisets, the two splits together are the data set.
    def rows(images: torch.Tensor) -> list[bytes]:
        return sorted((image[0] * 16).to(torch.uint8).numpy().tobytes() for image in images)

    assert rows(everything) == sorted(image.astype(np.uint8).tobytes() for image in digits.images)

    # Stratified: a fifth of each class, to within one sample.
    for label, count in enumerate(np.bincount(digits.target)):
        in_test = int((test.targets == label).sum())
        assert abs(in_test - count / 5) <= 1
        assert in_test + int((train.targets == label).sum()) == count

    # Fixed: another seed, the same split; and pinned, so that accuracies of different versions compare.
    other_train, other_test = open_images("digits", image_size=8, num_classes=10, seed=123)
    assert torch.equal(train.targets, other_train.targets)
    assert torch.equal(test.source.images, other_test.source.images)  # type: ignore[attr-defined]
    assert hashlib.sha256(b"".join(rows(test.source.images))).hexdigest()[:16] == "d974870049d11559"  # type: ignore[attr-defined]


def test_digits_images_belong_to_their_targets() -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    label_of = {image.astype(np.uint8).tobytes(): int(target) for image, target in zip(*_images(digits), strict=True)}
    for split in open_images("digits", image_size=8, num_classes=10, seed=0):
        assert split.class_names == tuple("0123456789")
        assert split.num_classes == 10
        assert split.targets.dtype == torch.int64
        for index in range(0, len(split), 37):
            grey = ((split[0, index][0] + 1) * 8).round().to(torch.uint8).numpy()
            assert label_of[grey.tobytes()] == int(split.targets[index])


def _images(digits: object) -> tuple[np.ndarray, np.ndarray]:
    return digits.images, digits.target  # type: ignore[attr-defined]


def test_digits_are_enlarged_to_three_equal_channels() -> None:
    train, _ = open_images("digits", image_size=32, num_classes=10, seed=0)
    image = train[0, 5]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert -1 <= float(image.min()) < float(image.max()) <= 1
    assert torch.equal(image[0], image[1])
    assert torch.equal(image[0], image[2])


# --- randomness


def test_training_images_depend_on_seed_epoch_and_index_only() -> None:
    def split(seed: int) -> tuple[ImageSplit, ImageSplit]:
        return open_images("digits", image_size=16, num_classes=10, seed=seed, augmentation=EVERYTHING)

    train, test = split(1)
    again, _ = split(1)
    other, _ = split(2)
    torch.manual_seed(0)
    first = [train[2, index] for index in range(20)]
    torch.manual_seed(1)
    backwards = [again[2, index] for index in reversed(range(20))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, backwards, strict=True))
    assert sum(not torch.equal(train[3, index], first[index]) for index in range(20)) >= 19
    assert sum(not torch.equal(other[2, index], first[index]) for index in range(20)) >= 19
    # The test split is never varied.
    assert all(torch.equal(test[0, index], test[7, index]) for index in range(20))


def test_reading_leaves_the_default_generator_alone() -> None:
    train, _ = open_images("digits", image_size=16, num_classes=10, seed=1, augmentation=EVERYTHING)
    state = torch.get_rng_state()
    _ = train[0, 0]
    assert torch.equal(torch.get_rng_state(), state)


# --- synthetic images


def test_synthetic_images_are_a_function_of_seed_and_index() -> None:
    def pair(seed: int) -> tuple[ImageSplit, ImageSplit]:
        return open_images(
            "synthetic_images", image_size=13, num_classes=7, seed=seed, train_samples=50, test_samples=9
        )

    (train, test), (again, _), (other, _) = pair(4), pair(4), pair(5)
    assert (len(train), len(test), train.num_classes) == (50, 9, 7)
    assert train[0, 3].shape == (3, 13, 13)
    assert torch.equal(train[0, 3], again[6, 3])
    assert torch.equal(train.targets, again.targets)
    for different in (train[0, 4], test[0, 3], other[0, 3]):
        assert not torch.equal(train[0, 3], different)
    assert not torch.equal(train.targets, other.targets)
    assert set(train.targets.tolist()) == set(range(7))
    # Uniform bytes: mean 0 and deviation 1/sqrt(3) after scaling.
    values = torch.stack([train[0, index] for index in range(50)])
    assert abs(float(values.mean())) < 0.02
    assert abs(float(values.std()) - 3**-0.5) < 0.02


@pytest.mark.parametrize("setting", ["train_samples", "test_samples"])
def test_synthetic_splits_cannot_be_empty(setting: str) -> None:
    samples = {"train_samples": 3, "test_samples": 3, setting: 0}
    with pytest.raises(ValueError, match=rf"^dataset\.{setting}=0: "):
        open_images("synthetic_images", image_size=8, num_classes=2, seed=0, **samples)  # type: ignore[arg-type]


# --- folders of images


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_folders_are_classes(tmp_path: Path, test_name: str) -> None:
    write_folders(tmp_path, test_name)
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    (tmp_path / "train/cat/._a.jpg").write_bytes(b"what macOS leaves behind")
    train, test = open_folder(tmp_path)
    assert train.class_names == test.class_names == ("cat", "dog")
    assert train.targets.tolist() == [0, 0, 0, 1, 1]
    assert test.targets.tolist() == [0, 1, 1]
    for split in (train, test):
        for index in range(len(split)):
            assert split[0, index].shape == (3, 14, 14)


def test_folder_image_is_the_central_crop_of_the_file(tmp_path: Path) -> None:
    write_folders(tmp_path)
    _, test = open_folder(tmp_path)
    with Image.open(tmp_path / "test/cat/t.png") as file:  # 20 wide, 16 high; 14 is 7/8 of 16
        pixels = torch.from_numpy(np.array(file)).permute(2, 0, 1)
    torch.testing.assert_close(test[0, 0], pixels[:, 1:15, 3:17] / 127.5 - 1)


def test_targets_are_known_without_reading_an_image(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for path in tmp_path.rglob("*.*"):
        path.write_bytes(b"")
    train, _ = open_folder(tmp_path)
    assert train.targets.tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("mode", "suffix"), [("L", "png"), ("RGBA", "png"), ("P", "png"), ("1", "png"), ("CMYK", "jpg")]
)
def test_every_colour_mode_becomes_three_channels(tmp_path: Path, mode: str, suffix: str) -> None:
    write_folders(tmp_path)
    (tmp_path / "test/cat/t.png").unlink()
    write_image(tmp_path / f"test/cat/t.{suffix}", mode=mode)
    _, test = open_folder(tmp_path)
    assert test[0, 0].shape == (3, 14, 14)


@pytest.mark.parametrize("damage", ["empty", "truncated", "text"])
@pytest.mark.parametrize("place", ["train/cat/a.jpg", "train/dog/x.png"])
def test_broken_image_is_named_in_one_line(tmp_path: Path, place: str, damage: str) -> None:
    write_folders(tmp_path)
    path = tmp_path / place
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2], "text": b"<html>\n404\n</html>"}[damage])
    train, _ = open_folder(tmp_path)
    index = [*map(str, train.source.paths)].index(str(path))  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"^image file '[^\n]*': cannot be read \([^\n]+\); replace or delete it$"
    ) as error:
        train[0, index]
    assert str(path) in str(error.value)


def test_missing_folder(tmp_path: Path) -> None:
    root = tmp_path / "nowhere"
    with pytest.raises(
        ValueError, match=r"^dataset\.root=[^\n]*nowhere: no such folder; expected [^\n]*/train/<class>"
    ):
        open_folder(root)


def test_folder_without_train_and_test(tmp_path: Path) -> None:
    write_image(tmp_path / "cat/a.png")
    with pytest.raises(ValueError, match=r"^dataset\.root=[^\n]*no folder '[^\n]*train'; expected [^\n]*test/<class>"):
        open_folder(tmp_path)
    write_image(tmp_path / "train/cat/a.png")
    with pytest.raises(ValueError, match=r"^dataset\.root=[^\n]*no folder '[^\n]*test'; expected [^\n]*val'\)$"):
        open_folder(tmp_path)


def test_empty_folders(tmp_path: Path) -> None:
    write_folders(tmp_path)
    (tmp_path / "test/cat/t.png").unlink()
    with pytest.raises(ValueError, match=r"^dataset\.root=[^\n]*class folder '[^\n]*test/cat' holds no image [^\n]*$"):
        open_folder(tmp_path)
    for name in ("train", "test"):
        (tmp_path / "empty" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"^dataset\.root=[^\n]*'[^\n]*empty/train' holds no class folder; [^\n]*$"):
        open_folder(tmp_path / "empty")


@pytest.mark.parametrize("owner", ["train", "test"])
def test_splits_must_have_the_same_classes(tmp_path: Path, owner: str) -> None:
    write_folders(tmp_path)
    write_image(tmp_path / owner / "owl/o.png")
    with pytest.raises(ValueError, match=rf"^dataset\.root=[^\n]*'owl' \(1 differ\) is only in '{owner}'; [^\n]*$"):
        open_folder(tmp_path)


def test_number_of_classes_must_be_the_datas(tmp_path: Path) -> None:
    write_folders(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"^dataset\.num_classes=5: image_folder has 2 classes \(cat, dog\); use dataset\.num_classes=2$",
    ):
        open_folder(tmp_path, num_classes=5)
    assert open_folder(tmp_path, num_classes=None)[0].num_classes == 2
    with pytest.raises(ValueError, match=r"^dataset\.num_classes=9: digits has 10 classes \(0, 1, 2, …\)"):
        open_images("digits", image_size=8, num_classes=9, seed=0)


def test_unknown_name_and_bad_size() -> None:
    with pytest.raises(ValueError, match=r"^dataset=mnist: unknown; use digits, cifar10, [^\n]*$"):
        open_images("mnist", image_size=8, seed=0)
    with pytest.raises(ValueError, match=r"^dataset\.image_size=0: "):
        open_images("digits", image_size=0, seed=0)
    with pytest.raises(ValueError, match=r"^dataset\.root=null: cifar10 "):
        open_images("cifar10", image_size=32, seed=0)


# --- some of the classes


def test_chosen_classes_are_renumbered_in_the_given_order() -> None:
    everything = open_images("digits", image_size=8, num_classes=10, seed=0)
    chosen = open_images("digits", image_size=8, num_classes=10, seed=0, classes=(7, 2, 5))
    for whole, part in zip(everything, chosen, strict=True):
        assert part.class_names == ("7", "2", "5")
        assert part.num_classes == 3
        places = [index for index, target in enumerate(whole.targets.tolist()) if target in (7, 2, 5)]
        assert part.targets.tolist() == [{7: 0, 2: 1, 5: 2}[int(whole.targets[index])] for index in places]
        for index in range(0, len(part), 11):
            assert torch.equal(part[0, index], whole[0, places[index]])


def test_halves_of_the_classes_share_no_image() -> None:
    whole = open_images("digits", image_size=8, seed=0)
    low = open_images("digits", image_size=8, seed=0, classes=(0, 1, 2, 3, 4))
    high = open_images("digits", image_size=8, seed=0, classes=(5, 6, 7, 8, 9))
    for one, first, second in zip(whole, low, high, strict=True):
        assert len(first) + len(second) == len(one)
        assert set(first.targets.tolist()) == set(second.targets.tolist()) == set(range(5))


def test_classes_of_synthetic_images() -> None:
    settings = {"image_size": 8, "num_classes": 4, "seed": 0, "train_samples": 50, "test_samples": 50}
    whole, _ = open_images("synthetic_images", **settings)  # type: ignore[arg-type]
    part, _ = open_images("synthetic_images", **settings, classes=(3, 1))  # type: ignore[arg-type]
    first = whole.targets.tolist().index(3)
    assert torch.equal(part[0, part.targets.tolist().index(0)], whole[0, first])


@pytest.mark.parametrize(
    ("classes", "said"),
    [
        ((0, 10), r"digits has no class 10; use numbers from 0 to 9"),
        ((-1, 3), r"digits has no class -1; use numbers from 0 to 9"),
        ((3, 4, 3), r"class 3 is given more than once; name each class once"),
        ((3,), r"must name 2 classes or more; use dataset\.classes=null for all 10"),
        ((), r"must name 2 classes or more; use dataset\.classes=null for all 10"),
    ],
)
def test_classes_that_cannot_be_chosen(classes: tuple[int, ...], said: str) -> None:
    given = ",".join(map(str, classes))
    with pytest.raises(ValueError, match=rf"^dataset\.classes=\[{given}\]: {said}$"):
        open_images("digits", image_size=8, num_classes=10, seed=0, classes=classes)


def test_chosen_classes_without_an_image() -> None:
    absent = _without_test_image()
    with pytest.raises(ValueError, match=r"^dataset\.classes=\[\d+,\d+\]: synthetic_images has no test image [^\n]*$"):
        open_images(
            "synthetic_images", image_size=8, num_classes=9, seed=0, train_samples=200, test_samples=1, classes=absent
        )


def _without_test_image() -> tuple[int, int]:
    """Two of nine classes that the only test image does not belong to."""
    _, test = open_images("synthetic_images", image_size=8, num_classes=9, seed=0, train_samples=200, test_samples=1)
    first, second = sorted(set(range(9)) - set(test.targets.tolist()))[:2]
    return first, second


# --- CIFAR: torchvision knows the files by their MD5, so its readers, told the MD5 of tiny files, read the real format


def write_cifar(root: Path, reader: type[CIFAR10], per_file: int = 4) -> type[CIFAR10]:
    """Write tiny files in the format of `reader` below `root`; return `reader` knowing them."""
    folder = root / reader.base_folder
    folder.mkdir(parents=True)
    label_key = "fine_labels" if issubclass(reader, CIFAR100) else "labels"
    classes = 100 if issubclass(reader, CIFAR100) else 10
    rng = np.random.default_rng(0)

    def write(name: str, content: dict[str, object]) -> str:
        data = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(data)
        return hashlib.md5(data, usedforsecurity=False).hexdigest()

    def batch(name: str) -> list[str]:
        data = rng.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        return [name, write(name, {"data": data, label_key: rng.integers(0, classes, per_file).tolist()})]

    class Tiny(reader):
        train_list = [batch(name) for name, _ in reader.train_list]  # noqa: RUF012
        test_list = [batch(name) for name, _ in reader.test_list]  # noqa: RUF012
        meta = {**reader.meta, "md5": write(reader.meta["filename"], {reader.meta["key"]: _names(classes)})}  # noqa: RUF012

    return Tiny


def _names(classes: int) -> list[str]:
    return [f"name {number}" for number in range(classes)]


@pytest.mark.parametrize(("reader", "train_size", "classes"), [(CIFAR10, 20, 10), (CIFAR100, 4, 100)])
def test_cifar_files_are_read(tmp_path: Path, reader: type[CIFAR10], train_size: int, classes: int) -> None:
    tiny = write_cifar(tmp_path, reader)
    train, test = read_cifar(tiny, root=tmp_path, download=False)
    assert (len(train.targets), len(test.targets)) == (train_size, 4)
    assert train.class_names == test.class_names == tuple(_names(classes))
    # A row holds the red plane, then green, then blue, each row by row.
    with (tmp_path / reader.base_folder / tiny.test_list[0][0]).open("rb") as file:
        content = pickle.load(file)
    for index in range(4):
        expected = torch.from_numpy(content["data"][index].reshape(3, 32, 32))
        assert torch.equal(test.source.read(index), expected)
    assert test.targets.tolist() == content["fine_labels" if classes == 100 else "labels"]


def test_cifar_is_downloaded_when_asked(tmp_path: Path) -> None:
    tiny = write_cifar(tmp_path / "server", CIFAR10)
    archive = tmp_path / "server" / tiny.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "server" / tiny.base_folder, arcname=tiny.base_folder)
    tiny.tgz_md5 = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(archive.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        tiny.url = f"http://127.0.0.1:{server.server_port}/{archive.name}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        train, _ = read_cifar(tiny, root=tmp_path / "new" / "data", download=True)
        server.shutdown()
    assert len(train.targets) == 20
    read_cifar(tiny, root=tmp_path / "new" / "data", download=True)  # what is there is not downloaded again


def test_cifar_download_that_fails_is_one_line(tmp_path: Path) -> None:
    tiny = write_cifar(tmp_path / "server", CIFAR10)
    tiny.url = (tmp_path / "not there.tar.gz").as_uri()
    with pytest.raises(
        ValueError, match=r"^dataset\.download=true: could not download file:[^\n]*check the network[^\n]*$"
    ):
        read_cifar(tiny, root=tmp_path / "data", download=True)


@pytest.mark.parametrize(("name", "folder"), [("cifar10", "cifar-10-batches-py"), ("cifar100", "cifar-100-python")])
def test_cifar_missing_or_damaged(tmp_path: Path, name: str, folder: str) -> None:
    with pytest.raises(
        ValueError,
        match=rf"^dataset\.root=[^\n]*{folder}' are missing; set dataset\.download=true, or dataset\.root[^\n]*$",
    ):
        open_images(name, root=tmp_path, image_size=32, seed=0)
    write_cifar(tmp_path, CIFAR10 if name == "cifar10" else CIFAR100)  # right names, wrong content
    with pytest.raises(ValueError, match=rf"^dataset\.root=[^\n]*{folder}' are damaged or incomplete [^\n]*$"):
        open_images(name, root=tmp_path, image_size=32, seed=0)
