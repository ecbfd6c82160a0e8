"""Text for a language model: how documents are cut into training and test text, windows, and random tokens."""

import math
from itertools import groupby
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest
import torch

from gpipe_cli.config.groups import TextConfig
from gpipe_cli.data.corpora import read_python_docs, read_text_files
from gpipe_cli.data.splits import Splits
from gpipe_cli.data.text import SyntheticText, TextSplit, open_documents, open_text, unigram_perplexity
from gpipe_cli.data.vocabulary import BEGIN, END, IGNORED, PAD, UNKNOWN, SentencePieceTokenizer
from gpipe_cli.errors import InputError

# --- documents


def test_python_docs_are_split_in_ten_and_share_no_paragraph() -> None:
    train, test, _ = read_python_docs()
    sizes = [sum(map(len, texts)) for texts in (train, test)]
    assert sum(sizes) > 200_000
    assert 0.07 < sizes[1] / sum(sizes) < 0.13

    def paragraphs(texts: tuple[str, ...]) -> list[str]:
        return [" ".join(part.split()) for text in texts for part in text.split("\n\n")]

    both = paragraphs(train) + paragraphs(test)
    assert len(both) == len(set(both))
    assert set(both) == set(paragraphs(tuple(topics.values()))) - {""}  # only repeated ones are lost


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def test_train_and_test_folders(tmp_path: Path) -> None:
    trained = {"train/b.txt": "bé\r\nb", "train/a/x.txt": b"\xef\xbb\xbfax"}
    write(tmp_path, {**trained, "train/notes.md": "no text", "train/empty.txt": " \n"})
    write(tmp_path, {"test/t.TXT": "t", "outside.txt": "neither"})
    write(tmp_path, {"train/._b.txt": b"\0\5\x16\7", "train/.copies/b.txt": "an old copy"})  # macOS's, a notebook's
    assert read_text_files(tmp_path)[:2] == (("ax", "bé\nb"), ("t",))


def test_the_last_tenth_of_each_file(tmp_path: Path) -> None:
    lines = [f"line {number:02d}\n" for number in range(100)]  # 8 characters each; 90 % are the first 90 lines
    write(tmp_path, {"a.txt": "".join(lines), "deep/b.txt": "0123456789" * 3})
    train, test, _ = read_text_files(tmp_path)
    assert train == ("".join(lines[:91]), "0123456789" * 2 + "0123456")
    assert test == ("".join(lines[91:]), "789")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"good\n\xff", r"line 2 is not UTF-8.* iconv -f LATIN1 "),
        ("größer\n".encode("latin-1"), r"line 1 is not UTF-8.* iconv -f LATIN1 "),
        ("größer\n".encode("utf-16"), r"line 1 is not UTF-8.* iconv -f UTF-16 "),
        ("wide\n".encode("utf-16-le"), r"has null characters.* iconv -f UTF-16LE "),  # was trained on
    ],
)
def test_bytes_that_are_no_text_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": content})
    with pytest.raises(InputError, match=rf"^text file '\S+/a\.txt': .*{message}-t UTF-8"):
        read_text_files(tmp_path)


# --- windows


DOCUMENTS = [f"def {name}():\n    return {number}\n" for number in range(30) for name in ("north", "south", "sea")]


def opened(folder: Path, train: list[str], test: list[str], length: int) -> tuple[TextSplit, TextSplit]:
    documents = Splits(tuple(train), tuple(test))
    return open_documents(documents, TextConfig("python_docs", vocabulary=285, cache=str(folder)), length)[:2]


@pytest.mark.parametrize("length", [1, 3, 50])
def test_every_token_but_the_first_is_predicted_once_from_the_one_before(length: int) -> None:
    stream = torch.arange(100, 111, dtype=torch.int32)  # 10 tokens to predict
    split = TextSplit(stream, length, SentencePieceTokenizer(b""))
    samples = split.split_index.samples
    assert samples == -(-10 // length)
    indices = torch.arange(samples).flip(0)  # in any order
    (inputs,) = split.inputs(7, indices.tolist(), (length,))
    targets = split.targets_of(0, indices, (length,))
    assert inputs.shape == targets.shape == (samples, length)
    inputs, targets = inputs.flip(0), targets.flip(0)
    real = targets != IGNORED
    assert targets[real].tolist() == list(range(101, 111))
    assert torch.equal(inputs[real], targets[real] - 1)
    assert (inputs[~real] == PAD).all()
    assert torch.equal(split.predicted_tokens(), targets[real])


def test_documents_end_with_the_end_token_and_come_back(tmp_path: Path) -> None:
    train, test = opened(tmp_path, DOCUMENTS, DOCUMENTS[:2], length=8)
    assert train.vocabulary.size == 285
    tokens = train.tokens.tolist()
    assert tokens.count(END) == len(DOCUMENTS)
    assert tokens[-1] == END
    found = [[*part] for is_end, part in groupby(tokens, END.__eq__) if not is_end]
    assert [train.vocabulary.decode(part) for part in found] == DOCUMENTS
    assert torch.equal(test.tokens, train.tokens[: len(test.tokens)])


def test_a_text_shorter_than_a_window(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^model\.length=100: the test text has only \d+ tokens[^\n]*$") as error:
        opened(tmp_path, DOCUMENTS, ["north sea"], length=100)
    most = int(str(error.value).partition("use model.length=")[2].split()[0])
    assert opened(tmp_path, DOCUMENTS, ["north sea"], length=most)[1].split_index.samples == 1


def test_unigram_perplexity_in_closed_form() -> None:
    """Stream 4 4 4 5 predicts 4, 4, 5: counts plus one over 3 + 6 ids are 3/9 and 2/9; an unseen id has 1/9."""

    def split(*tokens: int) -> TextSplit:
        return TextSplit(torch.tensor(tokens, dtype=torch.int32), 2, SimpleNamespace(size=6))  # type: ignore[arg-type]

    train = split(4, 4, 4, 5)
    assert math.isclose(unigram_perplexity(train, split(0, 4)), 9 / 3)
    assert math.isclose(unigram_perplexity(train, split(0, 5)), 9 / 2)
    assert math.isclose(unigram_perplexity(train, split(5, 4, 5, 0)), (3 * 4.5 * 9) ** (1 / 3))


# --- random tokens


def make(seed: int = 0, *, pairs: bool = False) -> tuple[SyntheticText, SyntheticText]:
    config = TextConfig("synthetic_text", vocabulary=50, train_samples=40, test_samples=3)
    return open_text(config, length=16, pairs=pairs, seed=seed)[:2]  # type: ignore[return-value]


@pytest.mark.parametrize("pairs", [False, True])
def test_targets_are_the_next_tokens(pairs: bool) -> None:
    train, test = make(pairs=pairs)
    assert (train.split_index.samples, test.split_index.samples) == (40, 3)
    *sources, inputs = train.inputs(0, range(40), (16, 16))
    targets = train.targets_of(0, torch.arange(40), (16, 16))
    assert inputs.shape == targets.shape == (40, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert (int(targets.min()), int(targets.max())) == (UNKNOWN + 1, 49)
    assert not pairs or (inputs[:, 0] == BEGIN).all()
    assert [source.shape for source in sources] == [(40, 16)] * pairs


def test_made_from_seed_and_index() -> None:
    train, test = make()
    (batch,) = train.inputs(0, [5, 6], (16,))
    assert torch.equal(batch[1], make()[0].inputs(3, [6], (16,))[0][0])  # the epoch changes nothing
    for other, index in ((train, 6), (test, 5), (make(seed=1)[0], 5)):
        assert not torch.equal(batch[0], other.inputs(0, [index], (16,))[0][0])
