"""Runs to report, for the tests of `gpipe_cli.reporting`."""

import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from math import log as log_of
from pathlib import Path
from typing import Any

from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import configure

from gpipe_cli.planner.cost_model import StepCosts
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.process_layout import Layout
from gpipe_cli.planner.stage_memory import StageMemory
from gpipe_cli.reporting.plots.timeline_values import ACTIONS, TimelineView
from gpipe_cli.reporting.run.description import RunContext
from gpipe_cli.reporting.run.reporter import Reporter
from gpipe_cli.schedule.breakdown import Breakdown
from gpipe_cli.schedule.schedule import Action, Kind
from gpipe_cli.schedule.simulator import StageCost
from gpipe_cli.schedule.timeline import Event, EventKind, Span, Timeline
from gpipe_cli.training.events import DataFacts, Evaluated, Scores, StepDone, TrainingReady

MIB = 2**20
STEPS_PER_EPOCH = 4
SETTINGS = ("epochs=3", "partitions=2", "micro_batches=4", "batch_size=32", "recompute=except_last", "threads=1")
LANGUAGE_MODEL = ("model=transformer_lm", "dataset=python_docs")
TRANSLATION = ("model=transformer_nmt", "dataset=cldr", "batch_size=null", "batch_tokens=4096")


def description(*settings: str, **changes: Any) -> RunContext:
    """Two partitions on two GPUs, four micro-batches of eight samples, three epochs of four steps, no prediction."""
    config = configure(*SETTINGS, *settings)
    data = {
        "classification": DataFacts(1437, 360),
        "language_model": DataFacts(412, 46, vocabulary=2000, unigram_perplexity=312.0),
        "translation": DataFacts(160_123, 8_123, vocabulary=8000, languages=214, unigram_perplexity=312.0),
    }
    values: dict[str, Any] = {
        "config": config,
        "plan": plan("other_device", config=config),
        "spec": spec(lengths=() if config.task == "classification" else (128,)),
        "peak_flops_per_second": None,
        "peak_source": "the peak is not known",
    }
    ready = {"data": data[config.task], "notes": (), "first_step": 0, "steps_per_epoch": STEPS_PER_EPOCH}
    ready |= {key: changes.pop(key) for key in TrainingReady.__dataclass_fields__.keys() & changes}
    return RunContext(ready=TrainingReady(**ready), **(values | changes))


def spec(**changes: Any) -> PipelineSpec:
    """Two stages of three and two layers, in a process each."""
    unread = dict.fromkeys((field.name for field in fields(PipelineSpec)), None)
    values: dict[str, Any] = {
        "layer_names": (("stem", "normal_1", "normal_2"), ("normal_3", "classifier")),
        "parameters": (432_100, 812_300),
        "cost": (0.512, 0.488),
        "lengths": (),
        "precision": "float32",
        "compile": False,
    }
    devices = (changes.pop("devices", ("cuda:0", "cuda:1")),)
    rank_of_stage = tuple(changes.pop("rank_of_stage", (0, 1)))
    layout = Layout(
        devices, rank_of_stage, rank_of_stage, threads=1, concurrent_devices=2, is_local=True, torchrun=None
    )
    return PipelineSpec(**(unread | values | {"layout": layout} | changes))


class MadeUpPlan(Plan):
    """A plan without a model."""

    step_flops = 1e9
    step_samples = 32

    @property
    def step_tokens(self) -> int | None:
        return 4096 if self.config.text else None

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        return tuple(stage.activations_bytes for stage in self.memory)

    def saved_bytes_of(self, samples: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return self.saved_bytes


def plan(
    cost_source: Any = "timed_layers", layers: Sequence[tuple[float, float]] = ((0, 0),) * 5, **changes: Any
) -> Plan:
    """Of 60 ms a step, with these seconds of the forward and the backward of each layer."""
    seconds = tuple(StageCost(forward, forward, backward) for forward, backward in layers)
    unread = dict.fromkeys((field.name for field in fields(Plan)), None)
    values: dict[str, Any] = {
        "config": configure(*SETTINGS),
        "balance": (3, 2),
        "recomputed": (3, 3),
        "device_bytes": (MIB, MIB),
        "costs": StepCosts("measured layers", cost_source, seconds, (), (), ()),
        "step_seconds": 0.06,
        "breakdown": Breakdown(**shares(0.12)),
        "memory": (StageMemory(MIB, MIB, MIB, 2 * MIB, 0), StageMemory(0, 0, 0, 3 * MIB, 2**29 - 3 * MIB)),
    }
    return MadeUpPlan(**(unread | values | changes))


def step(number: int, text: bool = False, **changes: Any) -> StepDone:
    """The message of step `number`, counted from 1; 32 samples in 62.5 ms, of text 1,000 tokens."""
    message: dict[str, Any] = {
        "step": number,
        "epoch": (number - 1) // STEPS_PER_EPOCH + 1,
        "position": (number - 1) % STEPS_PER_EPOCH + 1,
        "samples": 32,
        "tokens": 1000 if text else None,
        "seconds": 0.0625,
        "loss": 3.0 - number / 10,
        "cross_entropy": 2.0 - number / 10,
        "top1": 0.25,
        "top5": None if text else 0.75,
        "epoch_cross_entropy": 2.25 - number / 10,
        "epoch_top1": 0.375,
        "learning_rate": 0.04,
        "gradient_norm": 1.5,
        "lengths": (),
        "memory_bytes": (3 * 2**20, 2**29),
        "cpu_starved_share": (0.01, 0.02),
        "activation_bytes": None,
        "overhead_bytes": None,
    }
    return StepDone(**(message | changes))


def shares(bubble: float) -> dict[str, float]:
    """A breakdown with so much bubble; what is left of 1 is compute."""
    small = {"recompute": 0.2, "bubble": bubble, "imbalance": 0.03, "transfer": 0.01, "update": 0.02, "set_up": 0.04}
    return {"compute": 1 - sum(small.values()), **small}


def evaluation(number: int, text: bool = False, **changes: Any) -> Evaluated:
    """The message of an evaluation after step `number`; of text 5,000 tokens, perplexity 41.3."""
    classified = {"tokens": None, "loss": 1.25, "top1": 0.875, "top5": 1.0, "averaged": False}
    read = {"tokens": 5000, "loss": log_of(41.3), "top1": 0.312, "top5": None, "averaged": False}
    scores = read if text else classified
    values: dict[str, Any] = {
        "step": number,
        "epoch": (number - 1) // STEPS_PER_EPOCH + 1,
        "scores": Scores(**{key: changes.pop(key, value) for key, value in scores.items()}),
        "split": "test",
        "is_best": True,
        "translations": (),
    }
    return Evaluated(**(values | changes))


def timeline(second: float = 0.01, **changes: Any) -> TimelineView:
    """Two stages, two micro-batches, `except_last`, in units of `second` seconds; the step takes 13 of them.

    stage 0 | F0 F1 .. .. .. .. B1 B1 R0 B0 B0 up up
    stage 1 | .. tr F0 F1 B1 B1 R0 B0 B0 .. .. up up
    """
    first = "F 0 0 1, F 1 1 2, waiting 1 2 6, B 1 6 8, R 0 8 9, B 0 9 11, update - 11 13"
    last = "waiting 0 0 1, transfer 0 1 2, F 0 2 3, F 1 3 4, B 1 4 6, R 0 6 7, B 0 7 9, update - 11 13"

    def pieces(stage: int, row: str) -> Iterator[Span | Event]:
        for what, micro_batch, start, end in map(str.split, row.split(", ")):
            times = int(start) * second, int(end) * second
            if what in ACTIONS:
                yield Span(Action(Kind(what), stage, int(micro_batch)), *times)
            else:
                yield Event(
                    EventKind(what), *times, None if micro_batch == "-" else Action(Kind.F, stage, int(micro_batch))
                )

    rows = [[*pieces(stage, row)] for stage, row in enumerate((first, last))]
    spans, events = (
        tuple(tuple(piece for piece in row if isinstance(piece, kind)) for row in rows) for kind in (Span, Event)
    )
    values: dict[str, Any] = {
        "title": "epoch 1, step 4",
        "kind": "measured",
        "timeline": Timeline(spans, events),
        "begin_seconds": 0.0,
        "step_seconds": 13 * second,
        "breakdown": shares(0.15),
    }
    return TimelineView(**(values | changes))


def log(**options: Any) -> tuple[Console, io.StringIO]:
    """A console of 80 columns that is a file, or with `force_terminal=True` a terminal, and what it shows."""
    file = io.StringIO()
    defaults: dict[str, Any] = {"file": file, "width": 80, "force_terminal": False, "color_system": None}
    return Console(**(defaults | options)), file


def reporter_in(folder: Path, *settings: str, **changes: Any) -> tuple[Reporter, io.StringIO]:
    """The reporter of a run as `description` makes it, and what its console shows."""
    console, file = log()
    reporter = Reporter(folder, lambda ready: description(*settings, **changes), console)
    reporter.on_message(TrainingReady(DataFacts(), (), 0, STEPS_PER_EPOCH))
    return reporter, file


def page_data(folder: Path) -> dict[str, Any]:
    """What pipeline.html of a run was given, as its script reads it."""
    text = (folder / "pipeline.html").read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def events(folder: Path) -> EventAccumulator:
    """What TensorBoard reads of a run."""
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator
