"""Checks a SLURM job before it is queued, on a machine that may differ from those of the job."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from gpipe_cli.benchmark.machine_timing import step_costs
from gpipe_cli.commands.training_run import find_source
from gpipe_cli.config.settings import AUTO_BATCH, TrainConfig
from gpipe_cli.config.slurm import LaunchSettings
from gpipe_cli.distributed.torchrun import Torchrun
from gpipe_cli.planner.auto_settings import choose, with_samples
from gpipe_cli.planner.cost_model import predicted_costs
from gpipe_cli.planner.model_profile import ModelProfile, profile_model, refuse_single_samples
from gpipe_cli.planner.pipeline_spec import placed

# Settings that the profile of a model does not depend on.
_OF_THE_RUN = (
    "partitions", "micro_batches", "replicas", "partition", "recompute", "batch_size", "epochs", "max_steps", "seed",
    "gradient_clipping", "learning_rate", "output", "run_folder", "checkpoint", "data_workers",
)  # fmt: skip


def check(job: LaunchSettings, requests: Sequence[tuple[TrainConfig, Collection[str]]]) -> None:
    """Check the trainings of a job, each with its `auto` settings; equal models are traced once. Raises InputError,
    one line, for what `gpipe train dry_run=true` would refuse in the job on any devices."""
    profiles: list[tuple[TrainConfig, ModelProfile]] = []
    for config, auto in requests:
        first = requests[0][0]
        alike = replace(config, **{key: getattr(first, key) for key in _OF_THE_RUN}, device="cpu")
        profile = next((profile for known, profile in profiles if known == alike), None)
        if profile is None:
            profile = profile_model(replace(config, device="cpu"))
            profiles.append((alike, profile))
        _check(job, config, auto, profile)


def _check(job: LaunchSettings, config: TrainConfig, auto: Collection[str], profile: ModelProfile) -> None:
    """Check one training of a job, as its first process would."""
    hardware = config.hardware
    if job.gpus_per_node and hardware.here and hardware.memory_gib is None:  # the GPUs' memory is not known
        if config.recompute == "auto":
            config = replace(config, recompute="always")
        for key in AUTO_BATCH:
            if key in auto:
                auto = [one for one in auto if one != key]
                config = with_samples(config, profile, key, 1)
    config = replace(config, device="cpu")
    timed = config.cost != "figures" and job.processes > 1  # step_costs refuses that; this machine is not timed
    costs_of = partial(step_costs, log=lambda line: None) if timed else predicted_costs
    started = Torchrun(0, job.processes, job.processes_here, 0) if job.processes > 1 else None
    config, plan, _ = choose(config, auto, profile, costs_of, started, elsewhere=job.gpus_per_node > 0)
    if config.batch_size is not None:
        refuse_single_samples(config, config.batch_size, profile)
    placed(config, profile, plan)
    find_source(config)
