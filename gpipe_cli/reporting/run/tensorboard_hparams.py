"""The settings of runs for TensorBoard's tab HParams: the sweeps over K and M of the paper's tables 2, 3 and 5.

Three summaries in the run's own events (`SummaryWriter.add_hparams` would write a second run beside it): the settings
when the run begins, its status when it ends, and the columns of the table. TensorBoard takes the columns from the run
that it reads first, so every run lists those of all models and tasks; without them each curve would be a metric.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import show
from gpipe_cli.reporting.run.description import Status
from gpipe_cli.reporting.run.result import flattened

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

Value = bool | float | str

SHOWN_AT_FIRST = 5  # columns of settings; TensorBoard has boxes to tick for the others
# What fills them up behind the settings that a sweep varies.
_USUAL = ("model.name", "partitions", "micro_batches", "dataset.name", "batch_size")
# How TensorBoard calls the types of a Value: of a column, and of a cell.
_TYPES = {bool: "DATA_TYPE_BOOL", float: "DATA_TYPE_FLOAT64", str: "DATA_TYPE_STRING"}
_FIELDS = {bool: "bool_value", float: "number_value", str: "string_value"}


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Value]:
    """The configuration without levels, `model.filters`: numbers and switches as they are, all else as text. What is
    null is left out: TensorBoard cannot sort a column that has text beside numbers."""
    known = flattened(config, whole=all_settings())  # the free arguments of a custom model are one setting
    return {key: _plain(value) for key, value in known if value is not None}


@cache
def all_settings() -> dict[str, list[Any]]:
    """Every setting that some run may have, with its types in the choices of its group."""
    found: dict[str, list[Any]] = {}

    def collect(kind: type, prefix: str) -> None:
        for name, hint in get_type_hints(kind).items():
            for option in get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,):
                if isinstance(option, type) and is_dataclass(option):
                    collect(option, f"{prefix}{name}.")
                else:
                    found.setdefault(f"{prefix}{name}", []).append(option)

    collect(TrainConfig, "")
    return found


def varied_by(folder: Path, keys: Collection[str]) -> tuple[str, ...]:
    """The settings that a sweep varies: it names the folders of its runs by them, `micro_batches=4,model=resnet`."""
    named = re.findall(r"(?:^|,)[+~]*([\w.]+)=", folder.name)
    return tuple(key for name in named for key in (name, f"{name}.name") if key in keys)


def experiment_summary(values: Mapping[str, Value], varied: Sequence[str], metrics: Sequence[str]) -> "Summary":
    """The columns of the table: all settings, and the tags ``metrics``."""
    from tensorboard.plugins.hparams import api_pb2, metadata

    first = list(dict.fromkeys((*varied, *_USUAL)))[:SHOWN_AT_FIRST]
    experiment = api_pb2.Experiment()
    for key, hints in all_settings().items():
        # A number that may be null: where a sweep varies it, its axis is one of numbers.
        kind = type(values[key]) if key in varied else _type_of(hints)
        info = experiment.hparam_infos.add(name=key, type=_TYPES[kind], differs=key in first)
        info.domain_discrete.extend((False, True) if kind is bool else _choices(hints))
    for tag in metrics:
        experiment.metric_infos.add(name=api_pb2.MetricName(tag=tag))
    return _summary(metadata.EXPERIMENT_TAG, experiment=experiment)


def start_summary(values: Mapping[str, Value], at_seconds: float) -> "Summary":
    """The settings of a run that begins, at a time in seconds since 1970."""
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=at_seconds)
    for key, value in values.items():
        setattr(start.hparams[key], _FIELDS[type(value)], value)
    return _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def end_summary(status: Status, at_seconds: float) -> "Summary":
    """How a run ended, at a time in seconds since 1970."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    # TensorBoard has no word for one that was interrupted: it can go on, as one that was killed.
    words = {"completed": "SUCCESS", "dry_run": "SUCCESS", "failed": "FAILURE", "running": "RUNNING"}
    number = api_pb2.Status.Value(f"STATUS_{words.get(status, 'UNKNOWN')}")
    end = plugin_data_pb2.SessionEndInfo(status=number, end_time_secs=at_seconds)
    return _summary(metadata.SESSION_END_INFO_TAG, session_end_info=end)


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


def _type_of(hints: Sequence[Any]) -> type[Value]:
    """Of a column: text is also what may be null, a list or one of several kinds."""
    if all(hint is bool for hint in hints):
        return bool
    return float if all(hint in (int, float) for hint in hints) else str


def _choices(hints: Sequence[Any]) -> list[str]:
    """Of a setting that can be nothing else; none of all others."""
    if any(get_origin(hint) is not Literal and hint is not NoneType for hint in hints):
        return []
    words = (word for hint in hints for word in (("null",) if hint is NoneType else get_args(hint)))
    return list(dict.fromkeys(words))
