"""Translation without a download: names in 234 languages, out of Unicode's Common Locale Data Repository.

The paper translates 102 languages into English from a corpus that is not public (Section 5). Babel carries the names of
territories, languages, scripts and currencies in hundreds of languages, some with five times as many as others: short,
but many scripts, many languages, one model. It shows how the parts work together; it is no measure of translation.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gpipe_cli.data.cache import cached, digest_of
from gpipe_cli.data.pairs import Pairs
from gpipe_cli.data.seeds import seed_of

_KINDS = ("territories", "languages", "scripts", "currency_names")
_TEST_ONE_IN = 20
_LEAST_NAMES = 100  # a language with three names would see them thousands of times under temperature sampling


def read_cldr(direction: str, cache: Path) -> tuple[Pairs, Pairs]:
    """About 200,000 pairs of a name and its English name (Babel 2.18: 201,203); kept in `cache`, as reading takes long.

    Languages are those without a territory (`de`, `zh`), and their other scripts (`zh_Hant`) with the names that are
    written otherwise there. A name that is missing or only a code is left out, and a language with fewer than 100
    names. One English name in 20 is for the test, in all languages alike, so that no name of the test, nor its code,
    occurs in training. The split is fixed, whatever the seed.
    """
    import babel

    # Whatever changes below changes the file's name.
    name = digest_of("cldr", babel.__version__, [Path(__file__).read_bytes()])
    content = json.loads(cached(cache, f"cldr-{name}", lambda: json.dumps(_read_names()).encode()))
    train, test = (_directed(content[split], content["codes"], direction) for split in ("train", "test"))
    return train, test


def _names_of(locale: str) -> dict[tuple[str, str], str]:
    """(kind, code) -> name, as far as the locale has one that is more than the code."""
    from babel import localedata

    content: Mapping[str, Any] = localedata.load(locale)
    return {
        (kind, code): name.strip()
        for kind in _KINDS
        for code, name in sorted(content.get(kind, {}).items())
        if isinstance(name, str) and name.strip() and name.strip() != code
    }


def _locales() -> Iterator[tuple[str, dict[tuple[str, str], str]]]:
    """Each language, and each of its scripts with the names that differ from the language's; English not."""
    from babel import localedata

    for locale in sorted(localedata.locale_identifiers()):
        language, _, rest = locale.partition("_")
        # Territories (de_AT) have two letters or three digits, variants are longer, scripts have four letters.
        if language in ("en", "root") or (rest and not (len(rest) == 4 and rest.isalpha())):
            continue
        names = _names_of(locale)
        if rest:
            usual = _names_of(language)
            names = {entry: name for entry, name in names.items() if usual.get(entry) != name}
        yield locale, names


def _read_names() -> dict[str, Any]:
    """The codes of the languages, and of each split: names, English names, and numbers of codes."""
    english = _names_of("en")
    codes: list[str] = []
    rows: dict[str, list[tuple[str, str, int]]] = {"train": [], "test": []}
    for locale, names in _locales():
        known = [(name, english[entry]) for entry, name in names.items() if entry in english]
        if len(known) < _LEAST_NAMES:
            continue
        for name, meaning in known:
            # by a hash of the English name, so that an entry that a later Babel adds moves no other
            drawn = seed_of(f"cldr test {' '.join(meaning.casefold().split())}") % _TEST_ONE_IN
            rows["train" if drawn else "test"].append((name, meaning, len(codes)))
        codes.append(locale)
    return {"codes": codes} | {split: list(zip(*part, strict=True)) for split, part in rows.items()}


def _directed(columns: Any, codes: list[str], direction: str) -> Pairs:
    """The pairs of a split in one direction or both."""
    names, english, numbers = columns
    groups = torch.tensor(numbers, dtype=torch.int32)
    into, out_of = tuple(f"{code}-en" for code in codes), tuple(f"en-{code}" for code in codes)
    match direction:
        case "to_english":
            return Pairs(names, english, groups, into)
        case "from_english":
            return Pairs(english, names, groups, out_of)
        case _:
            both = torch.cat([groups, groups + len(codes)])
            return Pairs([*names, *english], [*english, *names], both, into + out_of)
