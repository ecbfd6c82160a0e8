"""A Hugging Face tokenizer: the same ids as in any other program, and no id that is taken for padding."""

from pathlib import Path

import pytest
import torch
from tokenizer_files import LINES, write_tokenizer
from transformers import AutoTokenizer

from gpipe_cli.config.groups import TextConfig
from gpipe_cli.data.pretrained_tokenizer import HFTokenizer
from gpipe_cli.data.splits import Splits
from gpipe_cli.data.text import open_documents, unigram_perplexity
from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.errors import InputError

TEXTS = [LINES[3], "!!! a text of two\n\n\tlines, longer than eight <end> tokens: Ω 漢字 😀", " ", ""]


def test_ids_are_those_of_any_other_program_and_so_are_those_of_the_saved_files(tmp_path: Path) -> None:
    tokenizer = HFTokenizer(str(write_tokenizer(tmp_path / "given", eos_token="<end>")))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "given")
    expected = [theirs(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert tokenizer.encode(TEXTS) == expected
    assert (tokenizer.size, tokenizer.end) == (len(theirs), theirs.eos_token_id)
    (tmp_path / "saved").mkdir()
    for name, content in tokenizer.files.items():
        (tmp_path / "saved" / name).write_bytes(content)
    saved = HFTokenizer(str(tmp_path / "saved"))
    assert (saved.encode(TEXTS), saved.size, saved.end) == (expected, tokenizer.size, tokenizer.end)


def test_token_0_is_predicted_and_padding_is_not(tmp_path: Path) -> None:
    """In a vocabulary of our own 0 is padding; here it is the exclamation mark."""
    place = write_tokenizer(tmp_path / "tokenizer", eos_token="<end>")
    whole = AutoTokenizer.from_pretrained(place)
    dataset = TextConfig("python_docs", vocabulary=len(whole), tokenizer=str(place), cache=str(tmp_path))
    train, test, _ = open_documents(Splits(("!", "!"), ("! !",)), dataset, length=2)
    assert train.tokens.tolist() == [0, whole.eos_token_id, 0, whole.eos_token_id]
    indices = torch.arange(2)
    assert train.targets_of(0, indices, (2,)).tolist() == [[whole.eos_token_id, 0], [whole.eos_token_id, IGNORED]]
    assert train.inputs(0, [0, 1], (2,))[0][0].tolist() == [0, whole.eos_token_id]
    # counts plus one over three targets and all ids: the end has 3, token 0 has 2, any other has 1
    seen = test.tokens[1:].tolist()
    odds = [{0: 2, whole.eos_token_id: 3}.get(token, 1) / (3 + len(whole)) for token in seen]
    assert unigram_perplexity(train, test) == pytest.approx(torch.tensor(odds).log().mean().neg().exp().item())


def test_a_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_tokenizer(tmp_path / "endless")
    for name, why in (("empty", "cannot be read"), ("endless", "has no token to end")):
        place = str(tmp_path / name)
        with pytest.raises(InputError, match=rf"\Adataset\.tokenizer={place}: [^\n]*{why}[^\n]*; gi[^\n]*\Z"):
            HFTokenizer(place)
