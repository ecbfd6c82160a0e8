"""What is known of a run before its first step: decisions, facts about the data, and the terms of its reports.

As in the paper, runs on images are judged by top-1 (section 4), runs on text by the loss per token (table 5).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from gpipe_cli.config.groups import DatasetConfig, ImagesConfig, model_name
from gpipe_cli.config.settings import TEXT_TASKS, Task, TrainConfig
from gpipe_cli.results.run import Evaluation, Restart, Start
from gpipe_cli.schedule.simulator import ideal_bubble
from gpipe_cli.training.events import Scores, TrainingReady

if TYPE_CHECKING:  # these modules import torch, which takes seconds; tables of runs do not need it
    from gpipe_cli.planner.pipeline_spec import PipelineSpec
    from gpipe_cli.planner.plan import Plan


WARM_UP_STEPS = 3  # the first steps of a training allocate memory and choose algorithms


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """All that is known of a run before its first step."""

    ready: TrainingReady  # with all notes of the banner
    config: TrainConfig
    plan: "Plan"
    spec: "PipelineSpec"
    peak_flops_per_second: float | None  # of all devices in use together; None if it is not known
    peak_source: str  # the source of the peak, or why it is not known
    bench: bool = False  # the run measures, and trains no model
    start: Start | None = None  # None: no command started the run
    restarts: tuple[Restart, ...] = ()  # restarts within this command
    warm_up_steps: int = WARM_UP_STEPS  # first steps, which do not count towards the speed
    simulation: Mapping[str, Any] = field(default_factory=dict)  # planner.simulation_data, for the page
    next_commands: tuple[tuple[str, str], ...] | None = None  # label, command; None: the summary shows none

    @property
    def model_name(self) -> str:
        return model_name(self.config.model)

    @property
    def layers(self) -> int:
        """L, the number of the model's layers."""
        return sum(map(len, self.spec.layer_names))

    @property
    def cost_shares(self) -> list[float | None]:
        """Each partition's fraction of the model's computation, 0 to 1; None if the model's cost is 0."""
        costs = self.spec.cost
        return [cost / sum(costs) if sum(costs) else None for cost in costs]

    @property
    def executor(self) -> str:
        return "distributed" if self.spec.layout.distributed else "in_process"

    @property
    def ideal_bubble(self) -> float:
        """(K-1)/(M+K-1) for K devices (section 2.3): a fraction of their time, 0 to 1."""
        return ideal_bubble(len(set(self.spec.layout.device_of_stage)), self.config.micro_batches)

    @property
    def prediction(self) -> "Plan | None":
        """The plan if its times are for this device; None if they are for another and only compare layers."""
        return None if self.plan.costs.cost_source == "other_device" else self.plan

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, including those before it was resumed."""
        assert self.ready.steps_per_epoch is not None, "a dry run has no steps"
        steps = self.config.epochs * self.ready.steps_per_epoch
        return steps if self.config.max_steps is None else min(steps, self.config.max_steps)


class TaskLabels(NamedTuple):
    """The terms and columns of a task's reports."""

    speed: str  # the unit of the speed in columns and bars
    accuracy: str  # name of the fraction of right predictions, in columns and bars
    scores: tuple[str, str, str]  # names of the scores on the test set, in columns
    ends: tuple[int, ...]  # positions at which the columns of an epoch's line end


def precision_note(precision: str, effective: str) -> list[tuple[str, str]]:
    """A line on the precision of layers, unless it is float32; `effective`: from `effective_precision`."""
    parts = {"tf32": "products and convolutions", "bfloat16": "products and convolutions; weights stay float32"}
    if precision not in parts:
        return []
    words = {
        "float32": "not supported by this device, which computes in float32",
        "emulated": f"{parts[precision]}; emulated on this device, no faster than float32",
    }
    return [("precision", f"{precision}: {words.get(effective, parts[precision])}")]


def dataset_label(dataset: DatasetConfig) -> str:
    """`python_docs`, or `digits, 24 x 24 pixels`."""
    size = f", {dataset.image_size} x {dataset.image_size} pixels" if isinstance(dataset, ImagesConfig) else ""
    return f"{dataset.name}{size}"


def task_labels(task: Task) -> TaskLabels:
    """The terms of a task. Lines are at most 75 characters long, so that ` best` still fits into 80 columns."""
    if task in TEXT_TASKS:
        ends = (5, 16, 26, 36, 47, 57, 66, 75)
        return TaskLabels("tokens/s", "token acc", ("test loss", "perplexity", "token acc"), ends)
    ends = (10, 21, 29, 40, 48, 56, 66, 75)
    return TaskLabels("samples/s", "top-1", ("test loss", "top-1", "top-5"), ends)


def score_fields(task: Task, scores: Scores) -> dict[str, float | None]:
    """The scores of a test set, by their names in result.json."""
    if task in TEXT_TASKS:
        return {"loss": scores.loss, "perplexity": perplexity(scores.loss), "token_accuracy": scores.top1}
    return {"loss": scores.loss, "top1": scores.top1, "top5": scores.top5}


def to_evaluation(task: Task, scores: Scores, step: int = 0, epoch: int = 0) -> Evaluation:
    """An evaluation in the form of result.json."""
    by_name = score_fields(task, scores)
    return Evaluation(step, epoch, averaged=scores.averaged, tokens=scores.tokens, **by_name)


def perplexity(cross_entropy: float) -> float:
    """exp of the mean cross-entropy of a token in nats; infinite where a float cannot hold it."""
    try:
        return math.exp(cross_entropy)
    except OverflowError:
        return math.inf
