"""Converts nested dictionaries of settings into typed dataclasses; each error is a line.

A dataclass declares what a setting may be; an error names the setting, its value, what is allowed and the remedy.
Values keep the type that YAML or the command line gave them, except that an int is accepted for a float, and a single
value for a list of that value.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from gpipe_cli.config.did_you_mean import ALIASES, resolve_alias, suggest_nearest
from gpipe_cli.errors import InputError, InvalidSettingError, InvalidValueError, format_value, is_one_line

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The bounds of a number, both inclusive: `Annotated[int, Range(1, 1024)]`.

    Every number in a configuration has bounds, so that values computed from it do not overflow, and a zero too many
    does not start a hundred thousand processes.
    """

    minimum: float
    maximum: float
    exclusive_max: bool = False  # `maximum` itself is excluded
    suggest: float | None = None  # value that the error proposes; None: the violated bound
    why: str = ""  # reason for the bound, shown in the error; "": the reason is obvious


MIN_FLOAT, MAX_FLOAT = 1e-30, 1e30  # bounds of floats, so that products and quotients of two are finite
Count = Annotated[int, Range(1, 10**9)]
Fraction = Annotated[float, Range(0, 1, exclusive_max=True, suggest=0)]  # a fraction, 0 to below 1
Positive = Annotated[float, Range(MIN_FLOAT, MAX_FLOAT, suggest=1)]
NotNegative = Annotated[float, Range(0, MAX_FLOAT)]


def parse_config(kind: type[T], values: Any) -> T:
    """Converts nested dictionaries into the dataclass `kind` and those nested in it.
    Raises InvalidValueError for an unknown key (naming the nearest known key), a value still to be given (`???`), a
    wrong type or a value out of range; InputError for a key that is missing or another choice's, and for a
    contradiction."""
    made: T = _convert(kind, values, "", setting_names(kind))
    return made


def setting_names(kind: type) -> list[str]:
    """Every key of the dataclass `kind` in dotted form, `model.filters`, including the groups themselves."""
    keys: list[str] = []
    for name, hint in get_type_hints(kind).items():
        keys.append(name)
        for option in _group_types(hint):
            keys += [key for inner in setting_names(option) if (key := f"{name}.{inner}") not in keys]
    return keys


def allowed_words(kind: type, key: str) -> list[str]:
    """The words that the setting `key`, `model.variant`, accepts in any choice of its group; [] for other types."""
    first, _, inner = key.partition(".")
    words: list[str] = []
    for option in _union_members(get_type_hints(kind).get(first)):
        if inner:
            words += allowed_words(option, inner) if _is_group(option) else []
        elif get_origin(option) is Literal:
            words += map(format_value, get_args(option))
        elif get_origin(option) is tuple and get_origin(get_args(option)[0]) is Literal:
            words += [f"[{word}]" for word in get_args(get_args(option)[0])]
        elif option is bool:
            words += ["true", "false"]
    return list(dict.fromkeys(words))


def unknown_setting_error(key: str, value: object, choices: Sequence[str]) -> InvalidSettingError:
    """The error for a key that the given configuration does not have."""
    if key in choices and "." not in key:
        why = "the given configuration is not based on gpipe's own"
        return InvalidValueError(key, value, f"{why}; begin it with defaults: [train, _self_]")
    if key in choices:  # a member of a group, but not of the choice that was made there
        return InvalidSettingError(key, value, f"the chosen {key.partition('.')[0]} has no such setting; remove it")
    ours = ALIASES.get(key.rpartition(".")[2])
    elsewhere = (
        f"; write {ours}={format_value(value)}" if ours else suggest_nearest(key, _settings_accepting(value, choices))
    )
    return InvalidValueError(key, value, f"no such setting{elsewhere}; --cfg job lists all")


def _settings_accepting(value: object, keys: Sequence[str]) -> list[str]:
    """The settings that may take a value: a group takes the name of a choice only."""
    groups = () if isinstance(value, str) else {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in groups]


def quote(value: object) -> str:
    """Quotes a text so that Hydra reads it verbatim, even a run folder named `micro_batches=4`."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(str(value), Quote.single).with_quotes()


def _convert(kind: Any, value: Any, key: str, keys: Sequence[str], list_length: int = 0) -> Any:
    """`value`, of the setting `key`, converted to `kind`. keys: what a typo may have meant; list_length: of the list
    that `value` is an item of, 1 if any length is allowed; 0 outside of lists."""
    if value == "???":
        raise InvalidValueError(key, value, f"a value is required; give {key}=...")
    converter = _CONVERTERS.get(get_origin(kind) or kind, _convert_group)
    return converter(kind, value, key, keys, list_length)


def _convert_annotated(kind: Any, value: Any, key: str, keys: Sequence[str], list_length: int) -> Any:
    number_type, bounds = get_args(kind)
    number = _convert(number_type, value, key, keys)
    _check_bounds(key, number, bounds, list_length)
    return number


def _convert_union(kind: Any, value: Any, key: str, keys: Sequence[str], _: int) -> Any:
    """Several groups, `X | None`, or a number or a word, `X | Literal[...] | None`."""
    if len(options := _group_types(kind)) > 1:
        return _convert(_choose_option(options, value), value, key, keys)
    present, *words = (option for option in get_args(kind) if option is not NoneType)
    if value is None or any(value in get_args(option) for option in words):
        return value
    if words and type(value) is str:
        known_words = ", ".join(map(format_value, get_args(words[0])))
        raise InvalidValueError(key, value, f"must be a number or {known_words}; for example {key}={known_words}")
    return _convert(present, value, key, keys)


def _convert_group(kind: Any, value: Any, key: str, keys: Sequence[str], _: int) -> Any:
    if not isinstance(value, dict):
        meant = suggest_nearest(key, _settings_accepting(None, keys), minimum=0.9)
        use = meant or f"; set one of them, e.g. {key}.{fields(kind)[0].name}=..."
        raise InvalidValueError(key, value, f"is a group of settings{use}")
    prefix = f"{key}." if key else ""
    hints = get_type_hints(kind, include_extras=True)
    for name, inner in value.items():
        if name not in hints:
            raise unknown_setting_error(f"{prefix}{name}", inner, keys)
    for field in fields(kind):
        if field.name not in value and field.default is MISSING:
            raise InputError(f"{prefix}{field.name}: the setting is missing; give {prefix}{field.name}=...")
    return kind(**{name: _convert(hints[name], inner, prefix + name, keys) for name, inner in value.items()})


def _convert_literal(kind: Any, value: Any, key: str, _keys: Sequence[str], list_length: int) -> Any:
    if any(type(value) is type(word) and value == word for word in get_args(kind)):
        return value
    words = [format_value(word) for word in get_args(kind)]
    meant = resolve_alias(key, format_value(value)) or f"{key}={f'[{words[0]}]' if list_length else words[0]}"
    raise InvalidValueError(key, value, f"must be one of {', '.join(words)}; for example {meant}")


def _convert_tuple(kind: Any, value: Any, key: str, keys: Sequence[str], _: int) -> Any:
    item_kind, *more = get_args(kind)
    length = None if more == [...] else 1 + len(more)
    items = value if isinstance(value, list) else [value] if length is None and _is_item(item_kind, value) else None
    if items is not None and length in (None, len(items)):
        return tuple(_convert(item_kind, item, key, keys, length or 1) for item in items)
    words = [str(word) for word in get_args(item_kind)] if get_origin(item_kind) is Literal else []
    example = words[:1] or ["1"] * (length or 2)
    if item_kind is str or format_value(value) in words:
        example = [format_value(value)]
    count = f" of {length}" if length else ""
    raise InvalidValueError(key, value, f"must be a list{count}; for example {key}=[{','.join(example)}]")


def _convert_plain(kind: Any, value: Any, key: str, *_: Any) -> Any:
    """A text, a number, true or false, or a dictionary of the user's."""
    wanted = {
        int: f"a whole number; for example {key}=4",
        float: f"a finite number; for example {key}=0.5",
        bool: f"true or false; for example {key}=true",
        str: f"a text; put it in quotes: {key}='\"{format_value(value)}\"'",
        dict: f"a group of settings; for example {key}={{NAME:VALUE}}",
    }
    plain = get_origin(kind) or kind
    if plain is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # false for NaN
        return float(value)
    if plain is float or type(value) is not plain:  # not isinstance: True is an int
        raise InvalidValueError(key, value, f"must be {wanted[plain]}")
    if plain is str and not is_one_line(value):
        why = "must be a text of one line that is not empty; give another, or remove it"
        raise InvalidValueError(key, value, why)
    return value


_CONVERTERS: dict[Any, Callable[..., Any]] = {  # origin of a type, or the type -> its converter; others are groups
    **dict.fromkeys((UnionType, Union), _convert_union),
    Annotated: _convert_annotated,
    Literal: _convert_literal,
    tuple: _convert_tuple,
    **dict.fromkeys((int, float, bool, str, dict), _convert_plain),
}


def _is_item(kind: Any, value: Any) -> bool:
    """Whether a single value, `logger=wandb`, may stand for the only item of a list, whose items are of type `kind`."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return type(value) in {int: (int,), float: (int, float), str: (str,)}.get(kind, (str,))


def _check_bounds(key: str, number: float, bounds: Range, list_length: int = 0) -> None:
    """Raises InvalidValueError for a number out of its bounds, perhaps in a list of length `list_length`."""
    above = number > bounds.maximum or (bounds.exclusive_max and number == bounds.maximum)
    if not above and number >= bounds.minimum:
        return
    lower = "above 0" if bounds.minimum == MIN_FLOAT else f"{bounds.minimum:.10g} or more"
    upper = f"{'below' if bounds.exclusive_max else 'at most'} {bounds.maximum:.10g}"
    use = bounds.suggest if bounds.suggest is not None else bounds.maximum if above else bounds.minimum
    why = f", {bounds.why}" if bounds.why else ""
    example = f"[{','.join([f'{use:.10g}'] * list_length)}]" if list_length > 1 else f"{use:.10g}"
    raise InvalidValueError(key, number, f"must be {lower} and {upper}{why}; use {key}={example}")


def bounds(group: Any, name: str) -> Range:
    """The bounds of the number `name` in a group of settings."""
    within: Range
    (within,) = get_type_hints(type(group), include_extras=True)[name].__metadata__
    return within


def _union_members(kind: Any) -> tuple[Any, ...]:
    """The members of a union type; for any other type, that type alone."""
    return get_args(kind) if get_origin(kind) in (UnionType, Union) else (kind,)


def _group_types(kind: Any) -> list[Any]:
    """The dataclasses that a setting's type allows: none for a plain value, several for a union of them."""
    return [option for option in _union_members(kind) if _is_group(option)]


def _choose_option(options: Sequence[Any], value: Any) -> Any:
    """The dataclass whose `name`, a Literal, allows the name in `value`; else, of the dataclasses with any text
    as `name`, whichever has most of the other settings."""
    given = value if isinstance(value, dict) else {}
    hints = {option: get_type_hints(option) for option in options}
    named = [option for option, hint in hints.items() if given.get("name") in get_args(hint["name"])]
    of_any_name = [option for option, hint in hints.items() if hint["name"] is str]
    return (named or sorted(of_any_name, key=lambda option: -len(hints[option].keys() & given)) or list(options))[0]


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and is_dataclass(kind)
