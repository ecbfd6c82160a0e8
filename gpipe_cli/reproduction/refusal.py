"""What a command of a recipe refuses, told to somebody who has typed few of its settings."""

import re
from collections.abc import Sequence

from gpipe_cli.config.owners import key_of

_REMEDY = "; leave it out"


def explained(message: str, users: Sequence[str], desk: Sequence[str], own: Sequence[str]) -> str:
    """The refusal of a setting, and that it is the recipe's if the user has not given it.

    Args:
        message: `model.variant=d: the chosen model has no such setting; leave it out`.
        users: settings of the user.
        desk: those of the recipe at its scale.
        own: keys of all others that the command had: of the recipe's file, and of a row of its table.
    """
    found = re.match(r"([\w.]+)=", message)
    if found is None or found[1] in map(key_of, users):
        return message
    key = found[1]
    if key in map(key_of, desk):
        place = "a setting of this recipe at desk scale"
    elif key in own:
        place = "a setting of this recipe"
    else:
        return message
    group = next((one for one in users if key_of(one) == key.partition(".")[0]), None)
    if group is None:
        return f"{message} ({place})"
    return f"{message.removesuffix(_REMEDY)} ({place}, which {group} does not go with)"
