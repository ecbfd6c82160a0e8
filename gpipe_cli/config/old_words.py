"""Words that earlier versions wrote into run folders, or users typed, with today's: the only place that knows them."""

import re
from typing import Any

# Setting -> its old values -> today's.
VALUES = {
    "cost": {"figures": "datasheet", "measured": "profile", "measured_anew": "reprofile"},
    "freeze": {"taken": "backbone"},
    "scale": {"desk": "small"},
}
# Key in result.json, or in a recipe -> the last part of today's. No key of config.yaml or of a checkpoint has changed.
KEYS = {
    "without_core": "cpu_starved_share",
    "graphs.causes": "fallback_reasons",
    "recipe.desk": "small",
}


def update_words(value: Any, key: str = "") -> Any:
    """Settings, a result or a recipe of an earlier version in today's words; `key`: where in the file `value` is."""
    match value:
        case dict():
            paths = {name: f"{key}.{name}" if key else name for name in value}
            return {KEYS.get(paths[name], name): update_words(item, paths[name]) for name, item in value.items()}
        case list():
            return [update_words(item, key) for item in value]
        case str():
            return VALUES.get(key.removeprefix("config."), {}).get(value, value)
    return value


def update_argument(argument: str, command: str) -> str:
    """A setting, `++cost=figures,measured`, that was typed at a command, in today's words."""
    key, equals, value = argument.partition("=")
    if key == "scale" and command != "reproduce":  # the only setting here that most commands refuse
        return argument
    for old, new in VALUES.get(key.lstrip("+"), {}).items():
        value = re.sub(rf"\b{old}\b", new, value)
    return key + equals + value
