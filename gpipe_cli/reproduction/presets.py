"""The presets of the site that `gpipe site` writes: plans that readers explore and change without an installation.

They are the digits model of `gpipe train`, the cells of the paper's Tables 1 and 2 on the paper's hardware, its largest
Transformers, and a GPT of today. Each is the plan of one `gpipe plan` command, which the site shows beside it.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from gpipe_cli.reproduction.recipe import load


@dataclass(frozen=True, slots=True)
class Challenge:
    """A goal for whoever explores a preset. What is None is not asked for."""

    answer: str  # controls that reach it, as words of the explorer's address
    faster: float | None = None  # how many times as fast as the preset's own setting
    idle: float | None = None  # share of a step that devices may be idle, 0 to 1
    gib: float | None = None  # memory that no device may exceed
    devices: int | None = None  # devices that have to be used: one alone is never idle


@dataclass(frozen=True, slots=True)
class Preset:
    """A plan of the site: the settings of one `gpipe plan` command."""

    name: str  # in addresses: `table2-amoebanet-k4-m32`
    group: str
    title: str
    settings: tuple[str, ...]
    recipe: str | None = None  # the recipe that the settings change; None: the defaults of `gpipe train`

    @property
    def challenge(self) -> Challenge:
        """The goal for whoever explores the preset."""
        return CHALLENGES[self.name]

    @property
    def command(self) -> str:
        """The command line that gives the plan."""
        of_recipe = [] if self.recipe is None else ["-cd", "recipes", "-cn", self.recipe]
        return shlex.join(["gpipe", "plan", *of_recipe, *self.settings])


# Of each preset, by its name. A test finds a setting that meets each of them.
CHALLENGES = {
    "digits": Challenge("M=11&schedule=1f1b", faster=1.15, devices=4),
    "gpt-7b": Challenge("M=64&schedule=1f1b&recompute=except_last", faster=1.1, idle=0.1, gib=40, devices=8),
    "multilingual-6b": Challenge("schedule=1f1b", gib=12, devices=16),
    "table1-amoebanet-naive-1": Challenge("M=64&recompute=except_last", gib=8, devices=1),
    "table1-amoebanet-pipeline-1": Challenge("schedule=1f1b&recompute=never", faster=1.3, gib=8, devices=1),
    "table1-amoebanet-pipeline-2": Challenge("schedule=1f1b&recompute=never", faster=1.4, gib=8, devices=2),
    "table1-amoebanet-pipeline-4": Challenge("schedule=1f1b&recompute=never", faster=1.2, gib=8, devices=4),
    "table1-amoebanet-pipeline-8": Challenge("M=64&schedule=1f1b&recompute=never", faster=1.2, gib=8, devices=8),
    "table1-transformer-naive-1": Challenge("M=32&recompute=except_last", gib=16, devices=1),
    "table1-transformer-pipeline-1": Challenge("K=2", gib=16, devices=2),
    "table1-transformer-pipeline-8": Challenge("K=16&schedule=interleaved&stages=2", gib=16, devices=8),
    "table1-transformer-pipeline-32": Challenge("schedule=interleaved&stages=2", idle=0.2, gib=32, devices=16),
    "table1-transformer-pipeline-128": Challenge("schedule=interleaved&stages=4", idle=0.2, gib=48, devices=32),
    "table2-amoebanet-k2-m1": Challenge("M=32", idle=0.1, gib=8, devices=2),
    "table2-amoebanet-k2-m4": Challenge("M=64&schedule=1f1b&recompute=never", idle=0.1, gib=8, devices=2),
    "table2-amoebanet-k2-m32": Challenge("K=4&schedule=interleaved&stages=2", idle=0.05, gib=4, devices=2),
    "table2-amoebanet-k4-m1": Challenge("K=8&M=28&schedule=zbv&stages=2", idle=0.1, gib=8, devices=4),
    "table2-amoebanet-k4-m4": Challenge(
        "K=8&M=20&schedule=zbv&recompute=except_last&stages=2", idle=0.1, gib=4, devices=4
    ),
    "table2-amoebanet-k4-m32": Challenge("M=24&schedule=1f1b&recompute=never", faster=1.4, gib=8, devices=4),
    "table2-amoebanet-k8-m1": Challenge("K=16&M=48&schedule=zbv&stages=2", idle=0.15, gib=8, devices=8),
    "table2-amoebanet-k8-m4": Challenge(
        "K=16&M=20&schedule=zbv&recompute=never&stages=2", faster=2.5, gib=8, devices=8
    ),
    "table2-amoebanet-k8-m32": Challenge(
        "K=16&schedule=interleaved&recompute=never&stages=2", faster=1.5, gib=4, devices=8
    ),
    "table2-transformer-k2-m1": Challenge("schedule=zero_bubble&recompute=never", faster=1.4, gib=16, devices=2),
    "table2-transformer-k2-m4": Challenge(
        "K=4&schedule=zbv&recompute=except_last&stages=2", idle=0.05, gib=16, devices=2
    ),
    "table2-transformer-k2-m32": Challenge("K=4&M=12&schedule=interleaved&stages=2", faster=1.1, gib=16, devices=2),
    "table2-transformer-k4-m1": Challenge("M=4&recompute=never", faster=2, gib=16, devices=4),
    "table2-transformer-k4-m4": Challenge(
        "M=16&schedule=zero_bubble&recompute=except_last", idle=0.1, gib=16, devices=4
    ),
    "table2-transformer-k4-m32": Challenge("K=8&M=64&schedule=interleaved&stages=2", idle=0.1, gib=8, devices=4),
    "table2-transformer-k8-m1": Challenge("M=8&schedule=zero_bubble&recompute=never", faster=4, gib=16, devices=8),
    "table2-transformer-k8-m4": Challenge(
        "M=32&schedule=zero_bubble&recompute=except_last", idle=0.1, gib=16, devices=8
    ),
    "table2-transformer-k8-m32": Challenge("M=64&schedule=1f1b&recompute=except_last", idle=0.1, gib=10, devices=8),
}
_DIGITS = Preset(
    "digits", "Start here", "Digits: a small AmoebaNet-D on four CPU cores",
    ("hardware=cpu", "partitions=4", "micro_batches=4", "batch_size=128", "recompute=never"),
)  # fmt: skip
_GPT = Preset(
    "gpt-7b", "Large models of text", "GPT, 7 billion parameters, on 8 H100s",
    (
        "model=transformer_lm", "dataset=synthetic_text", "~presets", "hardware=h100", "precision=bfloat16",
        "partitions=8", "micro_batches=16", "recompute=always", "batch_size=64", "ema_decay=0", "model.layers=32",
        "model.width=4096", "model.hidden=16384", "model.heads=32", "model.length=2048",
    ),
)  # fmt: skip
_MULTILINGUAL = "multilingual_6b"
_TEXT = "Transformer", "-", "TPU v3, 16 GB"  # as in AmoebaNet-D (18, 256), but Transformer-13


def presets() -> Iterator[Preset]:
    """All presets, in the order in which the site lists them."""
    yield _DIGITS
    yield _GPT
    size = load(_MULTILINGUAL).size
    assert size is not None
    yield Preset(
        "multilingual-6b", "Large models of text", "Translation, 6 billion parameters, on 16 TPU v3s",
        ("hardware=tpu_v3", *size.settings), _MULTILINGUAL,
    )  # fmt: skip
    for kind in ("amoebanet", "transformer"):
        yield from _largest(f"table1_{kind}")
    for kind in ("amoebanet", "transformer"):
        yield from _speeds(f"table2_{kind}")


def _largest(recipe: str) -> Iterator[Preset]:
    """The cells of the paper's Table 1: the largest models."""
    experiment = load(recipe).largest_model
    assert experiment is not None
    model, join, device = ("AmoebaNet-D", " ", "TPU v2, 8 GB") if "amoebanet" in recipe else _TEXT
    for at, one in enumerate(experiment.sizes):
        yield Preset(
            f"{recipe}-{one.name}".replace("_", "-").lower(), f"Table 1: the largest {model} on {device} each",
            f"{one.name}: {model}{join}{one.shown}, {one.parameters / 1e9:.3g} billion parameters",
            (*one.settings, *experiment.cell(one.partitions, naive=at == 0)), recipe,
        )  # fmt: skip


def _speeds(recipe: str) -> Iterator[Preset]:
    """The cells of the paper's Table 2: speed over K and M."""
    experiment = load(recipe).throughput
    assert experiment is not None
    (model,) = experiment.models
    group = f"Table 2: {model.name} on K devices, TPU {'v2' if 'amoebanet' in recipe else 'v3'}"
    for row in model.rows:
        cell = f"partitions={row.partitions}", f"micro_batches={row.micro_batches}"
        yield Preset(
            f"{recipe}-k{row.partitions}-m{row.micro_batches}".replace("_", "-"), group,
            f"{row.cell}: {model.name}", (*model.settings, *model.figures, *cell), recipe,
        )  # fmt: skip
