"""What can be checked of a SLURM job before it is queued, on a machine that need not be like those of the job."""

from collections.abc import Collection
from dataclasses import replace
from functools import partial

from gpipe_cli.config.settings import LaunchSettings, TrainConfig
from gpipe_cli.distributed.torchrun import as_first_of
from gpipe_cli.launch.machine_timing import step_costs
from gpipe_cli.launch.training_run import find_source
from gpipe_cli.planner.auto_settings import choose
from gpipe_cli.planner.cost_model import predicted_costs
from gpipe_cli.planner.model_profile import profile_model, refuse_single_samples
from gpipe_cli.planner.placement import make_placement


def check(job: LaunchSettings, config: TrainConfig, auto: Collection[str]) -> None:
    """Raises InputError, one line, for what `gpipe train dry_run=true` would refuse in the job on any devices."""
    hardware = config.hardware
    if config.recompute == "auto" and job.gpus_per_node and hardware.name == "auto" and hardware.memory_gib is None:
        config = replace(config, recompute="always")  # how much memory the GPUs have is not known
    config = replace(config, device="cpu")
    timed = config.cost != "figures" and job.processes > 1  # which is refused; this machine is not timed
    costs_of = partial(step_costs, log=lambda line: None) if timed else predicted_costs
    with as_first_of(job.processes, job.processes_here):
        profile = profile_model(config)
        config, plan, _ = choose(config, auto, profile, costs_of, elsewhere=job.gpus_per_node > 0)
        if config.batch_size is not None:
            refuse_single_samples(config, config.batch_size)
        make_placement(config, profile, plan)
        find_source(config)
