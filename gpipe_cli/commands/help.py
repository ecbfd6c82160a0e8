"""`gpipe help TOPIC`: explains a setting, a choice, a word, a measure or a recipe, and draws pictures of schedules;
`gpipe help -k WORD` finds topics. All texts come from `conf/`, the glossary, the recipes, `results.metrics`
and `commands.command_names`; none is written for it alone."""

import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache

from rich.console import Console

from gpipe_cli.commands import list as lists
from gpipe_cli.commands.command_names import COMMANDS
from gpipe_cli.commands.help_pictures import draw_topic
from gpipe_cli.config.comments import GROUPS, all_settings, choice_descriptions
from gpipe_cli.config.did_you_mean import suggest_nearest
from gpipe_cli.config.pipeline_settings import SCHEDULES
from gpipe_cli.config.schema import allowed_words
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.lines import show_line
from gpipe_cli.reproduction.recipe import read_recipe, recipe_names
from gpipe_cli.reproduction.runner import RECIPES_DIR
from gpipe_cli.results.metrics import METRICS, explain_metric
from gpipe_cli.units import plural

HELP = """\
Explains a setting, one of its choices, a term, a measure, or a recipe.

Usage: gpipe help micro_batches        a setting of any command, also model.filters or filters
       gpipe help 1f1b                 a choice: a schedule, with a picture; a model, a data set, hardware
       gpipe help bubble               a term (gpipe help K: a symbol), with a picture and numbers
       gpipe help samples_per_second   a measure: what it is, its unit, how it is measured
       gpipe help table2_amoebanet     a recipe
       gpipe help words                all terms; likewise settings (of gpipe train) and measures
       gpipe help train                the same as gpipe train --help
       gpipe help -k memory            topics that contain a word (or all of several words), one per line;
                                       so does gpipe help with a word that is not a topic

gpipe list shows all models, datasets, hardware, recipes or runs.
"""
_INDENT = "    "
_LISTS = ("words", "settings", "measures", *GROUPS)  # topics that list the entries of others
_MAX_TOPIC_WIDTH = 26  # characters of a topic's column; a longer topic takes room from the text next to it
_MORE = " ..."


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(HELP)
        return 0
    if arguments[0] == "-k":
        return _search(" ".join(arguments[1:]).split())
    topic = " ".join(arguments)
    entries_of = topics()
    if topic in lists.TOPICS:
        return lists.main([topic])
    key, _, value = topic.partition("=")
    # headings begin with `setting=choice`
    entries = [entry for entry in entries_of.get(value, []) if entry[0].partition("  ")[0] == topic]
    if not entries:
        headings = {_normalize_topic(" ".join(metric.heading.split())): metric.key for metric in METRICS.values()}
        same_topics = [
            name
            for name in entries_of
            if _normalize_topic(key) == _normalize_topic(name) or name == headings.get(_normalize_topic(key))
        ]
        entries = [entry for name in same_topics for entry in entries_of[name]]
    if not entries:
        with suppress(InputError):  # the topic may be a word in the texts of other topics
            return _search(topic.split())
        hint = suggest_nearest(topic, list(entries_of)) or "; gpipe help explains what topics there are"
        raise InputError(f"{topic}: no such topic{hint}")
    console = Console()
    width = _width(console)
    for heading, text in entries:
        show_line(console, heading, "bold")
        for clause in _full_text(heading, text).split(" | "):  # a line for each allowed value
            wrapped = textwrap.wrap(
                clause, width, initial_indent=_INDENT, subsequent_indent=f"{_INDENT}  ", break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip
            for line in wrapped:
                show_line(console, line)
    for line in draw_topic(_normalize_topic(value or topic), width - len(_INDENT)):
        show_line(console, f"{_INDENT}{line}".rstrip())
    return 0


def topics() -> dict[str, list[tuple[str, str]]]:
    """Topic -> heading and text of each entry about it, with topics spelled as in the sources."""
    entries: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for word, text in glossary().items():
        entries[word].append((word, text))
        entries["words"].append((word, text))
    for setting in all_settings():
        place = setting.place if "=" in setting.place else f"gpipe {setting.place}"
        entry = f"{setting.key}={setting.value}  ({place})", setting.text
        for name in dict.fromkeys((setting.key, setting.key.rpartition(".")[2])):
            entries[name].append(entry)
        if symbol := re.match(r"[A-Z](?=,)", setting.text):  # the paper's symbol, `K`
            entries[symbol[0]].append(entry)
        if setting.place == "train":
            entries["settings"].append((f"{setting.key}={setting.value}", setting.text))
        for clause in setting.text.split(" | "):
            choice, _, text = clause.partition(": ")
            if choice in _choice_topics(setting.key) and text:
                entries[choice].append((f"{setting.key}={choice}  ({place})", text))
    for group in GROUPS:
        for name, text in choice_descriptions(group).items():
            entries[name].append((f"{group}={name}", text))
            entries[group].append((f"{group}={name}", text))
    for name in recipe_names():
        entries[name].append((f"gpipe reproduce {name}", ""))  # `_full_text` adds the text
    for metric in METRICS.values():
        entry = f"{metric.key}  ({metric.name})", explain_metric(metric)
        entries[metric.key].append(entry)
        entries["measures"].append(entry)
    for name, line in COMMANDS.items():
        entries[name].append((f"gpipe {name}", line))
    return dict(entries)


def _search(words: Sequence[str]) -> int:
    """Shows a line for each topic that has all `words` in its name or in the text of an entry: first the topics with
    the words in the name, then in the order of the sources. Raises InputError if no topic has them."""
    if not words:
        raise InputError("-k: give a word to look for; for example gpipe help -k memory")
    wanted = [_normalize_topic(word) for word in words]
    entries_of = topics()
    texts: dict[str, list[str]] = defaultdict(list)  # topic -> its texts that have the words
    seen = set[tuple[str, str]]()  # a topic that only lists entries of others is found by its name alone
    for name, entries in sorted(entries_of.items(), key=lambda item: item[0] in _LISTS):
        for heading, text in entries:
            entry = heading.partition("  ")[0], _full_text(heading, text)
            if _has_words(f"{name} {' '.join(entry)}", wanted) and entry not in seen:
                texts[name].append(entry[1])
            seen.add(entry)
        if name in _LISTS and name not in texts and _has_words(name, wanted):
            texts[name].append(f"lists {plural(len(entries), 'topic')}")
    if not texts:
        near = get_close_matches(" ".join(words), entries_of, 3, 0.5) or ["words", "settings", "measures"]
        what = "all of these words" if words[1:] else "this word"
        raise InputError(f"-k {' '.join(words)}: no topic has {what}; the nearest are {', '.join(near)}")
    order = list(entries_of)
    matches = sorted(texts, key=lambda name: (not _has_words(name, wanted), order.index(name)))
    console = Console()
    column = min(_MAX_TOPIC_WIDTH, max(map(len, matches)))
    for name in matches:
        begin = f"gpipe help {name:<{column}}  "
        looked_for = [] if _has_words(name, wanted) else wanted
        excerpt = _excerpt(max(texts[name], key=len), looked_for, _width(console) - len(begin))
        show_line(console, f"{begin}{excerpt}".rstrip())
    return 0


def _excerpt(text: str, wanted: Sequence[str], max_characters: int) -> str:
    """The first clause of `text` with any of the words, or else its first clause, in at most `max_characters`
    characters; "" if so few characters would tell nothing."""
    if max_characters < 4 * len(_MORE):
        return ""
    clauses = re.split(r" \| |(?<=[.]) (?=[A-Z])", text)
    shown = next((clause for clause in clauses if any(_has_words(clause, [word]) for word in wanted)), clauses[0])
    ends = [at + len(word) for word in wanted if (at := _normalize_text(shown).find(word)) >= 0]
    if ends and min(ends) > max_characters - len(_MORE) and len(shown) > max_characters:
        begin = min(min(ends) - max_characters // 2, len(shown) - max_characters + len(_MORE))
        shown = f"{_MORE.strip()} {shown[begin:].partition(' ')[2]}"
    return textwrap.shorten(shown, max_characters, placeholder=_MORE)


def _has_words(text: str, wanted: Sequence[str]) -> bool:
    """Whether `text` has all the words, which are as `_normalize_topic` spells them."""
    return all(word in _normalize_text(text) for word in wanted)


def _normalize_text(text: str) -> str:
    """`text` as words of `_normalize_topic` occur in it: of `micro_batches` and `Micro-Batches`, `micro batch`."""
    return text.lower().replace("_", " ").replace("-", " ")


def _width(console: Console) -> int:
    return max(40, min(console.width, 120))


@cache
def _full_text(heading: str, text: str) -> str:
    """The text of an entry. The text of a recipe is read on demand, as reading all recipes takes a second."""
    if not heading.startswith("gpipe reproduce "):
        return text
    recipe = read_recipe(heading.removeprefix("gpipe reproduce "))
    return f"{recipe.title} ({recipe.source}). Scaled down: {recipe.small.scaled}; {recipe.small.duration}."


def glossary() -> dict[str, str]:
    """The words of recipes/glossary.md: word -> meaning, with the symbol in parentheses."""
    table = (RECIPES_DIR / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ?([^|]*?) ?\|$", table, re.MULTILINE)
    meanings = {word: f"{text} ({symbol})" if symbol else text for word, text, symbol in rows if word != "word"}
    return {word: text.replace("`", "") for word, text in meanings.items()}


def _normalize_topic(topic: str) -> str:
    """The topic, normalized: `micro-batches`, `micro_batch` and `Micro batch` are the same."""
    return re.sub(r"(?:(?<=ch)es|(?<=[^s])s)$", "", topic.lower().replace("_", " ").replace("-", " "))


def _choice_topics(key: str) -> Sequence[str]:
    """The choices of a setting that are topics themselves."""
    allowed = SCHEDULES if key == "schedule" else allowed_words(TrainConfig, key)
    return [choice for choice in allowed if choice not in ("true", "false", "null")]
