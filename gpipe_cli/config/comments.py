"""The comments in `conf/` on each setting and each choice, which `gpipe help` and `gpipe list` show."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from itertools import takewhile
from pathlib import Path

CONF_DIR = Path(str(resources.files("gpipe_cli.conf")))
GROUPS = ("model", "dataset", "optimizer", "learning_rate", "hardware")
_SETTING = re.compile(r"( *)([a-z]\w*):(?: +([^#]*[^# ]))? *(?:# (.*))?")
_CONTINUATION = re.compile(r" {20,}# ?(.*)")  # continues the comment of the setting above


@dataclass(frozen=True)
class Comment:
    """A setting in a file of `conf/`, with its comment."""

    key: str  # dotted: `model.filters`
    value: str  # the default that the file sets
    text: str  # the comment, without line breaks; "" if there is none
    place: str  # the file: `train`, `model=amoebanet`


def choice_descriptions(group: str) -> dict[str, str]:
    """Name of each choice of a group -> its description: the comment that its file begins with."""
    return {file.stem: _first_comment(file) for file in sorted((CONF_DIR / group).glob("*.yaml"))}


def all_settings() -> list[Comment]:
    """Every setting of every command and every choice, in the order in which the files explain them."""
    comments: list[Comment] = []
    for file in sorted(CONF_DIR.glob("*.yaml"), key=lambda file: (file.stem != "train", file)):
        comments += _settings(file, file.stem)
    for group in GROUPS:
        for file in sorted((CONF_DIR / group).glob("*.yaml")):
            for comment in _settings(file, f"{group}={file.stem}"):
                if "# @package _global_" not in file.read_text(encoding="utf-8"):
                    comments.append(replace(comment, key=f"{group}.{comment.key}"))
                elif comment.key.startswith(f"{group}."):
                    comments.append(comment)
    return [comment for comment in comments if comment.key.rpartition(".")[2] != "name"]


def _first_comment(file: Path) -> str:
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("# @"))
    return " ".join(line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), lines))


def _settings(file: Path, place: str) -> Iterator[Comment]:
    """The settings in a file up to Hydra's own."""
    groups: list[tuple[int, str]] = []  # indentation and name of the groups around the line
    current: Comment | None = None
    for line in file.read_text(encoding="utf-8").splitlines():
        if line == "hydra:":
            break
        if current is not None and (more := _CONTINUATION.fullmatch(line)):
            current = replace(current, text=f"{current.text} {more[1]}".strip())
            continue
        if current is not None:
            yield current
            current = None
        if (setting := _SETTING.fullmatch(line)) is None or setting[2] == "defaults":
            continue
        indent = len(setting[1])
        groups = [group for group in groups if group[0] < indent]
        if setting[3] is None:
            groups.append((indent, setting[2]))
        else:
            key = ".".join([*(name for _, name in groups), setting[2]])
            current = Comment(key, setting[3], setting[4] or "", place)
    if current is not None:
        yield current
