"""Parses the arguments of commands without Hydra: words, such as folders, and settings, such as `format=json`."""

import os
from collections.abc import Sequence

from gpipe_cli.config.did_you_mean import suggest_nearest
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.reporting.tables.table import FORMATS


def split_arguments(arguments: Sequence[str], *keys: str) -> tuple[list[str], dict[str, str]]:
    """The words among the arguments, and the settings in `keys` with their values; `format` has a default.

    Any other argument is a word, such as `micro_batches=4`, the folder of a sweep's run. Raises InputError for an empty
    argument, an unknown `format`, and a misspelt key.
    """
    divided = [argument.partition("=") for argument in arguments]
    given = {key: value for key, equals, value in divided if equals and key in keys}
    words = [argument for argument in arguments if "=" not in argument or argument.partition("=")[0] not in keys]
    if "" in words:  # Path("") is the working directory
        raise InputError("'': must not be empty; give a name, or remove it")
    for key in (key for key, value in given.items() if not value):
        raise InvalidSettingError(key, "", f"must not be empty; give {key}=..., or remove it")
    for key, equals, value in (word.partition("=") for word in words if not os.path.exists(word)):
        if equals and (near := suggest_nearest(key, keys)):
            raise InvalidSettingError(key, value, f"no such setting{near}")
    if (form := given.setdefault("format", FORMATS[0])) not in FORMATS:
        raise InvalidSettingError("format", form, f"must be one of {', '.join(FORMATS)}; for example format=json")
    return words, given
