"""Settings that one command has beside those of a training, and which command that is.

A recipe is one file for `gpipe bench`, `gpipe plan` and `gpipe train`, so that all three run the same job.
"""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from gpipe_cli.config.typed import Within


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What `conf/bench.yaml` adds to the settings of a training."""

    warm_up_steps: Annotated[int, Within(0, 1_000_000)]
    steps: Annotated[int, Within(1, 1_000_000)]
    rounds: Annotated[int, Within(1, 1000)]


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What `conf/plan.yaml` adds to the settings of a training."""

    solve: Literal["max_model"] | None


# Key, and the command that reads it; the other commands ignore it in a recipe's file and refuse it on the command line.
OWNERS = {
    "recipe": "reproduce",
    **{field.name: "plan" for field in fields(PlanSettings)},
    **{field.name: "bench" for field in fields(BenchSettings)},
}


def key_of(setting: str) -> str:
    """`model.filters` of `++model.filters=16`."""
    return setting.lstrip("+~").partition("=")[0]


def owner(setting: str) -> str | None:
    """The command that `setting`, `steps=5`, belongs to; None: to several."""
    return OWNERS.get(key_of(setting))
