"""Converts dataclasses of results to JSON values, and back.

Unlike settings, which `config.schema` reads, results were written by a program, perhaps by another version of it:
fields that are missing take their defaults, and keys without a field are ignored.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})

# Metadata of fields that only results of images, or only results of text, have.
IMAGE_FIELD: Mapping[str, bool] = {"text": False}
TEXT_FIELD: Mapping[str, bool] = {"text": True}


def to_dict(value: Any, text: bool) -> Any:
    """`value` with its dataclasses as dictionaries: if `text`, without fields of images, else of text."""
    match value:
        case list() | tuple():
            return [to_dict(item, text) for item in value]
        case dict():
            return {key: to_dict(item, text) for key, item in value.items()}
        case _ if is_dataclass(value):
            names = [field.name for field in fields(value) if field.metadata.get("text", text) is text]
            return {name: to_dict(getattr(value, name), text) for name in names}
    return value


def from_dict(kind: type[T], tree: Any) -> T:
    """The dataclass `kind` from nested dictionaries. Raises TypeError, which names the key and the value at fault.
    Control characters are left out of texts: a terminal would obey them, and the file may not be the user's."""
    made: T = _convert(kind, _printable(tree), "")
    return made


def _printable(tree: Any) -> Any:
    match tree:
        case str():
            return tree.translate(_CONTROLS)
        case list():
            return [_printable(item) for item in tree]
        case dict():
            return {_printable(key): _printable(item) for key, item in tree.items()}
    return tree


def _convert(kind: Any, value: Any, key: str) -> Any:
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in args:
            return None
        options = [option for option in args if option is not NoneType]
        return _convert(next((option for option in options if option is type(value)), options[0]), value, key)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        return kind(**{name: _convert(hints[name], value[name], f"{key}.{name}") for name in hints if name in value})
    if origin is tuple and isinstance(value, list) and (args[1] is ... or len(args) == len(value)):
        return tuple(_convert(args[0], item, key) for item in value)
    if kind is float and isinstance(value, int):
        return float(value)
    if kind is Any or isinstance(value, str if origin is Literal else origin or kind):
        return value
    raise TypeError(f"has {value!r:.40} as {key.lstrip('.') or 'its content'}")
