"""Which command a setting belongs to, where it is not one of the training itself.

A recipe is one file for `gpipe bench`, `gpipe plan` and `gpipe train`, so that all three speak of the same job.
"""

# Key, and the command that reads it; in a recipe's file the other commands leave it alone.
OWNERS = {"recipe": "reproduce", "solve": "plan", "warm_up_steps": "bench", "steps": "bench", "rounds": "bench"}


def key_of(setting: str) -> str:
    """`model.filters` of `++model.filters=16`."""
    return setting.lstrip("+~").partition("=")[0]


def owner(setting: str) -> str | None:
    """The command that `setting`, `steps=5`, belongs to; None: all that know it."""
    return OWNERS.get(key_of(setting))
