"""Windows of a text: every token predicted once, from the token before it."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.data.language_model import TextSplit, open_documents
from gpipe_cli.data.text import unigram_perplexity
from gpipe_cli.data.vocabulary import END, IGNORED, PAD, Vocabulary

DOCUMENTS = [f"def {name}():\n    return {number}\n" for number in range(30) for name in ("north", "south", "sea")]


def opened(folder: Path, train: list[str], test: list[str], length: int) -> tuple[TextSplit, TextSplit]:
    return open_documents(train, test, TextConfig("python_docs", vocabulary=285, cache=str(folder)), length)


@pytest.mark.parametrize("length", [1, 3, 10, 50])
def test_every_token_but_the_first_is_predicted_once_from_the_one_before(length: int) -> None:
    stream = torch.arange(100, 111, dtype=torch.int32)  # 10 tokens to predict
    split = TextSplit(stream, length, Vocabulary(b""))
    assert len(split) == split.catalogue.samples == -(-10 // length)
    indices = torch.arange(len(split)).flip(0)  # in any order
    (inputs,) = split.inputs(7, indices.tolist(), (length,))
    targets = split.targets_of(indices, (length,))
    assert inputs.shape == targets.shape == (len(split), length)
    assert inputs.dtype == targets.dtype == torch.int64
    inputs, targets = inputs.flip(0), targets.flip(0)
    real = targets != IGNORED
    assert targets[real].tolist() == list(range(101, 111))
    assert torch.equal(inputs[real], targets[real] - 1)
    assert (inputs[~real] == PAD).all()
    assert torch.equal(split.predicted(), targets[real])


def test_documents_end_with_the_end_token_and_come_back(tmp_path: Path) -> None:
    train, test = opened(tmp_path, DOCUMENTS, DOCUMENTS[:2], length=8)
    assert train.vocabulary.size == 285
    tokens = train.tokens.tolist()
    assert tokens.count(END) == len(DOCUMENTS)
    assert tokens[-1] == END
    found, document = [], []
    for token in tokens:
        if token == END:
            found.append(train.vocabulary.decode(document))
            document = []
        else:
            document.append(token)
    assert found == DOCUMENTS
    assert torch.equal(test.tokens, train.tokens[: len(test.tokens)])


def test_a_text_shorter_than_a_window(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^model\.length=100: the test text has only \d+ tokens[^\n]*$") as error:
        opened(tmp_path, DOCUMENTS, ["north sea"], length=100)
    most = int(str(error.value).partition("use model.length=")[2].split()[0])
    assert len(opened(tmp_path, DOCUMENTS, ["north sea"], length=most)[1]) == 1
    with pytest.raises(ValueError, match=rf"^model\.length={most + 1}: "):
        opened(tmp_path, DOCUMENTS, ["north sea"], length=most + 1)


def test_unigram_perplexity_in_closed_form() -> None:
    """Stream 4 4 4 5 predicts 4, 4, 5: counts plus one over 3 + 6 ids are 3/9 and 2/9; an unseen id has 1/9."""

    def split(*tokens: int) -> TextSplit:
        return TextSplit(torch.tensor(tokens, dtype=torch.int32), 2, SimpleNamespace(size=6))  # type: ignore[arg-type]

    train = split(4, 4, 4, 5)
    assert math.isclose(unigram_perplexity(train, split(0, 4)), 9 / 3)
    assert math.isclose(unigram_perplexity(train, split(0, 5)), 9 / 2)
    assert math.isclose(unigram_perplexity(train, split(5, 4, 5, 0)), (3 * 4.5 * 9) ** (1 / 3))
