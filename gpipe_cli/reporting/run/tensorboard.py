"""The TensorBoard events of a run: every tag but those of pictures is in this file.

One writer per run, in the parent process. Steps count those done; accuracies are shares, 0 to 1.
"""

import html
import io
import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.plots.timeline_values import SHARES, idle
from gpipe_cli.reporting.run.description import (
    RunDescription,
    Status,
    Value,
    all_settings,
    hyperparameters,
    scores_of,
    words_of,
)
from gpipe_cli.reporting.run.measurement import stages_named, stages_together
from gpipe_cli.reporting.run.trackers import AllEvents, trackers
from gpipe_cli.reporting.tables.table import Column, Table, to_markdown
from gpipe_cli.system.files import naming, write_whole
from gpipe_cli.training.events import Evaluated, Scores, StepDone, Translation
from gpipe_cli.units import GIB

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

# Tags that other files read. In train/ and test/ stand the scores of a training and of the test set by the names of
# result.json; in idle/, bubble/ and step/ shares of the stage-time of a step.
TRAIN_LOSS = "train/loss"  # what is minimized; train/cross_entropy is comparable with test/loss
TEST_LOSS = "test/loss"
TEST_TOP1 = "test/top1"
TEST_PERPLEXITY = "test/perplexity"  # of the cross-entropy
SAMPLES_PER_SECOND = "speed/samples_per_second"
TOKENS_PER_SECOND = "speed/tokens_per_second"
FULLEST = "memory/fullest_gib"  # the peak of the process that has most; memory_parts/ tells what each peak is made of
# What became of a run, once, beside its settings. HParams shows the first five of a task at first, and as parallel
# coordinates only runs that have all of what is shown. The memory is that of the fullest stage.
_OF_ALL = ("step_seconds", "bubble", "memory_gib", "loss")
FINAL_OF_IMAGES = ("top1", "samples_per_second", *_OF_ALL, "top5")
FINAL_OF_TEXT = ("perplexity", "tokens_per_second", *_OF_ALL, "token_accuracy")

FLUSH_SECONDS = 10.0  # a run that is killed loses no more than this
_numbers = count()  # of the files of this process, whose names differ in nothing else within a second

SHOWN_AT_FIRST = 5  # columns of settings; TensorBoard has boxes to tick for the others
# What fills them up behind the settings that a sweep varies.
_USUAL = ("model.name", "partitions", "micro_batches", "dataset.name", "batch_size")
# How TensorBoard calls what a column and a cell hold.
_TYPES = {bool: "DATA_TYPE_BOOL", str: "DATA_TYPE_STRING"}
_FIELDS = {bool: "bool_value", str: "string_value"}
_WHOLE = 10  # digits before the point: settings have no more


class Dashboard:
    """Writes events of a run to ``folder``.

    Every method raises OSError where events cannot be written; they are written later, if they can be then.
    """

    def __init__(self, folder: Path, run: RunDescription) -> None:
        from torch.utils.tensorboard import summary  # imports torch, which readers of the tags do not need

        self._summary = summary
        self._folder, self._run = folder, run
        # a resumed run repeats the steps after its checkpoint
        files = [EventFile(folder, run.first_step + 1)] if "tensorboard" in run.config.logger else []
        self._events = AllEvents([*files, *trackers(folder, run)])
        self._constants: dict[str, float] = {}  # level lines

    def describe(self, config_yaml: str, banner: str) -> None:
        """Puts the configuration and the banner beside the curves."""
        for tag, words in (("config", config_yaml), ("banner", banner)):
            # Four blanks are Markdown for text that stays as it is.
            indented = "\n".join(f"    {line}" for line in words.splitlines())
            self._events.add(self._summary.text(tag, indented), self._run.first_step)
        self._events.flush()

    def begin(self) -> None:
        """The settings, in the tab HParams from now on: a run that is killed is there with them. And what measured
        curves are compared with: level lines beside them, and charts in the tab Custom Scalars."""
        run, text = self._run, words_of(self._run.config.task).text
        forget(self._folder)  # those of a run that is resumed into its own folder
        values = hyperparameters(run.config)
        own, others = (FINAL_OF_TEXT, FINAL_OF_IMAGES) if text else (FINAL_OF_IMAGES, FINAL_OF_TEXT)
        metrics = [f"final/{name}" for name in dict.fromkeys((*own, *others))]
        for summary in start_summaries(values, varied_by(self._folder, values), metrics):
            self._events.add(summary)
        self._constants = {"bubble/ideal": run.ideal_bubble}
        if (plan := run.prediction) is not None:
            shares = asdict(plan.breakdown)
            self._constants["idle/predicted"] = idle(shares)
            self._constants["bubble/predicted"] = shares["bubble"]
        self._events.add(self._summary.custom_scalars(_layout(text, run.prediction is not None)))
        self._events.flush()

    def end(self, status: Status, step: int, result: Mapping[str, Any]) -> None:
        """What became of the run, beside its settings; ``result`` is that of result.json."""
        self._draw(step, _final(result))
        self._events.add(end_summary(status))
        self._events.flush()

    def step(self, message: StepDone) -> None:
        """The curves of training; what is None is left out."""
        scores = Scores(message.tokens, message.cross_entropy, message.top1, message.top5, averaged=False)
        named = {f"train/{name}": value for name, value in scores_of(self._run.config.task, scores).items()}
        whole = message.samples == (self._run.config.batch_size or message.samples)  # the last of an epoch may be short
        if (plan := self._run.prediction) is not None and whole:
            named["speed/step_over_predicted"] = message.seconds / plan.step_seconds
        self._draw(message.step, named | _training(message) | _memory(message, self._run.placement.device_of_stage))

    def recorded(self, step: int, breakdown: Mapping[str, float]) -> None:
        shares = {f"step/{share}": value for share, value in breakdown.items()}
        measured = {"idle/measured": idle(breakdown), "bubble/measured": breakdown["bubble"]}
        self._draw(step, measured | shares | self._constants)

    def memory(self, step: int, processes: Sequence[Mapping[str, Any]]) -> None:
        """What the peak of each process is made of, as result.json has it; the parts add up to it."""
        for process in processes:
            parts = {part: size / GIB for part, size in process.items() if part != "stage"}
            name = "all_stages" if process["stage"] is None else f"stage_{process['stage']}"
            self._draw(step, {f"memory_parts/{name}_{part}_gib": size for part, size in parts.items()})

    def evaluated(self, message: Evaluated) -> None:
        """The curves of the test set, and what was translated of it."""
        scores = scores_of(self._run.config.task, message.scores)
        self._draw(message.step, {f"test/{name}": value for name, value in scores.items()})
        if message.translations:
            self._events.add(self._summary.text("translations", _translation_table(message.translations)), message.step)
        self._events.flush()

    def picture(self, name: str, step: int, picture: "NDArray[np.uint8]") -> None:
        """An image of shape (height, width, 3). All are of one group, as TensorBoard opens only the first two."""
        self._events.add(self._summary.image(f"pictures/{name}", picture, dataformats="HWC"), step)
        self._events.flush()

    def flush(self) -> None:
        self._events.flush()

    def _draw(self, step: int, points: Mapping[str, float | None]) -> None:
        for tag, value in points.items():
            if value is not None:
                self._events.add(self._summary.scalar(tag, value), step)


def _training(message: StepDone) -> dict[str, float | None]:
    return {
        TRAIN_LOSS: message.loss,
        "train/cross_entropy": message.cross_entropy,
        "train/learning_rate": message.learning_rate,
        "train/gradient_norm": message.gradient_norm,
        SAMPLES_PER_SECOND: message.samples / message.seconds,
        TOKENS_PER_SECOND: None if message.tokens is None else message.tokens / message.seconds,
        "speed/step_seconds": message.seconds,
    }


def _memory(message: StepDone, device_of_stage: Sequence[int]) -> dict[str, float | None]:
    """The peaks; stages that share a device, or a process on a CPU, share one curve."""
    if not message.memory_bytes:
        return {}
    of_stages = {
        f"memory/stage{'s' * (len(k) > 1)}_{stages_named(k)}_gib": message.memory_bytes[k[0]] / GIB
        for k in stages_together(device_of_stage)
    }
    return {FULLEST: max(message.memory_bytes) / GIB, **of_stages}


def _final(result: Mapping[str, Any]) -> dict[str, float | None]:
    found = {
        **(result["test"] or {}),
        **result,
        "bubble": result["bubble"]["measured"],
        "memory_gib": max(result["memory_bytes"], default=0) / GIB or None,
    }
    return {f"final/{name}": found.get(name) for name in (*FINAL_OF_IMAGES, *FINAL_OF_TEXT)}


def _layout(text: bool, predicted: bool) -> dict[str, dict[str, list[Any]]]:
    """The tab Custom Scalars: its charts show all runs that are ticked.

    TensorBoard has a colour for each run, so every chart has one line for each, and what belongs to that line is a band
    around it. It merges the layouts of all runs by the titles of categories, and drops charts that are equal: so a
    chart does not depend on K, and runs of images and of text add to each other.
    """
    score, name = ("perplexity", "perplexity") if text else ("top1", "top-1")
    speed = ("tokens per second", TOKENS_PER_SECOND) if text else ("samples per second", SAMPLES_PER_SECOND)
    runs = [
        (f"{name} of the test set", f"test/{score}"),
        (f"{name} in training", f"train/{score}"),
        ("loss in training", TRAIN_LOSS),
        speed,
        ("peak memory of the fullest process, GiB", FULLEST),
    ]
    layout = {"runs side by side": {title: ["Multiline", [tag]] for title, tag in runs}}
    layout["where the time of a step goes, in shares"] = {
        share.replace("_", "-"): ["Multiline", [f"step/{share}"]] for share in SHARES
    }
    if predicted:
        idle = ["idle/measured", "idle/predicted", "idle/measured"]  # the line, and both edges of the band
        layout["measured and predicted"] = {
            "idle; band: to what was predicted": ["Margin", idle],
            "bubble; band: from ideal to predicted": [
                "Margin",
                ["bubble/measured", "bubble/ideal", "bubble/predicted"],
            ],
            "step: how many times as long as predicted": ["Multiline", ["speed/step_over_predicted"]],
        }
    return layout


def _translation_table(translations: Iterable[Translation]) -> str:
    """Sentences as a Markdown table; what Markdown or HTML would take for its own is shown as it is."""
    rows = ((shown.pair, shown.source, shown.reference, shown.translation) for shown in translations)
    headings = ("pair", "source", "reference", "translation")
    return to_markdown(Table.of_rows("", map(Column, headings), (list(map(_escaped, row)) for row in rows)))


def _escaped(text: str) -> str:
    one_line = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_{}\[\]])", r"\\\1", one_line)


class EventFile:
    """A new event file in ``folder``, made when the first events are written.

    torch's SummaryWriter gives events to a thread, which a disk that is full for a moment ends. Here an event that
    cannot be written waits, and is tried again.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """``first_step`` is the next one; of a run that is resumed, readers drop older events from there on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._path = folder / name
        self._waiting = bytearray()
        self._tried = 0.0
        self._add(Event(file_version="brain.Event:2"))
        self._add(Event(session_log=SessionLog(status=SessionLog.START)), first_step)

    def add(self, summary: "Summary", step: int | None = None) -> None:
        """Adds what is to be shown. Raises OSError if events have waited for FLUSH_SECONDS and cannot be written."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._add(Event(summary=summary), step)
        if time.monotonic() - self._tried >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Writes what waits. Raises OSError; then what is not written yet waits on."""
        self._tried = time.monotonic()
        with naming(self._path), self._path.open("ab", buffering=0) as file:
            while self._waiting:
                del self._waiting[: file.write(self._waiting)]

    def _add(self, event: "Event", step: int | None = None) -> None:
        event.wall_time = time.time()
        if step is not None:
            event.step = step
        self._waiting += record(event)


def record(event: "Event") -> bytes:
    """An event as it stands in a file, with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    file = io.BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()


# The settings of runs for the tab HParams: the sweeps over K and M of the paper's tables 2, 3 and 5. Three summaries in
# the run's own events (`SummaryWriter.add_hparams` would write a second run beside it): the settings when the run
# begins, its status when it ends, and the columns of the table. TensorBoard takes the columns from the run that it
# reads first, so every run lists those of all models and tasks; without them each curve would be a metric.


def varied_by(folder: Path, keys: Collection[str]) -> tuple[str, ...]:
    """The settings that a sweep varies: it names the folders of its runs by them, `micro_batches=4,model=resnet`."""
    named = re.findall(r"(?:^|,)[+~]*([\w.]+)=", folder.name)
    return tuple(key for name in named for key in (name, f"{name}.name") if key in keys)


def start_summaries(
    values: Mapping[str, Value], varied: Sequence[str], metrics: Sequence[str]
) -> tuple["Summary", "Summary"]:
    """The columns of the table, all settings and the tags ``metrics``; and the settings of a run that begins."""
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    first = list(dict.fromkeys((*varied, *_USUAL)))[:SHOWN_AT_FIRST]
    experiment = api_pb2.Experiment()
    for key, hints in all_settings().items():
        kind = _type_of(hints)
        info = experiment.hparam_infos.add(name=key, type=_TYPES[kind], differs=key in first)
        info.domain_discrete.extend((False, True) if kind is bool else ())
    for tag in metrics:
        experiment.metric_infos.add(name=api_pb2.MetricName(tag=tag))
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for key, value in values.items():
        shown = _text(value)
        setattr(start.hparams[key], _FIELDS[type(shown)], shown)
    return (
        _summary(metadata.EXPERIMENT_TAG, experiment=experiment),
        _summary(metadata.SESSION_START_INFO_TAG, session_start_info=start),
    )


def end_summary(status: Status) -> "Summary":
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    # TensorBoard has no word for one that was interrupted: it can go on, as one that was killed.
    words = {"completed": "SUCCESS", "dry_run": "SUCCESS", "failed": "FAILURE", "running": "RUNNING"}
    number = api_pb2.Status.Value(f"STATUS_{words.get(status, 'UNKNOWN')}")
    end = plugin_data_pb2.SessionEndInfo(status=number, end_time_secs=time.time())
    return _summary(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _summary(tag: str, **data: Any) -> "Summary":
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    described = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    return Summary(value=[Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)])


def _text(value: bool | int | float | str) -> bool | str:
    """As it was typed, but for switches. TensorBoard would show a number with five digits, K = 4 as 4.0000; of texts it
    shows all, without the blanks that they begin with, but sorts them by their characters. So the points of numbers
    stand one below the other, and no number has an exponent: then both orders are the same."""
    if isinstance(value, str | bool):
        return value
    whole, point, fraction = f"{Decimal(repr(value)):f}".removesuffix(".0").partition(".")
    return f"{whole:>{_WHOLE}}{point}{fraction}"


def _type_of(hints: Sequence[Any]) -> type[bool | str]:
    """Of a column."""
    return bool if all(hint is bool for hint in hints) else str


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
