"""The metrics of runs, an entry for each: name, unit, meaning, and path in the results.

Tables, summaries, comparisons, curves and `gpipe help` choose metrics by their keys: the path, heading and format of
a metric are here only.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal

from gpipe_cli.config.settings import TEXT_TASKS, Task
from gpipe_cli.units import GIB, MIB, duration, learning_rate, loss, operations, percent, perplexity, rate, size

IMAGE_TASKS: tuple[Task, ...] = ("classification", "segmentation")


@dataclass(frozen=True)
class Unit:
    """How a number is written: with its unit, or bare in a column whose heading names the unit."""

    name: str  # text in headings; "" where a number has no unit
    full: Callable[[Any], str]  # `98.6 %`
    bare: Callable[[float], str]  # `98.6`
    sizes: Sequence[tuple[str, float]] = ()  # names and sizes that a column chooses from, the smallest first
    max_value: float = 0.0  # a column takes the smallest size in which its largest value is below this
    curve_size: float = 1.0  # divisor of the numbers in TensorBoard's curves

    def scale(self, values: Iterable[float | None]) -> tuple[str, Callable[[float], str]]:
        """The size for all values of a column: its name for the heading, and the function that writes a bare value."""
        if not self.sizes:
            return self.name, self.bare
        largest = max((abs(value) for value in values if value is not None), default=0.0)
        name, divisor = next((entry for entry in self.sizes if largest < self.max_value * entry[1]), self.sizes[-1])
        return name, lambda value: self.bare(value / divisor)


def _short(value: float) -> str:
    """Losses and perplexities with about four significant digits: `1.234`, `103.3`, `12,345`, `1.2e+08`."""
    if value >= 999_999.5:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.3f}"


_ONE_DIGIT = "{:,.1f}".format
SHARE = Unit("%", percent, lambda share: f"{100 * share:.1f}")
RATE = Unit("/s", rate, rate)
STEP = Unit("s", duration, _ONE_DIGIT, (("ms", 1e-3), ("s", 1)), max_value=10_000)
SECONDS = Unit("s", duration, _ONE_DIGIT, (("s", 1), ("min", 60), ("h", 3600)), max_value=120)
BYTES = Unit("bytes", size, _ONE_DIGIT, (("MiB", MIB), ("GiB", GIB)), max_value=10 * 1024, curve_size=GIB)
FLOPS = Unit("FLOP/s", operations, operations)
LOSS = Unit("", loss, _short)
PERPLEXITY = Unit("", perplexity, _short)
FACTOR = Unit("", "{:.2f}".format, "{:.2f}".format)
COUNT = Unit("", "{:,}".format, "{:,.0f}".format)
PEAK = Unit("", learning_rate, learning_rate)


@dataclass(frozen=True)
class Metric:
    """A number of a run, a plan or a row of bench.json."""

    key: str  # the key in CSV and JSON, and the topic of `gpipe help`
    name: str  # the name in a sentence, or in its own row
    heading: str  # the heading of a column
    unit: Unit
    description: str  # meaning, and how it is measured
    path: str = ""  # dotted path in result.json; "": the file lacks it
    tag: str = ""  # tag of its curve in TensorBoard; "": no curve
    hparam: str = ""  # its name after `final/` in TensorBoard's tab HParams; "": the tab lacks it
    direction: Literal["more", "less", ""] = ""  # the direction in which a run is better
    tasks: tuple[Task, ...] = IMAGE_TASKS + TEXT_TASKS
    short_heading: str = ""  # the heading in a table of many columns, where `heading` has no room

    def value(self, result: Any) -> Any:
        """The number in a result, the largest if every stage has its own; None if there is none. In plans and rows of
        bench.json a path such as `bubble.measured` ends at its first part, as they hold a single kind of bubble."""
        value = result
        for part in self.path.split("."):
            if isinstance(value, tuple | list):
                value = value[int(part)] if value else None
            elif isinstance(value, Mapping):
                value = value.get(part)
            elif is_dataclass(value):
                value = getattr(value, part, None)
        return max(value, default=None) if isinstance(value, tuple | list) else value

    def format(self, value: Any) -> str:
        """`value` with the unit of this metric; `-` for None."""
        return "-" if value is None else self.unit.full(value)

    def text(self, result: Any) -> str:
        """The number in a result with its unit; `-` if there is none."""
        return self.format(self.value(result))

    def column_heading(self, unit: str) -> str:
        """The heading of a column of bare values in `unit`, in a table of many columns."""
        heading = self.short_heading or self.heading
        return heading if unit in heading else f"{heading}\n{unit}"


# Measures with an `hparam` are in the order in which TensorBoard's tab HParams shows them.
_LIST = (
    Metric("test_top1", "test top-1", "top-1", SHARE,
            "Share of the test set's images (with masks: of its pixels) whose most likely class is the correct one, at "
            "the last evaluation, with averaged weights if there are any.", path="test.top1", tag="test/top1",
            hparam="top1", direction="more", tasks=IMAGE_TASKS),
    Metric("test_perplexity", "test perplexity", "perplexity", PERPLEXITY,
            "exp of the mean cross-entropy, in nats per token of the test set, at the last evaluation: the model is as "
            "uncertain as a choice among this many equally likely tokens.", path="test.perplexity",
            tag="test/perplexity",
            hparam="perplexity", direction="less", tasks=TEXT_TASKS, short_heading="perpl.\nfinal"),
    Metric("samples_per_second", "samples/s", "samples/s", RATE,
            "Samples of a mini-batch (images, or sequences and sentences of text) divided by the seconds of its step: "
            "the median over the steps after the warm-up.", path="samples_per_second", tag="speed/samples_per_second",
            hparam="samples_per_second", direction="more", short_heading="samples"),
    Metric("tokens_per_second", "tokens/s", "tokens/s", RATE,
            "Tokens to be predicted in a mini-batch, padding not counted, divided by the seconds of its step: the "
            "median over the steps after the warm-up.", path="tokens_per_second", tag="speed/tokens_per_second",
            hparam="tokens_per_second", direction="more", tasks=TEXT_TASKS, short_heading="tokens"),
    Metric("step_seconds", "seconds per step", "step", STEP,
            "Seconds of an optimizer step, waiting for data included: the median over the steps after the warm-up.",
            path="step_seconds", tag="speed/step_seconds", hparam="step_seconds", direction="less"),
    Metric("bubble_measured", "bubble, measured", "bubble", SHARE,
            "Share of the devices' time in a step that is idle as the pipeline fills and drains, as it would be with "
            "equal stages: the median over the steps.", path="bubble.measured", tag="bubble/measured", hparam="bubble",
            direction="less"),
    Metric("memory_bytes_fullest", "peak memory", "memory", BYTES,
            "Peak memory of the fullest stage: on a GPU what PyTorch's allocator has allocated, on a CPU the memory of "
            "the stage's process, libraries included.", path="memory_bytes", tag="memory/fullest_gib",
            hparam="memory_gib", direction="less"),
    Metric("test_loss", "test loss", "test loss", LOSS,
            "Mean cross-entropy, in nats per sample of the test set (of text: per token), at the last evaluation, "
            "without label smoothing.", path="test.loss", tag="test/loss", hparam="loss", direction="less"),
    Metric("test_top5", "test top-5", "top-5", SHARE,
            "Share of the test set's images whose correct class is among the five that the model finds most likely, at "
            "the last evaluation.", path="test.top5", tag="test/top5", hparam="top5", direction="more",
            tasks=("classification",)),
    Metric("test_token_accuracy", "test token accuracy", "token acc", SHARE,
            "Share of the test set's tokens that the model predicts as the most likely ones, at the last evaluation.",
            path="test.token_accuracy", tag="test/token_accuracy", hparam="token_accuracy", direction="more",
            tasks=TEXT_TASKS),
    Metric("best_top1", "best top-1, chosen on the test set", "best top-1,\nby test set", SHARE,
            "Top-1 accuracy of the test set at the best evaluation of the run, which it has chosen itself: higher than "
            "that of other images would be.", path="best.top1", direction="more", tasks=IMAGE_TASKS,
            short_heading="best, by\ntest set"),
    Metric("best_perplexity", "best perplexity, chosen on the test set", "best perplexity,\nby test set", PERPLEXITY,
            "Perplexity of the test set at the best evaluation of the run, which it has chosen itself.",
            path="best.perplexity", direction="less", tasks=TEXT_TASKS, short_heading="perpl. by\ntest set"),
    Metric("best_loss", "best loss, chosen on the test set", "best loss,\nby test set", LOSS,
            "Mean cross-entropy of the test set, in nats, at the best evaluation of the run, which it has chosen "
            "itself.", path="best.loss", direction="less"),
    Metric("validation_top1", "validation top-1", "val top-1", SHARE,
            "Top-1 accuracy of the validation set at its best evaluation, which has chosen the weights that the test "
            "set is scored with.", path="validation.top1", tag="validation/top1", direction="more", tasks=IMAGE_TASKS),
    Metric("validation_perplexity", "validation perplexity", "val perplexity", PERPLEXITY,
            "Perplexity of the validation set at its best evaluation, which has chosen the weights that the test set "
            "is scored with.", path="validation.perplexity", tag="validation/perplexity", direction="less",
            tasks=TEXT_TASKS,
            short_heading="perpl.\nval"),
    Metric("validation_loss", "validation loss", "val loss", LOSS,
            "Mean cross-entropy of the validation set, in nats, at its best evaluation.", path="validation.loss",
            tag="validation/loss", direction="less"),
    Metric("unigram_perplexity", "unigram perplexity", "unigram", PERPLEXITY,
            "Perplexity of the test set for a model that knows only how frequent each token of the training set is.",
            path="unigram_perplexity", tasks=TEXT_TASKS),
    Metric("samples_per_second_q1", "samples/s, first quartile", "q1 samples/s", RATE,
            "A quarter of the steps after the warm-up were slower.", path="samples_per_second_quartiles.0",
            short_heading="q1"),
    Metric("samples_per_second_q3", "samples/s, third quartile", "q3 samples/s", RATE,
            "A quarter of the steps after the warm-up were faster.", path="samples_per_second_quartiles.1",
            short_heading="q3"),
    Metric("tokens_per_second_q1", "tokens/s, first quartile", "q1 tokens/s", RATE,
            "A quarter of the steps after the warm-up were slower.", path="tokens_per_second_quartiles.0",
            tasks=TEXT_TASKS,
            short_heading="q1"),
    Metric("tokens_per_second_q3", "tokens/s, third quartile", "q3 tokens/s", RATE,
            "A quarter of the steps after the warm-up were faster.", path="tokens_per_second_quartiles.1",
            tasks=TEXT_TASKS,
            short_heading="q3"),
    Metric("speed_up", "speed-up", "speed-up", FACTOR,
            "How many times as fast a run is as the run with the fewest devices that does the same work on the same "
            "machine (gpipe compare).", direction="more", short_heading="speed-\nup"),
    Metric("efficiency", "efficiency", "efficiency", SHARE,
            "Speed-up divided by the ratio of the numbers of devices; unknown where stages share a device or cores "
            "(gpipe compare).", direction="more", short_heading="effi-\nciency %"),
    Metric("relative", "relative speed", "relative", FACTOR,
            "Speed of a row of bench.json divided by one device's with the whole mini-batch, nothing recomputed "
            "and all threads of the machine (in a recipe: of its first row): the median over the rounds.",
            path="relative", direction="more"),
    Metric("bubble_ideal", "bubble, ideal", "bubble ideal", SHARE,
            "(K-1)/(M+K-1): the bubble of the paper's schedule on K equal devices that only compute.",
            path="ideal_bubble", tag="bubble/ideal"),
    Metric("bubble_predicted", "bubble, predicted", "bubble predicted", SHARE,
            "The bubble of the simulated step.", path="bubble.predicted", tag="bubble/predicted"),
    Metric("idle_measured", "idle, measured", "idle", SHARE,
            "Share of the devices' time in a step in which they are idle, for any reason: bubble, imbalance, transfer "
            "or set-up.", path="idle.measured", tag="idle/measured", direction="less"),
    Metric("idle_predicted", "idle, predicted", "idle predicted", SHARE,
            "The idle share of the simulated step.", path="idle.predicted", tag="idle/predicted"),
    Metric("step_seconds_predicted", "seconds per step, predicted", "step predicted", STEP,
            "Seconds of the simulated step.", path="prediction.step_seconds"),
    Metric("step_over_predicted", "step over predicted", "step / predicted", FACTOR,
            "Measured seconds per step divided by the predicted ones.", tag="speed/step_over_predicted"),
    Metric("activation_bytes_fullest", "activations", "activations", BYTES,
            "Bytes of saved activations on the fullest stage, counted at the peak of one of the first steps.",
            path="activation_bytes", direction="less"),
    Metric("model_flops_per_second", "FLOP/s", "FLOP/s", FLOPS,
            "Floating-point operations per second of the model's forwards and backwards, recomputation not counted, at "
            "the median speed.", path="model_flops_per_second", direction="more"),
    Metric("mfu", "MFU", "MFU", SHARE,
            "Model FLOPs utilization: model_flops_per_second as a share of the devices' peak (Chowdhery et al., 2022, "
            "PaLM, section 4.1).", path="mfu", direction="more"),
    Metric("utilisation", "utilisation", "utilisation", SHARE,
            "Of a plan: the model's operations, recomputation not counted, as a share of what the planned devices "
            "could do in the predicted step.", path="utilisation", direction="more"),
    Metric("imbalance", "slowest stage over mean", "slowest/mean", SHARE,
            "Of a plan: how much longer the slowest stage takes than the mean of all stages, as a share of that mean.",
            path="imbalance", direction="less"),
    Metric("epochs_done", "epochs done", "epochs\ndone", COUNT,
            "Whole epochs done, those before a resume included.", path="epochs"),
    Metric("steps", "steps", "steps", COUNT,
            "Optimizer steps done, those before a resume included.", path="steps"),
    Metric("seconds", "total time", "time", SECONDS,
            "Seconds from the start of the process to the end of the run; for a resumed run, the sum over its starts, "
            "each up to its end or, if it was killed, its last evaluation.", path="seconds", direction="less"),
    Metric("start_seconds", "time of the last start", "last start", SECONDS,
            "Of the total time of a resumed run, the seconds since it was resumed the last time.",
            path="starts.-1.seconds", direction="less"),
    Metric("threads_per_process", "threads", "threads", COUNT,
            "Threads with which each process computes.", path="hardware.threads_per_process"),
    Metric("cpu_starved_share", "CPU-starved share", "CPU-starved", SHARE,
            "Share of computing time in which the most affected stage had no core, because other programs used them: "
            "the median over the steps.", path="cpu_starved_share", direction="less"),
    Metric("train_loss", "train loss", "train loss", LOSS,
            "The loss that training minimizes, averaged over a step's mini-batch, with label smoothing and auxiliary "
            "head. The column train loss that a run prints is comparable with test_loss: train_cross_entropy, averaged "
            "over the epoch so far.", tag="train/loss", direction="less"),
    Metric("train_cross_entropy", "train cross-entropy", "cross-entropy", LOSS,
            "Mean cross-entropy of a step's mini-batch, in nats, comparable with test_loss.",
            tag="train/cross_entropy", direction="less"),
    Metric("train_top1", "train top-1", "train top-1", SHARE,
            "Share of correct predictions in a step's mini-batch.", tag="train/top1", direction="more",
            tasks=IMAGE_TASKS),
    Metric("train_perplexity", "train perplexity", "train perplexity", PERPLEXITY,
            "exp of train_cross_entropy.", tag="train/perplexity", direction="less", tasks=TEXT_TASKS),
    Metric("train_learning_rate", "learning rate", "lr", PEAK,
            "Learning rate of a step.", tag="train/learning_rate"),
    Metric("train_gradient_norm", "gradient norm", "gradient norm", LOSS,
            "L2 norm of the gradients of all stages in a step, before clipping.", tag="train/gradient_norm"),
)  # fmt: skip
METRICS: Mapping[str, Metric] = {metric.key: metric for metric in _LIST}

TRAIN_LOSS = METRICS["train_loss"].tag


def select_metrics(*keys: str) -> list[Metric]:
    """The metrics with these keys, in this order."""
    return [METRICS[key] for key in keys]


def hparam_metrics(task: Task) -> list[Metric]:
    """The metrics in TensorBoard's tab HParams: first the ones of `task`, then of other tasks."""
    metrics = [metric for metric in _LIST if metric.hparam]
    return sorted(metrics, key=lambda metric: task not in metric.tasks)


def explain_metric(metric: Metric) -> str:
    """The text of `gpipe help KEY`: the metric's meaning, unit, better direction, and where it is found."""
    units = {SHARE: "a share from 0 to 1", STEP: "seconds", SECONDS: "seconds", BYTES: "bytes", RATE: "per second"}
    places = [f"result.json: {metric.path}"] * bool(metric.path) + [f"TensorBoard: {metric.tag}"] * bool(metric.tag)
    sentences = [metric.description, f"Unit: {units[metric.unit]}." if metric.unit in units else ""]
    sentences += [f"{metric.direction.capitalize()} is better." if metric.direction else "", "; ".join(places)]
    return " ".join(filter(None, sentences))
