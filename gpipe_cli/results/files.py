"""result.json: what became of a run, for programs (sweeps, comparisons, the tables of the paper).

It is written whole or not at all, so that whoever reads it while the run goes on, or after it was killed, finds JSON.
"""

import json
import math
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.errors import InputError
from gpipe_cli.system.files import read_json, write_whole

RESULT = "result.json"


def write_result(folder: Path, result: Mapping[str, Any], name: str = RESULT) -> None:
    """Writes it to ``folder / name``, as `as_json`. Raises OSError if it cannot be written."""
    write_whole(folder / name, as_json(result))


def as_json(value: Any) -> str:
    """A document with all digits of its numbers; NaN and infinities become null."""
    return json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"


def read_result(folder: Path, name: str = RESULT) -> dict[str, Any]:
    """What ``write_result`` wrote. Raises FileNotFoundError, and InputError if it is not the JSON of a result."""
    path = folder / name
    try:
        result = read_json(path)
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); remove it, or run again into a new folder") from error
    if not isinstance(result, dict):
        raise InputError(f"{path}: must be a JSON object, is {type(result).__name__}; run again into a new folder")
    return result


def flattened(tree: Mapping[str, Any], prefix: str = "", whole: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested settings; an empty group stays a value, and so does one that is in ``whole``."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in whole:
            yield from flattened(value, f"{key}.", whole)
        else:
            yield key, value


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: the standard has no NaN, and strict readers refuse Python's."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Path():
            return str(value)
        case _:
            return value
