"""The settings of runs for TensorBoard's tab HParams: the sweeps over K and M of the paper's tables 2, 3 and 5.

Three summaries in the run's own events (`SummaryWriter.add_hparams` would write a second run beside it): the settings
when the run begins, its status when it ends, and the columns of the table. TensorBoard takes the columns from the run
that it reads first, so every run lists those of all: the settings of every model and data set, and the final metrics
of every task. Without such a list TensorBoard would take each curve of a run for a metric.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.run.description import Setting, Status
from gpipe_cli.reporting.run.result import flattened
from gpipe_cli.reporting.run.tensorboard_file import record
from gpipe_cli.system.files import write_whole

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

Value = bool | float | str

SHOWN_AT_FIRST = 5  # columns of settings; TensorBoard has boxes to tick for the others
# What fills them up behind the settings that a sweep varies.
_USUAL = ("model.name", "partitions", "micro_batches", "dataset.name", "batch_size")


def hyperparameters(config: Mapping[str, Any], settings: Sequence[Setting] = ()) -> dict[str, Value]:
    """The configuration without levels, `model.filters`: numbers and switches as they are, all else as text. What is
    null is left out: TensorBoard cannot sort a column that has text beside numbers.

    A key in ``settings`` is not taken apart further, as the free arguments of a custom model.
    """
    known = flattened(config, whole={setting.key for setting in settings})
    return {key: _plain(value) for key, value in known if value is not None}


@lru_cache
def settings_of(kind: type) -> tuple[Setting, ...]:
    """Every key that a configuration of the dataclass ``kind`` may have, with those of all its groups' choices."""
    found: dict[str, list[Any]] = {}
    _collect(kind, "", found)
    return tuple(_setting(key, hints) for key, hints in found.items())


def varied_by(folder: Path, keys: Iterable[str]) -> tuple[str, ...]:
    """The settings that a sweep varies: it names the folders of its runs by them, `micro_batches=4,model=resnet`."""
    named = re.findall(r"(?:^|,)[+~]*([\w.]+)=", folder.name)
    known = set(keys)
    return tuple(key for name in named for key in (name, f"{name}.name") if key in known)


def experiment_summary(
    values: Mapping[str, Value], settings: Sequence[Setting], varied: Sequence[str], metrics: Sequence[str]
) -> "Summary":
    """The columns of the table: all ``settings``, those of this run, and the tags ``metrics``."""
    from tensorboard.plugins.hparams import api_pb2, metadata

    types = {"number": api_pb2.DATA_TYPE_FLOAT64, "switch": api_pb2.DATA_TYPE_BOOL, "text": api_pb2.DATA_TYPE_STRING}
    known = {setting.key: setting for setting in settings}
    known |= {key: Setting(key, _kind_of(value)) for key, value in values.items() if key not in known}
    first = list(dict.fromkeys((*varied, *(key for key in _USUAL if key in known))))[:SHOWN_AT_FIRST]
    experiment = api_pb2.Experiment()
    for key, setting in known.items():
        # A number that may be null: where a sweep varies it, its axis is one of numbers.
        kind = _kind_of(values[key]) if key in varied and key in values else setting.kind
        info = experiment.hparam_infos.add(name=key, type=types[kind], differs=key in first)
        if kind == "switch":
            info.domain_discrete.extend((False, True))
        elif setting.choices:
            info.domain_discrete.extend(setting.choices)
    for tag in metrics:
        experiment.metric_infos.add(name=api_pb2.MetricName(tag=tag))
    return _summary(metadata.EXPERIMENT_TAG, experiment=experiment)


def start_summary(values: Mapping[str, Value], at_seconds: float) -> "Summary":
    """The settings of a run that begins, at a time in seconds since 1970."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=at_seconds)
    fields = {"switch": "bool_value", "text": "string_value", "number": "number_value"}
    for key, value in values.items():
        setattr(start.hparams[key], fields[_kind_of(value)], value)
    return _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def end_summary(status: Status, at_seconds: float) -> "Summary":
    """How a run ended, at a time in seconds since 1970."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    # TensorBoard has no word for one that was interrupted: it can go on, as one that was killed.
    words = {"completed": "SUCCESS", "dry_run": "SUCCESS", "failed": "FAILURE", "running": "RUNNING"}
    number = api_pb2.Status.Value(f"STATUS_{words.get(status, 'UNKNOWN')}")
    end = plugin_data_pb2.SessionEndInfo(status=number, end_time_secs=at_seconds)
    return _summary(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def forget(folder: Path) -> None:
    """Removes the three summaries from the events in ``folder``; all else stays.

    TensorBoard keeps the first ones that it reads of a run. One that was resumed into its own folder, perhaps with
    another K, would always show the settings and the end of the run before it.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.plugins.hparams.metadata import PLUGIN_NAME

    for path in sorted(folder.glob("*tfevents*")):
        events = list(LegacyEventFileLoader(str(path)).Load())
        plugins = ({value.metadata.plugin_data.plugin_name for value in event.summary.value} for event in events)
        kept = [event for event, names in zip(events, plugins, strict=True) if PLUGIN_NAME not in names]
        if len(kept) < len(events):
            write_whole(path, b"".join(map(record, kept)))


def _summary(tag: str, **data: Any) -> "Summary":
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    described = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    return Summary(value=[Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)])


def _plain(value: Any) -> Value:
    match value:
        case bool():
            return value
        case int() | float():
            return float(value) if math.isfinite(value) else str(value)  # JSON has no others
        case _:
            return show(value)


def _kind_of(value: Value) -> Literal["number", "switch", "text"]:
    return "switch" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def _collect(kind: type, prefix: str, found: dict[str, list[Any]]) -> None:
    """Every key with the types that it has in the choices of its group."""
    for name, hint in get_type_hints(kind).items():
        options = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
        for option in options:
            if isinstance(option, type) and is_dataclass(option):
                _collect(option, f"{prefix}{name}.", found)
            else:
                found.setdefault(f"{prefix}{name}", []).append(option)


def _setting(key: str, hints: Sequence[Any]) -> Setting:
    if all(hint is bool for hint in hints):
        return Setting(key, "switch")
    if all(hint in (int, float) for hint in hints):
        return Setting(key, "number")
    if all(get_origin(hint) is Literal or hint is NoneType for hint in hints):
        words = [word for hint in hints for word in (("null",) if hint is NoneType else get_args(hint))]
        return Setting(key, "text", tuple(dict.fromkeys(words)))
    return Setting(key, "text")
