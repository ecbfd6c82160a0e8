"""Text corpora: documents for a language model, sentence pairs for translation, each with a test split.

The paper does not name the text that its Transformer-L is measured on, and its translation corpus of 102 languages is
not public (Section 5). They are replaced by a user's files or, for a first run without a download, by text that comes
with every Python and names in some 250 languages from Unicode's Common Locale Data Repository.
"""

import codecs
import errno
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpipe_cli.data.batches import derive_seed
from gpipe_cli.data.cache import compute_digest, read_or_make
from gpipe_cli.data.splits import VALIDATION_NAME, Splits, split_names
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.system.files import read_text

_SECTION_CHARACTERS = 2000
_TEST_EVERY = 10  # every tenth section, or a file's last tenth, is test text
_TEST_ONE_IN = 20  # about 1 pair in 20 is a test pair
_MAX_BYTES = 2**32  # bytes of a file, which is held in memory several times
Documents = tuple[str, ...]


def read_python_docs() -> Splits[Documents]:
    """The language reference that Python's `help()` shows: about 370,000 characters, varying with its version.

    The topics overlap: "compound statements" contains "function definitions". Repeated paragraphs are left out, as test
    text would otherwise be in the training text. The split is fixed, whatever the seed.

    Raises InputError if this Python was installed without the topics.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        why = "this Python was installed without its help topics (pydoc_data)"
        raise InputError(f"dataset=python_docs: {why}; use another Python, or dataset=text_files") from error
    return split_sections(topics[name] for name in sorted(topics))


def split_sections(documents: Iterable[str]) -> Splits[Documents]:
    """The training and the test sections: repeated paragraphs (white space aside) are left out, documents are cut at
    paragraphs into sections of about 2,000 characters, and every tenth section is test text."""
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
    return Splits(tuple(train), tuple(test))


def read_text_files(root: Path, validation: object = None) -> Splits[Documents]:
    """The texts of all *.txt files below root/train, root/test and root/val (see `split_names`). Without these folders:
    of all below root, or of the file root; the last tenth of each text, from a line's start, is test text. A file is a
    document; order is by path.

    Raises InputError for a folder that is missing or holds no text, and for a file that is not UTF-8.
    """
    if validation == VALIDATION_NAME or any((root / name).is_dir() for name in ("train", "test")):
        return Splits(*(_read_folder(root, root / name) for name in split_names(root, validation)))
    parts = [_cut_last_tenth(text) for text in _read_folder(root, root)]
    train, test = (tuple(text for text in texts if text.strip()) for texts in zip(*parts, strict=True))
    if not test:
        raise InputError(f"dataset.root={root}: too little text to split off a test text; add text, or 'test/*.txt'")
    return Splits(train, test)


def _read_folder(root: Path, folder: Path) -> Documents:
    """The texts of all files, hidden ones aside, that hold more than white space; `folder` may be a file itself."""
    paths = [folder]
    if folder.is_dir():
        files = sorted(path for path in folder.rglob("*.[tT][xX][tT]") if path.is_file())
        paths = [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]
    texts = tuple(text for text in map(read_utf8, paths) if text.strip())
    if not texts:
        why = f"'{folder}' has no text in {len(paths)} *.txt files"
        use = "set it to a text file, to a folder of them, or add text"
        raise InvalidSettingError("dataset.root", root, f"{why}; {use}")
    return texts


def read_utf8(path: Path) -> str:
    """The text of a file, with line feeds as line ends. Raises InputError if it cannot be read, is larger than 4 GiB,
    or is not UTF-8."""
    try:
        text = read_text(path, _MAX_BYTES).replace("\r\n", "\n")
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        if error.errno == errno.EILSEQ:
            why += f"; save it in UTF-8, as by iconv -f {_encoding(path)} -t UTF-8"
        raise InputError(f"text file '{path}': {why}; see dataset.root, which takes files in UTF-8") from error
    if "\0" in text:
        why = f"has null characters, as UTF-16 has; save it in UTF-8, as by iconv -f {_encoding(path)} -t UTF-8"
        raise InputError(f"text file '{path}': {why}")
    return text


def _encoding(path: Path) -> str:
    """The likely encoding of a file that is not UTF-8."""
    with path.open("rb") as file:
        start = file.read(2)
    return (
        "UTF-16" if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "UTF-16LE" if b"\0" in start else "LATIN1"
    )


def _cut_last_tenth(text: str) -> tuple[str, str]:
    """Cut after the first line that ends in the last tenth, or within a line if none does."""
    position = len(text) * (_TEST_EVERY - 1) // _TEST_EVERY
    line_end = text.rstrip().find("\n", position)
    if line_end >= 0:
        position = line_end + 1
    return text[:position], text[position:]


_KINDS = ("territories", "languages", "scripts", "currency_names")  # kinds of names in CLDR
_MIN_NAMES = 100  # of a language; temperature sampling would repeat three names thousands of times
_LANGUAGES = re.compile(r"[A-Za-z0-9_]+-[A-Za-z0-9_]+")
_UNNAMED = "source-target"  # the languages of a pair whose line does not name them


@dataclass(frozen=True, eq=False)
class Pairs:
    """One split of the sentence pairs of all languages."""

    sources: Sequence[str]
    references: Sequence[str]
    groups: Tensor  # int32 (n,): index of each pair's languages in `languages`
    languages: tuple[str, ...]  # such as `de-en`, the same for both splits
    file: Path | None = None  # where the pairs were read from
    lines: Sequence[int] | None = None  # line of each pair in `file`, from 1

    def __len__(self) -> int:
        return len(self.groups)

    def origin(self, index: int) -> str:
        """A pair's origin, for a message."""
        if self.lines is not None:
            return f"'{self.file}' line {self.lines[index]}"
        return f"'{self.sources[index]}' ({self.languages[int(self.groups[index])]})"

    def select(self, indices: Tensor) -> "Pairs":
        """The pairs `indices` (int64), in that order."""
        rows = indices.tolist()
        return replace(
            self,
            sources=[self.sources[row] for row in rows],
            references=[self.references[row] for row in rows],
            groups=self.groups[indices],
            lines=None if self.lines is None else [self.lines[row] for row in rows],
        )


def target_language(languages: str) -> str:
    """The language that a pair translates into: `en` of `de-en`."""
    return languages.rpartition("-")[2]


def count_languages(pairs: Sequence[str]) -> int:
    """The number of languages in `pairs`, such as `hi_Latn-en`; a language counts once for all its scripts."""
    return len({code.partition("_")[0] for pair in pairs for code in pair.split("-")})


def read_parallel_text(root: Path, validation: object = None) -> Splits[Pairs]:
    """Reads lines `source TAB target TAB languages` (such as `de-en`) in UTF-8, without a header; skips empty ones. The
    model is told into which language to translate, and how often a pair is drawn depends on its languages: lines that
    are all of the same two languages may leave them out.

    root: a folder with train.tsv, test.tsv and val.tsv (see `split_names`), or a file, of which a hash of the target
    selects about 1 line in 20 for the test split, so that no target is in both. Raises InputError for a bad line, a bad
    file or an empty split.
    """
    if root.is_dir() or validation == VALIDATION_NAME:
        files = [root / f"{name}.tsv" for name in split_names(root, validation, ".tsv")]
        rows = [_read_rows(file) for file in files]
    else:
        files = [root, root]
        rows = [[], []]
        for row in _read_rows(root):
            rows[derive_seed(f"test {row[1]}") % _TEST_ONE_IN == 0].append(row)
        for split, part in Splits(*rows).each():
            if not part:
                why = f"1 line in {_TEST_ONE_IN} is test text, chosen by its target, and no {split} line is left"
                use = "add lines, or use a folder with train.tsv and test.tsv"
                raise InvalidSettingError("dataset.root", root, f"{why}; {use}")
    languages = tuple(sorted({row[2] for part in rows for row in part}))
    unnamed = [(file, row[3]) for file, part in zip(files, rows, strict=True) for row in part if row[2] == _UNNAMED]
    if unnamed and len(languages) > 1:
        why = "has no third column, the languages (such as de-en), but other lines do; give it in all lines or in none"
        raise InputError(f"text file '{unnamed[0][0]}' line {unnamed[0][1]}: {why}")
    numbers = {name: number for number, name in enumerate(languages)}
    splits = []
    for file, part in zip(files, rows, strict=True):
        sources, targets, names, lines = zip(*part, strict=True)
        groups = torch.tensor([numbers[name] for name in names], dtype=torch.int32)
        splits.append(Pairs(sources, targets, groups, languages, file, lines))
    return Splits(*splits)


def _read_rows(file: Path) -> list[tuple[str, str, str, int]]:
    """Source, target, languages and line number (from 1) of each non-empty line. Raises InputError if there is none."""
    rows = []
    # Not splitlines(): U+2028 and its like may be part of a sentence.
    for number, line in enumerate(read_utf8(file).split("\n"), 1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.rstrip("\t\r ").split("\t")]
        if len(columns) == 2:
            columns.append(_UNNAMED)
        if len(columns) != 3 or not all(columns) or not _LANGUAGES.fullmatch(columns[2]):
            why = "must have 2 or 3 columns, separated by tabs and none of them empty"
            raise InputError(f"text file '{file}' line {number}: {why}: source, target, languages (such as de-en)")
        rows.append((columns[0], columns[1], columns[2], number))
    if not rows:
        raise InputError(
            f"text file '{file}': an empty corpus; expected lines of source and target, and perhaps languages"
        )
    return rows


def read_cldr(direction: str, cache: Path) -> Splits[Pairs]:
    """About 200,000 pairs of a name and its English name (Babel 2.18: 201,203); kept in `cache`, as reading is slow.

    The names of territories, languages, scripts and currencies are short, but in many scripts and languages. They show
    that all parts work together; they do not measure translation quality.

    Locales with a territory (`de_AT`) are left out; locales with a script (`zh_Hant`) have only the names that differ
    from the language's. Names that are missing or equal their code are left out, and so are locales with fewer than 100
    names. One English name in 20 is for the test, in all languages, so that no name of the test, nor its code, occurs
    in training. The split is fixed, whatever the seed.
    """
    import babel

    # The digest covers this file's source: changed code must not read what the old code cached.
    name = compute_digest("cldr", babel.__version__, [Path(__file__).read_bytes()])
    content = json.loads(read_or_make(cache, f"cldr-{name}", lambda: json.dumps(_read_names()).encode()))
    return Splits(*(_select_direction(content[split], content["codes"], direction) for split in ("train", "test")))


def _read_locale_names(locale: str) -> dict[tuple[str, str], str]:
    """(kind, code) -> name in `locale`, without names that are empty or equal their code."""
    from babel import localedata

    return {
        (kind, code): name.strip()
        for kind in _KINDS
        for code, name in sorted(localedata.load(locale).get(kind, {}).items())
        if isinstance(name, str) and name.strip() not in ("", code)
    }


def _read_names() -> dict[str, Any]:
    """`codes`: of the languages. `train`, `test`: columns of names, English names and indices into `codes`."""
    from babel import localedata

    english = _read_locale_names("en")
    codes: list[str] = []
    rows: dict[str, list[tuple[str, str, int]]] = {"train": [], "test": []}
    for locale in sorted(localedata.locale_identifiers()):
        language, _, rest = locale.partition("_")
        # Territories (de_AT) have two letters or three digits, variants are longer, scripts have four letters.
        if language in ("en", "root") or (rest and not (len(rest) == 4 and rest.isalpha())):
            continue
        names = _read_locale_names(locale)
        usual_names = _read_locale_names(language) if rest else {}
        translated_names = [
            (name, english[entry])
            for entry, name in names.items()
            if entry in english and usual_names.get(entry) != name
        ]
        if len(translated_names) < _MIN_NAMES:
            continue
        for name, meaning in translated_names:
            # split by a hash of the English name, so that an entry added by a later Babel moves no other
            drawn = derive_seed(f"cldr test {' '.join(meaning.casefold().split())}") % _TEST_ONE_IN
            rows["train" if drawn else "test"].append((name, meaning, len(codes)))
        codes.append(locale)
    return {"codes": codes} | {split: list(zip(*part, strict=True)) for split, part in rows.items()}


def _select_direction(columns: Any, codes: list[str], direction: str) -> Pairs:
    """The pairs of a split in one direction or both."""
    names, english, numbers = columns
    groups = torch.tensor(numbers, dtype=torch.int32)
    into, out_of = tuple(f"{code}-en" for code in codes), tuple(f"en-{code}" for code in codes)
    if direction == "to_english":
        return Pairs(names, english, groups, into)
    if direction == "from_english":
        return Pairs(english, names, groups, out_of)
    both = torch.cat([groups, groups + len(codes)])
    return Pairs([*names, *english], [*english, *names], both, into + out_of)
