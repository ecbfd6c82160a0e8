"""`gpipe help TOPIC`: explains a setting, a choice, a word, a measure or a recipe, and draws pictures of schedules. All
texts come from `conf/`, the README's glossary, the recipes and `results.measures`; none is written for it alone."""

import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, metadata

from rich.console import Console

from gpipe_cli.commands import list as lists
from gpipe_cli.commands.help_pictures import drawn
from gpipe_cli.config.comments import GROUPS, all_settings, of_choices
from gpipe_cli.config.settings import SCHEDULES, TrainConfig
from gpipe_cli.config.typed import choices, nearest
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.lines import show_line
from gpipe_cli.reproduction.recipe import load, names
from gpipe_cli.results.measures import MEASURES, explained

HELP = """\
Explains a setting, a choice of one, a word of the README's glossary, a measure, or a recipe.

Usage: gpipe help micro_batches        a setting of any command, also model.filters or filters
       gpipe help 1f1b                 a choice: of a schedule, with a picture; of a model, a data set, hardware
       gpipe help bubble               a word; gpipe help K: a symbol; both with pictures and numbers
       gpipe help samples_per_second   a measure: what it is, its unit, how it is measured
       gpipe help table2_amoebanet     a recipe
       gpipe help words                all words; also settings (of gpipe train) and measures
       gpipe help train                as gpipe train --help

gpipe list models, datasets, hardware, recipes or runs lists what there is.
"""
_INDENT = "    "


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
        return 0
    topic, known = " ".join(arguments), topics()
    if topic in lists.TOPICS:
        return lists.main([topic])
    key, _, value = topic.partition("=")
    found = [entry for entry in known.get(value, []) if entry[0].partition("  ")[0] == topic]  # as headings begin
    found = found or [entry for name, said in known.items() if _plain(name) == _plain(key) for entry in said]
    if not found:
        hint = nearest(topic, list(known)) or "; gpipe help says what topics are"
        raise InputError(f"{topic}: there is no such topic{hint}")
    console = Console()
    width = max(40, min(console.width, 120))
    for heading, text in found:
        show_line(console, heading, "bold")
        for clause in (text or _of_recipe(heading)).split(" | "):  # allowed values, one per line
            wrapped = textwrap.wrap(
                clause, width, initial_indent=_INDENT, subsequent_indent=f"{_INDENT}  ", break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip
            for line in wrapped:
                show_line(console, line)
    for line in drawn(_plain(value or topic), width - len(_INDENT)):
        show_line(console, f"{_INDENT}{line}".rstrip())
    return 0


def topics() -> dict[str, list[tuple[str, str]]]:
    """Topic -> heading and text of each entry about it, with topics spelled as in the sources."""
    found: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for word, text in glossary().items():
        found[word].append((word, text))
        found["words"].append((word, text))
    for one in all_settings():
        place = one.place if "=" in one.place else f"gpipe {one.place}"
        entry = f"{one.key}={one.value}  ({place})", one.text
        for name in dict.fromkeys((one.key, one.key.rpartition(".")[2])):
            found[name].append(entry)
        if symbol := re.match(r"[A-Z](?=,)", one.text):  # the paper's symbol, `K`
            found[symbol[0]].append(entry)
        if one.place == "train":
            found["settings"].append((f"{one.key}={one.value}", one.text))
        for clause in one.text.split(" | "):
            choice, _, text = clause.partition(": ")
            if choice in _named(one.key) and text:
                found[choice].append((f"{one.key}={choice}  ({place})", text))
    for group in GROUPS:
        for name, text in of_choices(group).items():
            found[name].append((f"{group}={name}", text))
            found[group].append((f"{group}={name}", text))
    for name in names():
        found[name].append((f"gpipe reproduce {name}", ""))  # `_of_recipe` has the text
    for measure in MEASURES.values():
        entry = f"{measure.key}  ({measure.name})", explained(measure)
        found[measure.key].append(entry)
        found["measures"].append(entry)
    return dict(found)


def _of_recipe(heading: str) -> str:
    """The text about one recipe, read only when it is shown: reading all of them takes a second."""
    recipe = load(heading.removeprefix("gpipe reproduce "))
    return f"{recipe.title} ({recipe.source}). At a desk: {recipe.desk.scaled}; {recipe.desk.duration}."


def glossary() -> dict[str, str]:
    """The README's glossary, word -> meaning with the symbol in parentheses, from the installed package's metadata; {}
    if gpipe is not installed."""
    try:
        about = metadata("gpipe-cli")
    except PackageNotFoundError:
        return {}
    readme = str(about.get("Description") or about.get_payload())  # type: ignore[attr-defined]  # a method of email.message.Message
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ?([^|]*?) ?\|$", readme.partition("\n## Glossary\n")[2], re.MULTILINE)
    meanings = {word: f"{text} ({symbol})" if symbol else text for word, text, symbol in rows if word != "word"}
    return {word: text.replace("`", "") for word, text in meanings.items()}


def _plain(topic: str) -> str:
    """The topic, normalized: `micro-batches`, `micro_batch` and `Micro batch` are the same."""
    return re.sub(r"(?:(?<=ch)es|(?<=[^s])s)$", "", topic.lower().replace("_", " ").replace("-", " "))


def _named(key: str) -> Sequence[str]:
    """The choices of a setting that are topics of their own."""
    allowed = SCHEDULES if key == "schedule" else choices(TrainConfig, key)
    return [choice for choice in allowed if choice not in ("true", "false", "null")]
