"""Documents to read: how they are cut into training and test text, and what a user can get wrong."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest

from gpipe_cli.data.corpora import read_python_docs, read_text_files, split_sections


def write(path: Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


# --- python_docs


def test_python_docs_are_split_in_ten_and_share_no_paragraph() -> None:
    train, test = read_python_docs()
    sizes = [sum(map(len, texts)) for texts in (train, test)]
    assert sum(sizes) > 200_000
    assert 0.07 < sizes[1] / sum(sizes) < 0.13

    def paragraphs(texts: tuple[str, ...]) -> list[str]:
        return [" ".join(part.split()) for text in texts for part in text.split("\n\n")]

    both = paragraphs(train) + paragraphs(test)
    assert len(both) == len(set(both))
    assert set(both) == set(paragraphs(tuple(topics.values()))) - {""}  # only repeated ones are lost
    assert (train, test) == read_python_docs()


def test_sections_end_at_paragraphs_and_every_tenth_is_for_the_test() -> None:
    """Two paragraphs of 1,000 characters make a section; the 25th is alone, as its document ends."""
    paragraphs = [f"{number:03d} " + "x" * 996 for number in range(40)]
    train, test = split_sections(["\n\n".join(paragraphs[:25]), "\n\n".join([*paragraphs[20:], "the end"])])
    sections = [*train[:9], test[0], *train[9:18], test[1], *train[18:]]
    assert [section.split("\n\n")[0][:3] for section in sections[:13]] == [f"{n:03d}" for n in range(0, 25, 2)]
    assert "\n\n".join(sections) == "\n\n".join([*paragraphs, "the end"])
    assert (len(sections), len(test)) == (13 + 8, 2)
    # white space makes no other paragraph
    assert split_sections(["one two\n\n   one\n   two\n\n\n\n\nthree", "one  two"]) == (("one two\n\n\nthree",), ())


# --- text_files


def test_train_and_test_folders(tmp_path: Path) -> None:
    write(tmp_path / "train" / "b.txt", "bé\r\nb")
    write(tmp_path / "train" / "a" / "x.txt", b"\xef\xbb\xbfax")
    write(tmp_path / "train" / "notes.md", "no text")
    write(tmp_path / "train" / "empty.txt", " \n")
    write(tmp_path / "test" / "t.txt", "t")
    write(tmp_path / "outside.txt", "neither")
    assert read_text_files(tmp_path) == (("ax", "bé\nb"), ("t",))


def test_the_last_tenth_of_each_file(tmp_path: Path) -> None:
    lines = [f"line {number:02d}\n" for number in range(100)]  # 8 characters each; 90 % are the first 90 lines
    write(tmp_path / "a.txt", "".join(lines))
    write(tmp_path / "deep" / "b.txt", "0123456789" * 3)
    train, test = read_text_files(tmp_path)
    assert train == ("".join(lines[:91]), "0123456789" * 2 + "0123456")
    assert test == ("".join(lines[91:]), "789")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"dataset\.root=\S+/none: '\S+' has no text in 0 \*\.txt files; .*"),
        ({"a.txt": "", "b.txt": "\n \n"}, r"dataset\.root=\S+: '\S+' has no text in 2 \*\.txt files; .*"),
        ({"train/a.txt": "text", "test/b.txt": ""}, r"dataset\.root=\S+: '\S+/test' has no text in 1 .*"),
        ({"a.txt": b"good\n\xff"}, r"text file '\S+/a\.txt': line 2 is not UTF-8 \(.*\); convert it"),
    ],
)
def test_one_line_about_what_is_wrong(tmp_path: Path, files: dict[str, str | bytes], message: str) -> None:
    for name, text in files.items():
        write(tmp_path / name, text)
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        read_text_files(tmp_path if files else tmp_path / "none")
