"""What the sources may have of things that read badly, counted: names that say nothing, long lists of parameters."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from test_imports import FILES, nodes

from gpipe_cli.config.settings import TrainConfig

EMPTY = {"of", "found", "known", "own", "there", "here", "now", "one", "two"}
SETTINGS = {setting.name for setting in fields(TrainConfig)}


def empty_names() -> Iterator[str]:
    """Each assignment to a name that does not say what it holds, also as a loop's variable."""
    for name, node in nodes():
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY:
            yield f"{name}:{node.lineno} {node.id}"


def long_parameters() -> Iterator[str]:
    """Each function with more than six parameters."""
    for name, node in nodes():
        if isinstance(node, ast.FunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            if sum(argument.arg not in ("self", "cls") for argument in arguments) > 6:
                yield f"{name}:{node.lineno} {node.name}"


def old_words() -> Iterator[str]:
    """Each function that checks and is named after its worst outcome, and each bound that is not MIN or MAX."""
    for name, node in nodes():
        if isinstance(node, ast.FunctionDef) and node.name.strip("_").startswith("refuse_"):
            yield f"{name}:{node.lineno} {node.name}"
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and re.match("_?(MOST|LEAST)_", node.id):
            yield f"{name}:{node.lineno} {node.id}"


def participles() -> Iterator[str]:
    """Each function, not a property, that is named by a participle alone."""
    irregular = {"drawn", "shown", "given", "taken", "made", "held", "kept", "sent", "found", "begun", "written"}
    for name, node in nodes():
        if isinstance(node, ast.FunctionDef) and not any("property" in ast.dump(of) for of in node.decorator_list):
            word = node.name.strip("_")
            if word in irregular or (re.fullmatch("[a-z]{3,}ed", word) and word not in ("seed", "speed")):
                yield f"{name}:{node.lineno} {node.name}"


def lists_of_settings() -> Iterator[str]:
    """Each list of six or more settings: what depends on a setting is said beside it, in `TrainConfig`."""
    for name, node in nodes():
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            words = [one.value for one in node.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            if len(words) == len(node.elts) > 5 and set(words) <= SETTINGS:
                yield f"{name}:{node.lineno} {', '.join(words)}"


def test_names_say_what_they_hold() -> None:
    """Bounds, to be lowered when there are fewer."""
    counted = Counter(
        {
            "empty names": len(list(empty_names())),
            "functions of more than six parameters": len(list(long_parameters())),
            "the word one": sum(
                len(re.findall(r"\bone\b", path.read_text(encoding="utf-8"))) for path in FILES.values()
            ),
            "old words": len(list(old_words())),
            "participles": len(list(participles())),
            "dataclasses": sum(
                isinstance(node, ast.ClassDef) and any("dataclass" in ast.dump(of) for of in node.decorator_list)
                for _, node in nodes()
            ),
        }
    )
    print(counted)
    limits = {"empty names": 6, "functions of more than six parameters": 14, "the word one": 280, "dataclasses": 190}
    limits |= {"old words": 0, "participles": 0}
    named = [*empty_names(), *old_words(), *participles()]
    assert not {what: number for what, number in counted.items() if number > limits[what]}, named


def test_no_list_of_settings_is_kept_by_hand() -> None:
    assert not list(lists_of_settings())
