"""The data sets in their real formats on tiny data: what is read, how it is split, and what a user can get wrong."""

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import EVERYTHING, PLAIN, md5, opened, pack, served, write_image, write_images
from PIL import EpsImagePlugin, Image
from torch import Tensor
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.transforms import v2

from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.data.images import ImageSplit, build_transform, cutout, normalize
from gpipe_cli.data.readers import ImageFiles, read_cifar
from gpipe_cli.errors import InputError

Splits = tuple[ImageSplit, ImageSplit]


# --- digits


@pytest.fixture(scope="module")
def digits() -> Splits:
    return opened("digits")[:2]


def test_digits_are_split_as_scikit_learn_splits_them(digits: Splits) -> None:
    """And in its order. Pinned, so that accuracies of different versions compare."""
    from sklearn.datasets import load_digits  # takes three seconds to import
    from sklearn.model_selection import train_test_split

    whole = load_digits()
    rows = train_test_split(range(1797), test_size=0.2, stratify=whole.target, random_state=0)
    for split, numbers in zip(digits, rows, strict=True):
        for channel in range(3):
            assert (split.samples.pixels[:, channel].numpy() * 16 == whole.images[numbers]).all()
        assert split.samples.targets.tolist() == whole.target[numbers].tolist()
        assert split.samples.class_names == tuple("0123456789")
    grey = digits[1].samples.pixels[:, 0].mul(16).byte().numpy()
    assert hashlib.sha256(b"".join(sorted(image.tobytes() for image in grey))).hexdigest()[:16] == "d974870049d11559"


# --- randomness


def test_training_images_depend_on_seed_epoch_and_index_only() -> None:
    def split(seed: int) -> Splits:
        return opened("digits", image_size=16, seed=seed, augmentation=EVERYTHING)[:2]

    (train, test), (again, _), (other, _) = split(1), split(1), split(2)
    state = torch.get_rng_state()
    first = [train[2, index] for index in range(20)]
    assert torch.equal(torch.get_rng_state(), state)  # the default generator is left alone
    torch.manual_seed(1)
    backwards = [again[2, index] for index in reversed(range(20))][::-1]
    assert torch.equal(torch.stack(first), torch.stack(backwards))
    assert sum(not torch.equal(train[3, index], first[index]) for index in range(20)) >= 19
    assert sum(not torch.equal(other[2, index], first[index]) for index in range(20)) >= 19
    assert torch.equal(test[0, 3], test[7, 3])  # the test split is never varied


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 9, 17), (3, 40, 33)])
def test_the_simple_steps_have_the_bits_of_torchvision(shape: tuple[int, ...], kind: torch.dtype) -> None:
    image = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image = image if kind is torch.uint8 else image / 255
    theirs = v2.Compose([
        v2.Resize(27), v2.CenterCrop(24), v2.RandomHorizontalFlip(), v2.RandomCrop(24, padding=2),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3),
    ])  # fmt: skip
    dataset = ImagesConfig("digits", 24, 10, PLAIN)
    steps = build_transform(dataset, 27, replace(PLAIN, horizontal_flip=True, shift=2))

    def ours(image: Tensor) -> Tensor:
        made = steps(image)  # pixels that are stored as bytes travel as bytes, and are normalized where they are used
        return normalize(made, dataset) if kind is torch.uint8 else made

    for seed in range(4):
        results = []
        for transform in (theirs, ours):
            torch.manual_seed(seed)
            results.append((transform(image), torch.get_rng_state()))
        assert all(torch.equal(*values) for values in zip(*results, strict=True))


def test_synthetic_images_are_a_function_of_seed_and_index() -> None:
    def pair(seed: int) -> Splits:
        return opened("synthetic_images", image_size=13, num_classes=7, seed=seed, train_samples=50, test_samples=9)[:2]

    (train, test), (again, _), (other, _) = pair(4), pair(4), pair(5)
    assert torch.equal(train[0, 3], again[6, 3])
    assert torch.equal(train.samples.targets, again.samples.targets)
    for different in (train[0, 4], test[0, 3], other[0, 3]):
        assert not torch.equal(train[0, 3], different)
    assert not torch.equal(train.samples.targets, other.samples.targets)
    assert set(train.samples.targets.tolist()) == set(range(7))
    # Uniform bytes: mean 0 and deviation 1/sqrt(3) after scaling.
    values = torch.stack([train[0, index] for index in range(50)]) / 127.5 - 1
    assert (values.shape, test.split_index.samples) == ((50, 3, 13, 13), 9)
    assert [float(values.mean()), float(values.std())] == pytest.approx([0, 3**-0.5], abs=0.02)


# --- some of the classes


def test_chosen_classes_are_renumbered_in_the_given_order(digits: Splits) -> None:
    numbers = {7: 0, 2: 1, 5: 2}
    for whole, part in zip(digits, opened("digits", classes=(7, 2, 5))[:2], strict=True):
        assert part.samples.class_names == ("7", "2", "5")
        kept = [(at, numbers[target]) for at, target in enumerate(whole.samples.targets.tolist()) if target in numbers]
        assert part.samples.targets.tolist() == [number for _, number in kept]
        assert all(torch.equal(part[0, index], whole[0, kept[index][0]]) for index in range(0, len(kept), 11))


# --- folders of images


def open_folder(root: Path) -> Splits:
    return opened("image_folder", root, image_size=14, num_classes=2)[:2]


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_folders_are_classes(tmp_path: Path, test_name: str) -> None:
    training = ("cat/b.png", "cat/a.jpg", "cat/deeper/c.png", "dog/x.gif", "dog/y.JPEG", "dog/.checkpoints/copy.png")
    write_images(tmp_path / "train", *training)
    (tmp_path / "train/cat/b.png").rename(tmp_path / "train/cat/b")  # is read by its content
    write_images(tmp_path / test_name, "cat/t.png", "dog/u.webp", "dog/v.bmp")
    (tmp_path / "train/.ipynb_checkpoints").mkdir()
    (tmp_path / "train/cat/notes.txt").write_text("not an image")
    (tmp_path / "train/cat/._a.jpg").write_bytes(b"what macOS leaves behind")
    (tmp_path / "train/dog/phone.HEIC").write_bytes(b"what this Pillow cannot read")
    (tmp_path / "train/dog/README").write_text("not an image")
    train, test = open_folder(tmp_path)
    assert train.samples.skipped == {".txt": 1, ".heic": 1, "no ending": 1}, "skipped without a word"
    assert not test.samples.skipped
    assert train.samples.class_names == test.samples.class_names == ("cat", "dog")
    assert train.samples.targets.tolist() == [0, 0, 0, 1, 1]
    assert test.samples.targets.tolist() == [0, 1, 1]
    # The central crop of the file: 20 wide, 16 high; 14 is 7/8 of 16.
    with Image.open(tmp_path / test_name / "cat/t.png") as file:
        pixels = torch.from_numpy(np.array(file)).permute(2, 0, 1)
    assert torch.equal(test[0, 0], pixels[:, 1:15, 3:17])


@pytest.mark.parametrize(("mode", "suffix"), [("1", "png"), ("RGBA", "png"), ("CMYK", "jpg"), ("P", "gif")])
def test_every_colour_mode_becomes_three_channels(tmp_path: Path, mode: str, suffix: str) -> None:
    file = tmp_path / f"t.{suffix}"
    write_image(file, mode=mode)
    assert ImageFiles((str(file),))[0].shape == (3, 16, 20)


def test_a_picture_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encapsulated PostScript was drawn by Ghostscript, whatever the file's name."""
    program, file = tmp_path / "gs", tmp_path / "t.jpg"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", str(program))
    Image.new("RGB", (20, 16)).save(file, format="EPS")
    with pytest.raises(InputError, match=r"t\.jpg': cannot be read"):
        ImageFiles((str(file),))[0]
    assert not (tmp_path / "started").exists()


def test_pixels_keep_their_values(tmp_path: Path) -> None:
    """16 bits were cut to white, what is transparent was black, and a photograph's tag on how to turn it was ignored;
    numbers without a known black and white are refused."""
    grey = np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6)
    see_through = np.zeros((4, 6, 4), dtype=np.uint8)
    see_through[..., 3] = 255 - grey
    turned = Image.Exif()
    turned[0x0112] = 6  # the first row is the right-hand side
    Image.fromarray(grey).save(tmp_path / "turned.png", exif=turned)
    turned[0x0112] = 65535  # no orientation, once counted as turned
    Image.fromarray(grey).save(tmp_path / "strange.png", exif=turned)
    for name, values in (
        ("deep.png", grey * np.uint16(257)),
        ("deep.tif", grey * np.uint16(257)),
        ("alpha.png", see_through),
    ):
        Image.fromarray(values).save(tmp_path / name)
    for name, wanted in (
        ("deep.png", grey),
        ("deep.tif", grey),
        ("alpha.png", grey),
        ("turned.png", np.rot90(grey, -1)),
        ("strange.png", grey),
    ):
        assert np.array_equal(ImageFiles((str(tmp_path / name),))[0][1], wanted), name
    words = ImageFiles(tuple(str(path) for path in sorted(tmp_path.iterdir()))).describe()
    assert words.startswith("5 files: ")
    assert {"16-bit grey (scaled to 8) 2", "8-bit grey 2", "8-bit RGB drawn on white 1; 1 turned by their tag"} == {
        *words.removeprefix("5 files: ").split(", ")
    }
    for kind in (np.int32, np.float32):
        Image.fromarray(grey.astype(kind)).save(tmp_path / "wide.tif")
        with pytest.raises(InputError, match=r"wide\.tif': has 32-bit numbers.*; save it with 8 bits$"):
            ImageFiles((str(tmp_path / "wide.tif"),))[0]


def test_folders_that_are_not_data(tmp_path: Path) -> None:
    for folder, name in (("train/cat", "a"), ("test/owl", "o")):
        with pytest.raises(
            InputError, match=rf"^dataset\.root={tmp_path}: [^\n]*/{folder[:-4]}' cannot be read [^\n]*$"
        ):
            open_folder(tmp_path)
        write_image(tmp_path / folder / f"{name}.png")
    with pytest.raises(InputError, match=r"differ \([^\n]*owl[^\n]*$"):
        open_folder(tmp_path)


# --- CIFAR: torchvision knows the files by their MD5, so its readers, told those of tiny files, read the real formats


def write_cifar(root: Path, reader: type[CIFAR10] = CIFAR10) -> type[CIFAR10]:
    """Write tiny files of 4 images in the format of `reader` below `root`; return a reader that knows them."""
    folder = root / reader.base_folder
    folder.mkdir(parents=True)
    labels, classes = ("fine_labels", 100) if reader is CIFAR100 else ("labels", 10)
    rng = np.random.default_rng(0)

    def write(name: str, content: dict[str, object]) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return md5(pickle.dumps(content))

    def batch(name: str) -> list[str]:
        data = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
        return [name, write(name, {"data": data, labels: rng.integers(0, classes, 4).tolist()})]

    names = {reader.meta["key"]: [f"name {number}" for number in range(classes)]}

    class Tiny(reader):
        train_list = [batch(name) for name, _ in reader.train_list]  # noqa: RUF012
        test_list = [batch(name) for name, _ in reader.test_list]  # noqa: RUF012
        meta = {**reader.meta, "md5": write(reader.meta["filename"], names)}  # noqa: RUF012

    return Tiny


@pytest.mark.parametrize(("reader", "train_images", "classes"), [(CIFAR10, 20, 10), (CIFAR100, 4, 100)])
def test_cifar_is_downloaded_when_asked_and_read(
    tmp_path: Path, reader: type[CIFAR10], train_images: int, classes: int
) -> None:
    tiny = write_cifar(tmp_path / "server", reader)
    folder, archive = tmp_path / "server" / tiny.base_folder, tmp_path / "server" / tiny.filename
    tiny.tgz_md5 = pack(archive, **{tiny.base_folder: folder})
    tiny.url = (tmp_path / "not there.tar.gz").as_uri()
    with pytest.raises(InputError, match=r"^dataset\.download=true: [^\n]*check the network[^\n]*$"):
        read_cifar(tiny, tmp_path / "new" / "data", download=True)
    with served(archive.parent) as address:
        tiny.url = f"{address}/{archive.name}"
        read_cifar(tiny, tmp_path / "new" / "data", download=True)
    train, test, _ = read_cifar(tiny, tmp_path / "new" / "data", download=True)  # what is there is not downloaded again
    assert (len(train.targets), len(test.targets)) == (train_images, 4)
    assert train.class_names == test.class_names == tuple(f"name {number}" for number in range(classes))
    # A row holds the red plane, then green, then blue, each row by row.
    content = pickle.loads((folder / tiny.test_list[0][0]).read_bytes())
    assert all(np.array_equal(test.pixels[index].flatten(), content["data"][index]) for index in range(4))
    assert test.targets.tolist() == content["fine_labels" if reader is CIFAR100 else "labels"]


def test_cifar_missing_or_damaged(tmp_path: Path) -> None:
    line = rf"^dataset\.root={tmp_path}: [^\n]*{CIFAR10.base_folder}'[^\n]*set dataset\.download=true[^\n]*$"
    with pytest.raises(InputError, match=line):
        opened("cifar10", tmp_path)
    write_cifar(tmp_path)  # right names, wrong content
    with pytest.raises(InputError, match=line):
        opened("cifar10", tmp_path)


# --- augmentation, measured on images whose pixels tell where they came from


def test_cutout_is_a_grey_square_that_may_extend_over_the_border() -> None:
    image = torch.ones(3, 12, 12)
    sizes = set()
    for _ in range(300):
        out = cutout(image, 4)
        hole = out[0] == 0
        assert torch.equal(out, torch.where(hole, 0.0, 1.0).expand(3, 12, 12))
        rows, columns = hole.any(dim=1), hole.any(dim=0)
        assert torch.equal(hole, rows[:, None] & columns[None])  # a full rectangle
        assert int(rows.diff().sum()) <= 2  # in one piece
        sizes.add((int(rows.sum()), int(columns.sum())))
    assert (min(sizes), max(sizes)) == ((2, 2), (4, 4))
    assert torch.equal(image, torch.ones(3, 12, 12))  # the stored image is not touched
    blanked = build_transform(ImagesConfig("digits", 12, 10, PLAIN), 12, replace(PLAIN, cutout=4))
    out = blanked(torch.full((3, 12, 12), 255, dtype=torch.uint8))
    assert set(out.unique().tolist()) == {0.0, 1.0}  # 0 is the middle of the range
