"""Names of runs: made of the settings in which they differ, or of their folders.

Four rows called `2026-01-31_12-00-00_amoebanet_digits_K2_M4` and so on cannot be read; `partitions=2` can.
"""

import json
import re
from collections.abc import Sequence

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.compare.run_record import RunRecord

NOT_COMPARED = frozenset({"run_folder", "output", "resume"})  # where a run lies, not what it is
MOST_NAMING = 3  # settings that a name is made of; more make no name
MOST_LISTED = 8  # words of a list in a sentence


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """The settings of which runs have different values; one that a run does not have at all is none of them.

    `threads` only where K does not decide them: by default each process has its share of the cores.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.settings.items():
            values.setdefault(key, set()).add(json.dumps(value, sort_keys=True))
    keys = [key for key, found in values.items() if len(found) > 1 and key not in NOT_COMPARED]
    threads = {_cut(run): run.settings.get("threads") for run in runs}
    if "threads" in keys and all(run.settings.get("threads") == threads[_cut(run)] for run in runs):
        keys.remove("threads")
    return sorted(keys, key=lambda key: not key.endswith(".name"))  # the model before its own settings


def _cut(run: RunRecord) -> tuple[object, object]:
    return run.settings.get("partitions"), run.settings.get("executor")


def by_settings(keys: Sequence[str]) -> bool:
    """Whether so few settings differ that they make a name."""
    return 0 < len(keys) <= MOST_NAMING


def names(runs: Sequence[RunRecord]) -> list[str]:
    """A different name for each run: `partitions=2`, or a piece of its folder's name."""
    keys = differing(runs)
    found = _settings(runs, keys) if by_settings(keys) else _folders([run.folder.resolve().parts for run in runs])
    return [
        name if found.count(name) == 1 and name else f"{name} #{number}".strip()
        for number, name in enumerate(found, start=1)
    ]


def spans(numbers: Sequence[int]) -> list[str]:
    """Rising numbers: `1 to 4`, `7`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [f"{span[0]} to {span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in found]


def listed(words: Sequence[str], most: int = MOST_LISTED) -> str:
    """`a, b, and 3 more`; with semicolons where a word has commas of its own."""
    separator = "; " if any("=" in word and "," in word for word in words) else ", "
    more = [f"and {len(words) - most:,} more"] if len(words) > most else []
    return separator.join([*words[:most], *more])


def _settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[str]:
    """`filters=16, partitions=2`; `model=resnet`, as one types it."""
    last = [key.rpartition(".")[2] for key in keys]
    clear = [name if last.count(name) == 1 and name != "name" else key for key, name in zip(keys, last, strict=True)]
    pairs = [(key.removesuffix(".name"), full) for key, full in zip(clear, keys, strict=True)]
    return [
        ", ".join(f"{name}={show(run.settings[key])}" for name, key in pairs if key in run.settings) for run in runs
    ]


def _folders(folders: Sequence[tuple[str, ...]]) -> list[str]:
    """The last parts of paths, as many as tell them apart, without what all of them have in common.

    The time that begins a run folder's name is kept where nothing else differs, and the date where runs are of several.
    """
    if len(folders) == 1:
        return [folders[0][-1]]
    most = max(map(len, folders))
    endings = (["/".join(folder[-n:]) for folder in folders] for n in range(1, most + 1))
    ends = next((found for found in endings if len(set(found)) == len(found)), [folder[-1] for folder in folders])
    for begin in (r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_", r"\d{4}-\d\d-\d\d_", "$^"):
        found = _trimmed([re.sub(rf"(^|/){begin}", r"\1", end) for end in ends])
        if len(set(found)) == len(found) and all(found):
            return found
    return ends


def _trimmed(ends: Sequence[str]) -> list[str]:
    """Without the parts between `_` that all of them have; `micro_batches=4` is one part."""
    pieces = [end.split("/") for end in ends]
    parts = [[part for one in own for part in ([one] if "=" in one else one.split("_"))] for own in pieces]
    common = set(parts[0]).intersection(*parts)
    return ["_".join(part for part in own if part not in common) for own in parts]


def folded(key: str, width: int = 9) -> str:
    """A key over several lines, each as near to ``width`` as its parts allow: `micro_` above `batches`."""
    lines = [""]
    for part in re.findall(r"[^._]+[._]?|[._]", key):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)
