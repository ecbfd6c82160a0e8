"""The commands to propose after a training: the same training with another setting, and the proof that partitions
change nothing. Both are made of what the user typed."""

import shlex
from collections.abc import Callable, Collection, Sequence

from gpipe_cli.config.settings import AUTO, AUTO_BATCH, GO_ON, OF_INVOCATION, TrainConfig, key_of

_MIN_SAMPLES = 2  # of a micro-batch: batch norm cannot train on a single value per channel
_OF_K = ("partitions", "partition", "placement", "stages_per_process")  # settings and groups for the old K only
# Settings without a meaning for a check, which runs a mini-batch in a folder of its own; it refuses some of them.
_OF_RUN = ("epochs", *(key for key in OF_INVOCATION if key != "output"))


def next_commands(
    typed: Sequence[str], config: TrainConfig, layers: int, train_samples: int
) -> tuple[tuple[str, str], ...]:
    """Label and text of each command. `typed`: the arguments of `gpipe train`; `config`: with the values chosen for
    `auto`. Empty for a run that was resumed by its folder, as most of its settings are not typed."""
    given = {key_of(argument): argument.partition("=")[2] for argument in typed}
    if given.get("resume", GO_ON) != GO_ON:
        return ()
    commands = [("prove", _command("check", typed, _OF_RUN, lambda key: _number(key, config)))]
    if (changed := _changed(config, layers, train_samples)) is not None:
        setting, dropped = changed
        kept = _command("train", typed, (*dropped, "resume", "run_folder"), lambda key: "")
        commands.insert(0, ("change", f"{kept} {setting}"))
    return tuple(commands)


def _changed(config: TrainConfig, layers: int, train_samples: int) -> tuple[str, Collection[str]] | None:
    """A setting with a visible effect, and the typed settings that it replaces: twice as many micro-batches, which
    halves the bubble; or a pipeline in place of none, and the reverse. None for a single layer."""
    if config.partitions == 1:
        return ("partitions=2", _OF_K) if layers > 1 else None
    doubled = 2 * config.micro_batches
    if config.batch_size is not None and not config.schedule_is_file:
        last_samples = 0 if config.dataset.drop_last else train_samples % config.batch_size
        if doubled * config.replicas * _MIN_SAMPLES <= (last_samples or config.batch_size):
            return f"micro_batches={doubled}", ("micro_batches",)
    return "partitions=1", (*_OF_K, "schedule")


def _command(command: str, typed: Sequence[str], dropped: Collection[str], valued: Callable[[str], str]) -> str:
    """The command with the typed arguments but those in `dropped`, settings or whole groups. `valued`: the value of a
    setting that takes the place of `auto`; "" leaves it."""
    arguments = []
    for argument in typed:
        key, _, value = argument.partition("=")
        if key_of(argument).partition(".")[0] not in dropped:
            number = valued(key_of(argument)) if value == "auto" else ""
            arguments.append(f"{key}={number}" if number else argument)
    return shlex.join(["gpipe", command, *arguments])


def _number(key: str, config: TrainConfig) -> str:
    """The number that was chosen for a setting; "" if `auto` is no number there."""
    return str(getattr(config, key)) if key in (*AUTO, *AUTO_BATCH) else ""
