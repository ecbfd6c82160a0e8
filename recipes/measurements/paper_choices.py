"""Which assumptions about what the paper leaves open explain its Tables 2 and 3 best? Simulates a grid of them.

A set of assumptions holds for all cells of both tables:

  batch      N: 32 | 128 | fits: the largest multiple of M that fits the memory | fits, 128 at most | 4 M
             (with 32, 128 and 4 M the memory has no limit)
  cut        exact: by time | lingvo: one pass over FLOPs, or L / K layers of a Transformer | equal: numbers of layers
  devices    of Table 2: TPU v2 for AmoebaNet and v3 for the Transformer, as in Table 1 | v2 | v3; of Table 3: P100
  precision  of Table 2: float32 | bfloat16; of Table 3: float32
  half       samples of a micro-batch at which devices reach half their speed: 0 | 2 | 8
  size       of the Transformer: width, hidden, heads 1024, 4096, 16 | 2048, 8192, 32; and 128 | 512 | 1024 tokens

All activations are recomputed. Speeds are relative to K = 2, M = 1 (Table 2) or K = 2 (Table 3) of the same set.

Usage: python recipes/measurements/paper_choices.py [--sets 12]      5 minutes on 2 CPU cores
"""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from statistics import mean, median
from typing import Literal, get_args

from runs import command_line

from gpipe_cli.commands.command_line import read
from gpipe_cli.commands.composing import TRAINING_KEYS, compose, training
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.errors import InputError
from gpipe_cli.planner.auto_settings import choose
from gpipe_cli.planner.cost_model import predicted_costs
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import make_plan
from gpipe_cli.reproduction.recipe import load
from gpipe_cli.system.forked_call import in_forks

BATCHES = ("32", "128", "fits", "fits, 128 at most", "4 M")
Cut = Literal["exact", "lingvo", "equal"]
CUTS: tuple[Cut, ...] = get_args(Cut)
DEVICES = {"as Table 1": ("tpu_v2", "tpu_v3"), "v2": ("tpu_v2", "tpu_v2"), "v3": ("tpu_v3", "tpu_v3")}
PRECISIONS = ("float32", "bfloat16")
HALVES = (0, 2, 8)
SIZES = [(*width, length) for width in ((1024, 4096, 16), (2048, 8192, 32)) for length in (128, 512, 1024)]
Size = tuple[int, int, int, int]  # width, hidden, heads, tokens

RECIPES = {"table2_amoebanet": "", "table2_transformer": "", "table3_no_fast_interconnect": ", P100"}


def paper() -> dict[str, dict[tuple[int, int], float]]:
    """The paper's relative throughput by model, K and M, from the recipes of Tables 2 and 3."""
    found = {}
    for recipe, device in RECIPES.items():
        throughput = load(recipe).throughput
        assert throughput is not None
        for model in throughput.models:
            found[f"{model.name}{device}"] = {(row.partitions, row.micro_batches): row.paper for row in model.rows}
    return found


PAPER = paper()


@dataclass(frozen=True)
class Choices:
    """A set of assumptions."""

    batch: str
    cut: Cut
    devices: str
    precision: str
    half: int
    size: Size

    def __str__(self) -> str:
        width, hidden, heads, length = self.size
        return (
            f"N {self.batch:<18}{self.cut:<8}{self.devices:<12}{self.precision:<10}half {self.half:<3}"
            f"{width}/{hidden}/{heads}, {length} tokens"
        )


@dataclass(frozen=True)
class Job:
    """A model on a device; jobs with the same `traced` share one trace of its layers."""

    model: str
    cut: Cut
    device: str
    precision: str
    size: Size | None  # of a Transformer

    @property
    def traced(self) -> tuple[str, str, Size | None]:
        return self.model, self.precision, self.size


Speed = tuple[float, float]  # samples a second, samples of a micro-batch
Speeds = dict[tuple[str, int, int], Speed]  # by rule for N, K and M


def jobs() -> list[Job]:
    found = []
    for model in PAPER:
        devices, precisions = (
            (("p100_pcie",), PRECISIONS[:1]) if "P100" in model else (("tpu_v2", "tpu_v3"), PRECISIONS)
        )
        of_model: Sequence[Size | None] = SIZES if "Transformer" in model else [None]
        found += [Job(model, *one) for one in product(CUTS, devices, precisions, of_model)]
    return found


def settings(job: Job, small: Sequence[str]) -> list[str]:
    """The settings of `gpipe plan`; ``small``: those with which a test makes AmoebaNet small."""
    common = [f"hardware={job.device}", f"precision={job.precision}", "recompute=always", "ema_decay=0"]
    if job.size is None:
        filters = "128" if "128" in job.model else "256"
        return [*common, "batch_size=32", "model=amoebanet", "dataset=synthetic_images", "model.normal_cells=18",
                f"model.filters={filters}", *small]  # fmt: skip
    names = ("width", "hidden", "heads", "length")
    layers = "24" if "24" in job.model else "48"
    sizes = [f"model.{name}={value}" for name, value in zip(names, job.size, strict=True)]
    return [
        *common,
        "batch_size=32",
        "model=transformer_lm",
        "dataset=synthetic_text",
        f"model.layers={layers}",
        *sizes,
    ]


def speeds(job: Job, base: TrainConfig, profile: ModelProfile) -> Speeds:
    return {(rule, k, m): speed for k, m in PAPER[job.model] for rule, speed in cell(job, base, profile, k, m).items()}


def cell(job: Job, base: TrainConfig, profile: ModelProfile, k: int, m: int) -> dict[str, Speed]:
    """Speeds by rule for N, without impossible rules, where nothing fits or Lingvo's cut leaves a stage empty."""
    layers = len(profile.costs)
    equal = tuple(layers // k + (at < layers % k) for at in range(k))
    partition = base.partition.by_hand(equal) if job.cut == "equal" else replace(base.partition, method=job.cut)
    limited = replace(base, partitions=k, micro_batches=m, partition=partition)
    unlimited = replace(limited, hardware=replace(base.hardware, memory_gib=None))

    @cache
    def speed(config: TrainConfig, samples: int) -> Speed:
        config = replace(config, batch_size=samples)
        layout = layout_of(config)
        plan = make_plan(config, profile, predicted_costs(config, profile, layout), layout)
        return samples / plan.step_seconds, samples / m

    found = {}
    with suppress(InputError):
        for rule, samples in (("32", 32), ("128", 128), ("4 M", 4 * m)):
            found[rule] = speed(unlimited, samples)
        most = choose(limited, ["batch_size"], profile, predicted_costs)[0].batch_size
        assert most is not None
        found["fits"] = speed(limited, most)
        found["fits, 128 at most"] = speed(limited, min(most, 128))
    return found


def of_all(wanted: Sequence[Job], small: Sequence[str]) -> dict[Job, Speeds]:
    """The speeds of all jobs. Each model is traced once, then a fork for each core plans its share of the cells."""
    traced: dict[tuple[str, str, Size | None], tuple[TrainConfig, ModelProfile]] = {}
    for job in wanted:
        if job.traced not in traced:
            tree = compose(read("train", settings(job, small)), TRAINING_KEYS)
            assert tree is not None
            config, _ = training(tree, {})
            traced[job.traced] = config, profile_model(config)

    def some(part: Sequence[Job]) -> list[Speeds]:
        gc.disable()
        bases = [replace(traced[job.traced][0], hardware=load_hardware(job.device)) for job in part]
        return [speeds(job, base, traced[job.traced][1]) for job, base in zip(part, bases, strict=True)]

    return dict(zip(wanted, in_forks(some, wanted), strict=True))


Cells = dict[tuple[str, int, int], float]  # relative speed by model, K and M


def simulated(choices: Choices, models: Sequence[str], found: dict[Job, Speeds]) -> Cells | None:
    """The relative speeds of all cells but those that are 1 by definition; None if a cell is impossible."""
    cells: Cells = {}
    for model in models:
        transformer, table3 = "Transformer" in model, "P100" in model
        device = "p100_pcie" if table3 else DEVICES[choices.devices][transformer]
        precision = "float32" if table3 else choices.precision
        own = found[Job(model, choices.cut, device, precision, choices.size if transformer else None)]
        first: float | None = None
        for k, m in PAPER[model]:
            if (choices.batch, k, m) not in own:
                return None
            speed, samples = own[choices.batch, k, m]
            speed /= 1 + choices.half / samples
            if first is None:
                first = speed
            else:
                cells[model, k, m] = speed / first
    return cells


def off(cells: Cells) -> float:
    return mean(abs(speed - PAPER[model][k, m]) for (model, k, m), speed in cells.items())


def span(cell: tuple[str, int, int], simulated: Iterable[Cells]) -> tuple[float, float]:
    """The least and the greatest speed of a cell."""
    of = [cells[cell] for cells in simulated]
    return min(of), max(of)


def by_choice(errors: dict[Choices, float]) -> Iterator[str]:
    """A line for each choice: the mean differences of the best set and of the median set with this choice."""
    for name in ("batch", "cut", "devices", "precision", "half", "size"):
        for value in dict.fromkeys(getattr(choices, name) for choices in errors):
            having = [error for choices, error in errors.items() if getattr(choices, name) == value]
            yield f"{name:<11}{value!s:<26}{min(having):>7.2f}{median(having):>8.2f}{len(having):>7}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sets", type=int, default=12, help="how many sets of assumptions are printed, the best first")
    parser.add_argument("--only", default="", help="models whose name contains this; settings are then for AmoebaNet")
    options = parser.parse_args(arguments)
    models = [model for model in PAPER if options.only in model]
    gc.disable()  # collections would visit the many small objects of large plans
    found = of_all([job for job in jobs() if job.model in models], options.settings)
    grid = [Choices(*one) for one in product(BATCHES, CUTS, DEVICES, PRECISIONS, HALVES, SIZES)]
    possible = {choices: cells for choices in grid if (cells := simulated(choices, models, found)) is not None}
    errors = {choices: off(cells) for choices, cells in sorted(possible.items(), key=lambda one: off(one[1]))}
    print(f"{len(grid)} sets of assumptions; with {len(grid) - len(errors)} of them a cell is impossible")
    print("mean |difference| from the paper's cells, without those that are 1 by definition")
    for choices in list(errors)[: options.sets]:
        print(f"{errors[choices]:>6.2f}  {choices}")
    print("the best set of each model by itself")
    for model in models:
        own = {choices: off({c: v for c, v in cells.items() if c[0] == model}) for choices, cells in possible.items()}
        choices = min(own, key=own.__getitem__)
        print(f"{own[choices]:>6.2f}  {choices}  {model}")
    print(f"{'choice':<37}{'best':>7}{'median':>8}{'sets':>7}")
    print("\n".join(by_choice(errors)))
    best = possible[next(iter(errors))]
    ranges = {cell: span(cell, possible.values()) for cell in best}
    print(f"{'':<28}{'K':>3}{'M':>4}{'paper':>7}{'best':>7}{'off':>7}{'least':>8}{'most':>7}")
    for (model, k, m), (least, most) in ranges.items():
        paper, ours = PAPER[model][k, m], best[model, k, m]
        print(f"{model:<28}{k:>3}{m:>4}{paper:>7.2f}{ours:>7.2f}{ours - paper:>+7.2f}{least:>8.2f}{most:>7.2f}")


if __name__ == "__main__":
    main()
