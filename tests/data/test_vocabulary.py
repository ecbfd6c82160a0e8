"""The vocabulary: every text is restored, the same input gives the same ids, and SentencePiece's errors become ours."""

from itertools import product
from pathlib import Path

import pytest

from gpipe_cli.data.vocabulary import BEGIN, END, PAD, UNKNOWN, SentencePieceTokenizer, make_tokenizer
from gpipe_cli.errors import InputError
from gpipe_cli.training.data_feed import VOCABULARY, saved_vocabulary

LINES = [
    f"    for {name} in range({number}): print('{name} is {number * 7}')" for number in range(40) for name in "abxy"
]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceTokenizer:
    cache = tmp_path_factory.mktemp("cache")
    return make_tokenizer(LINES, 310, symbols=["<2en>", "<2de>"], add_dummy_prefix=False, cache=cache)


def test_special_ids(vocabulary: SentencePieceTokenizer) -> None:
    assert vocabulary.size == 310
    assert [vocabulary.symbol("<2en>"), vocabulary.symbol("<2de>")] == [4, 5]
    assert vocabulary.symbol("</s>") == END
    ids = vocabulary.encode([LINES[3]])[0]
    assert vocabulary.decode([4, BEGIN, *ids, END, PAD, PAD]) == LINES[3]


def test_every_text_comes_back_and_nothing_is_unknown(vocabulary: SentencePieceTokenizer) -> None:
    texts = [
        LINES[0],
        "    indented\n\n\ttwo lines  with  spaces \n",
        "new characters: Ω 漢字 😀 é e\N{COMBINING ACUTE ACCENT} ﬁ",
        "<2en> <s> </s> <unk> <0x41>",
        *(" ", "a\0b", ""),
    ]
    encoded = vocabulary.encode(texts)
    assert all(
        UNKNOWN + 2 < number < vocabulary.size for ids in encoded for number in ids
    )  # neither special nor a symbol
    assert [vocabulary.decode(ids) for ids in encoded] == texts


def test_a_word_prefix_makes_the_first_word_a_word_like_others(tmp_path: Path) -> None:
    texts = [" ".join(words) for words in product(["north", "south", "island", "sea", "river"], repeat=2)]
    for add_dummy_prefix in (True, False):
        vocabulary = make_tokenizer(texts, 275, add_dummy_prefix=add_dummy_prefix, cache=tmp_path)
        north, sea, both = vocabulary.encode(["north", "sea", "sea north"])
        assert (both == sea + north) is add_dummy_prefix
        assert vocabulary.decode(both) == "sea north"


def test_same_input_same_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        make_tokenizer(LINES, 300, add_dummy_prefix=True, cache=tmp_path / name)
    (one,), (other,) = ((tmp_path / name).glob("vocabulary-*") for name in ("one", "other"))
    assert (one.name, one.read_bytes()) == (other.name, other.read_bytes())
    assert capfd.readouterr().err == ""  # SentencePiece prints its progress unless it is told not to


def test_a_line_of_any_length_is_learned_from(tmp_path: Path) -> None:
    """SentencePiece alone leaves out what is longer than 4,192 bytes, and then has nothing to learn from."""
    vocabulary = make_tokenizer(["wörter und wörter " * 1000], 275, add_dummy_prefix=True, cache=tmp_path)
    assert len(vocabulary.encode(["wörter"])[0]) < 6


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    """A short text has fewer pieces than a vocabulary that suits long ones, and a newer Babel has more characters than
    the default for its names had room for; both were refused once."""
    most = make_tokenizer(LINES, 32000, add_dummy_prefix=True, cache=tmp_path).size
    assert 300 < most < 32000
    assert make_tokenizer(LINES, most, add_dummy_prefix=True, cache=tmp_path).size == most
    signs = [chr(0x4E00 + number) for number in range(120)]
    spelled = make_tokenizer([LINES[0]] * 300 + signs, 320, add_dummy_prefix=True, cache=tmp_path)
    assert spelled.size <= 320
    assert [spelled.decode(ids) for ids in spelled.encode(signs)] == signs
    for size, symbols in ((265, []), (100, ["<2en>"])):
        with pytest.raises(InputError, match=rf"^dataset\.vocabulary={size}: .*; use dataset\.vocabulary=\d") as error:
            make_tokenizer(LINES, size, tmp_path, symbols=symbols, add_dummy_prefix=True)
        least = int(str(error.value).rpartition("=")[2].partition(" ")[0])
        assert make_tokenizer(LINES, least, tmp_path, symbols=symbols, add_dummy_prefix=True).size == least


def test_a_vocabulary_that_cannot_be_read_is_not_learned_again(tmp_path: Path) -> None:
    """Every token would mean something else."""
    assert saved_vocabulary(tmp_path) is None
    (tmp_path / VOCABULARY).mkdir()
    with pytest.raises(InputError, match=rf"^{tmp_path / VOCABULARY}: cannot be read \(Is a directory\); "):
        saved_vocabulary(tmp_path)
