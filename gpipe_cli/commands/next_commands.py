"""The commands to propose after a training: the same training with another setting, and the proof that partitions
change nothing. Both are made of what the user typed."""

import shlex
from collections.abc import Callable, Collection, Iterable, Sequence

from gpipe_cli.config.settings import AUTO, AUTO_BATCH, PER_INVOCATION, RESUME_AUTO, TrainConfig, key_of

_BEGINS = f"resume={RESUME_AUTO}"
_MIN_SAMPLES = 2  # of a micro-batch: batch norm cannot train on a single value per channel
# settings and groups for the old K only
_K_SETTINGS = ("partitions", "partition", "placement", "stages_per_process")
# Settings without a meaning for a check, which runs a mini-batch in its own folder; it refuses some of them.
_NOT_REPEATED = ("epochs", *(key for key in PER_INVOCATION if key != "output"))


def next_commands(
    starts: Sequence[Sequence[str]], config: TrainConfig, layers: int, train_samples: int
) -> tuple[tuple[str, str], ...]:
    """Label and text of each command. `starts`: the arguments of `gpipe train` at each start of the run; `config`: with
    the values chosen for `auto`. Empty for a run whose first start is not known, or was that of a sweep."""
    typed: dict[str, str] = {}
    by_key = [{key_of(argument): argument for argument in start} for start in starts]
    if by_key[0].get("resume", _BEGINS) != _BEGINS or {"-m", "--multirun"} & by_key[0].keys():
        return ()
    for given in by_key:
        left_out = {*PER_INVOCATION, *(["partition.balance"] if "partitions" in given else [])}
        typed = {key: argument for key, argument in typed.items() if key not in left_out} | given
    commands = [("prove", _command("check", typed.values(), _NOT_REPEATED, lambda key: _chosen_number(key, config)))]
    if (changed := _suggest_change(config, layers, train_samples)) is not None:
        setting, dropped = changed
        kept = _command("train", typed.values(), (*dropped, "resume", "run_folder"), lambda key: "")
        commands.insert(0, ("change", f"{kept} {setting}"))
    return tuple(commands)


def _suggest_change(config: TrainConfig, layers: int, train_samples: int) -> tuple[str, Collection[str]] | None:
    """A setting with a visible effect, and the typed settings that it replaces: twice as many micro-batches, which
    halves the bubble; or a pipeline instead of none, and the reverse. None for a single layer."""
    if config.partitions == 1:
        return ("partitions=2", _K_SETTINGS) if layers > 1 else None
    doubled = 2 * config.micro_batches
    if config.batch_size is not None and not config.schedule_is_file:
        last_samples = 0 if config.dataset.drop_last else train_samples % config.batch_size
        if doubled * config.replicas * _MIN_SAMPLES <= (last_samples or config.batch_size):
            return f"micro_batches={doubled}", ("micro_batches",)
    return "partitions=1", (*_K_SETTINGS, "schedule")


def _command(command: str, typed: Iterable[str], dropped: Collection[str], format_setting: Callable[[str], str]) -> str:
    """The command with the typed arguments but those in `dropped`, settings or whole groups. `format_setting`: the
    value of a setting that takes the place of `auto`; "" leaves it."""
    arguments = []
    for argument in typed:
        key, _, value = argument.partition("=")
        if key_of(argument).partition(".")[0] not in dropped:
            number = format_setting(key_of(argument)) if value == "auto" else ""
            arguments.append(f"{key}={number}" if number else argument)
    return shlex.join(["gpipe", command, *arguments])


def _chosen_number(key: str, config: TrainConfig) -> str:
    """The number that was chosen for a setting; "" if `auto` is not a number there."""
    return str(getattr(config, key)) if key in (*AUTO, *AUTO_BATCH) else ""
