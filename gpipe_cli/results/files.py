"""Reads and writes result.json, the outcome of a run, for programs (sweeps, comparisons, the tables of the paper).

The file is written atomically: a reader finds complete JSON during the run, and after it was killed.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpipe_cli.errors import InputError
from gpipe_cli.system.files import read_json, write_atomic

RESULT_FILE = "result.json"


def write_result(folder: Path, result: Mapping[str, Any], name: str = RESULT_FILE) -> None:
    """Writes `result` to ``folder / name`` in the format of `as_json`. Raises OSError if it cannot be written."""
    write_atomic(folder / name, as_json(result))


def as_json(value: Any) -> str:
    """`value` as an indented JSON document, its numbers with all digits; NaN and infinities become null."""
    return json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"


def read_result(folder: Path, name: str = RESULT_FILE) -> dict[str, Any]:
    """What `write_result` wrote. Raises OSError if it cannot be read, and InputError if it is not a JSON object."""
    path = folder / name
    try:
        result = read_json(path)
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); remove it, or run again into a new folder") from error
    if not isinstance(result, dict):
        raise InputError(f"{path}: must be a JSON object, is {type(result).__name__}; run again into a new folder")
    return result


def _plain(value: Any) -> Any:
    """`value` in types of JSON, whose standard has no NaN: strict readers refuse Python's."""
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
