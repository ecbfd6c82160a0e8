"""What recording costs: the same steps with it and without it, in turns.

One process, all stages of the default job in it, so that nothing waits for anything and every microsecond counts. A
step with recording makes its marks, reads them and makes the timeline and the breakdown of them, which in a run the
parent process does beside the training. Then the same for the looks at clocks alone.

Usage: python recipes/measurements/recording_overhead.py [--steps 200] [setting=value ...]      two minutes
"""

import time
from collections.abc import Sequence
from statistics import median

import torch
from hydra import compose, initialize_config_module
from runs import command_line

from gpipe_cli.assembly.loss import CrossEntropy
from gpipe_cli.config.settings import TrainConfig, from_tree
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.pipeline.runtime.recording import measured_timeline
from gpipe_cli.pipeline.schedule.breakdown import breakdown
from gpipe_cli.pipeline.schedule.schedules import Schedule
from gpipe_cli.planner.placement import make_placement
from gpipe_cli.training.engine import build_engine


class Silent:
    """A recorder, its clocks and its recording, none of which does anything."""

    def __init__(self, stages: int) -> None:
        self.clocks = dict.fromkeys(range(stages), self)

    def now(self) -> None:
        return None

    def core_seconds(self) -> float:
        return 0.0

    def begin_step(self, schedule: Schedule) -> "Silent":
        return self

    def action(self, *marks: object) -> None:
        pass


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    steps: int = options.steps
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        tree = compose("train", ["executor=in_process", "threads=1", "device=cpu", *options.settings])
    config = from_tree(TrainConfig, tree)
    placement = make_placement(config)
    torch.set_num_threads(1)
    engine = build_engine(config, placement, ControlGroup(0, 1))
    schedule = placement.schedule(config.micro_batches)
    assert config.batch_size is not None
    sizes = micro_batch_sizes(config.batch_size, config.micro_batches)
    images = torch.randn(config.batch_size, 3, config.dataset.image_size, config.dataset.image_size)
    targets = torch.randint(config.dataset.num_classes, (config.batch_size,))
    loud, silent = engine.executor.recorder, Silent(placement.partitions)
    taken: dict[str, list[float]] = {"without": [], "with": [], "reading": []}
    for step in range(2 * steps + 10):
        with_it = step % 2 == 1
        engine.executor.recorder = loud if with_it else silent
        objective = CrossEntropy(targets, sizes, label_smoothing=0.1, auxiliary_weight=0.0)
        began = time.perf_counter()
        recording = engine.executor.run(schedule, step, sizes, (images,), objective)
        ran = time.perf_counter()
        if step >= 10:
            taken["with" if with_it else "without"].append(ran - began)
            if with_it:
                seconds = recording.seconds()
                timeline = measured_timeline(schedule, [seconds[k] for k in range(placement.partitions)])
                breakdown(timeline, config.micro_batches, ran - began)
                taken["reading"].append(time.perf_counter() - ran)
    without, reading = median(taken["without"]), median(taken["reading"])
    ratio = median(a / b for a, b in zip(taken["with"], taken["without"], strict=True))
    clock = loud.clocks[0]
    began = time.perf_counter()
    for _ in range(25_000):  # of an action: four marks, and how long it had a core
        clock.now(), clock.now(), clock.now(), clock.now(), clock.core_seconds(), clock.core_seconds()
    looks = (time.perf_counter() - began) / 25_000
    actions = sum(map(len, schedule))
    print(f"step without recording        {1e3 * without:9.3f} ms, median of {steps}, {actions} actions")
    print(f"with / without, step by step  {ratio:9.4f}")
    print(f"looks at clocks in a step     {1e6 * looks * actions:9.1f} us, {100 * looks * actions / without:.4f} %")
    print(f"timeline and breakdown        {1e6 * reading:9.1f} us, {100 * reading / without:.3f} % (in the parent)")


if __name__ == "__main__":
    main()
