"""Text to read: the documents of a training and a test text for a language model (paper, Section 2.2, Table 1).

The paper's Transformer-L is measured without a named text; Lingvo's GPipe language model reads the billion-word
benchmark. Two sources replace it: the text that comes with every Python, so that a first run needs no download, and
a user's own files.
"""

from collections.abc import Iterable
from pathlib import Path

from gpipe_cli.config.typed import RefusedError

_SECTION_CHARACTERS = 2000
_TEST_EVERY = 10

Documents = tuple[str, ...]


def read_python_docs() -> tuple[Documents, Documents]:
    """The language reference that Python's `help()` shows: about 370,000 characters, and not the same in each version.

    The topics overlap: "compound statements" contains "function definitions". So a paragraph that has appeared before
    is left out; otherwise the test text would be in the training text. What is left of a topic is cut into sections of
    about 2,000 characters, at paragraphs; every tenth section is test text. The split is fixed, whatever the seed.

    Raises ValueError where Python was installed without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "dataset=python_docs: this Python was installed without its help topics (pydoc_data); use another Python, "
            "or dataset=text_files"
        ) from error
    return split_sections(topics[name] for name in sorted(topics))


def split_sections(documents: Iterable[str]) -> tuple[Documents, Documents]:
    """Leave out repeated paragraphs (white space aside), cut into sections, and give every tenth to the test text."""
    seen: set[str] = set()
    sections: list[str] = []
    for document in documents:
        paragraphs: list[str] = []
        for paragraph in document.split("\n\n"):
            words = " ".join(paragraph.split())
            if not words or words in seen:
                continue
            seen.add(words)
            paragraphs.append(paragraph)
            if sum(map(len, paragraphs)) >= _SECTION_CHARACTERS:
                sections.append("\n\n".join(paragraphs))
                paragraphs = []
        if paragraphs:
            sections.append("\n\n".join(paragraphs))
    test = sections[_TEST_EVERY - 1 :: _TEST_EVERY]
    train = [section for number, section in enumerate(sections) if number % _TEST_EVERY != _TEST_EVERY - 1]
    return tuple(train), tuple(test)


def read_text_files(root: Path) -> tuple[Documents, Documents]:
    """Every *.txt below root/train and root/test; where root has neither folder, every *.txt below root, of which the
    last tenth is test text, from the next line on. Each file is a document; order is by path; UTF-8. root may be one
    such file.

    Raises ValueError for a folder that is missing or holds no text, and for a file that is not UTF-8.
    """
    train_folder, test_folder = root / "train", root / "test"
    if train_folder.is_dir() or test_folder.is_dir():
        return _read_folder(root, train_folder), _read_folder(root, test_folder)
    halves = [_cut_last_tenth(text) for text in _read_folder(root, root)]
    train, test = (tuple(text for text in texts if text.strip()) for texts in zip(*halves, strict=True))
    if not test:
        raise ValueError(f"dataset.root={root}: too little text for a test text of its own; add text, or 'test/*.txt'")
    return train, test


def _read_folder(root: Path, folder: Path) -> Documents:
    """The texts of all files that hold more than white space; `folder` may be a file itself."""
    paths = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*.txt") if path.is_file())
    texts = tuple(text for text in map(read_utf8, paths) if text.strip())
    if not texts:
        why = f"'{folder}' has no text in {len(paths)} *.txt files"
        raise RefusedError("dataset.root", root, f"{why}; set it to a text file, to a folder of them, or add text")
    return texts


def read_utf8(path: Path) -> str:
    """The text of a file, without a mark of its encoding and with lines that end in a line feed.

    Raises ValueError, with the line, if it is not UTF-8, and if it cannot be read.
    """
    try:
        content = path.read_bytes()
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"text file '{path}': line {line} is not UTF-8 ({error.reason}); convert it") from error
    except OSError as error:
        raise ValueError(f"text file '{path}': cannot be read ({error.strerror}); see dataset.root") from error


def _cut_last_tenth(text: str) -> tuple[str, str]:
    """Cut after the first line that ends in the last tenth, or within a line where none does."""
    position = len(text) * (_TEST_EVERY - 1) // _TEST_EVERY
    line_end = text.rstrip().find("\n", position)
    if line_end >= 0:
        position = line_end + 1
    return text[:position], text[position:]
