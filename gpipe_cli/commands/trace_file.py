"""timeline_trace.json beside a plan or a run: what is in it beside the timeline comes from the profile and the plan."""

import json
from collections.abc import Sequence
from pathlib import Path

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.micro_batches import share_of
from gpipe_cli.pipeline.schedule.timeline import Timeline
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.stage_memory import MemoryModel
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.reporting.plots.chrome_trace import TracedStep, chrome_trace
from gpipe_cli.system.files import write_whole

TRACE = "timeline_trace.json"  # for ui.perfetto.dev


def write_trace(folder: Path, steps: Sequence[TracedStep]) -> None:
    """Writes the file, whole or not at all. Raises OSError."""
    write_whole(folder / TRACE, json.dumps(chrome_trace(steps)))


def predicted_step(config: TrainConfig, profile: ModelProfile, plan: Plan) -> TracedStep:
    samples, begin_seconds = mini_batch_samples(config, profile.lengths), plan.timeline.start_seconds
    return traced_step("predicted", config, profile, plan, plan.timeline, begin_seconds, plan.step_seconds, samples)


def traced_step(
    name: str,
    config: TrainConfig,
    profile: ModelProfile,
    plan: Plan,
    timeline: Timeline,
    begin_seconds: float,
    step_seconds: float,
    samples: int,
) -> TracedStep:
    """A step of `samples`, padded to the lengths of `profile`; stages hold what the plan's rules say of them."""
    sizes = share_of(samples, config.micro_batches, config.replicas).sizes
    of_size = {n: MemoryModel(config, profile, (n,)).largest(plan.bounds) for n in set(sizes)}
    return TracedStep(
        name,
        timeline,
        begin_seconds,
        step_seconds,
        samples,
        [of.weights_bytes + of.gradients_bytes + of.optimizer_bytes for of in plan.memory],
        [[of_size[n][stage] for n in sizes] for stage in range(len(plan.stages))],
    )
