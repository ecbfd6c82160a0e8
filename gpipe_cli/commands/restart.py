"""How a training continues after a process was lost: from its last checkpoint, on the GPUs that are left."""

from dataclasses import replace
from pathlib import Path

from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.config.settings import TrainConfig, resume_or_restart
from gpipe_cli.launch.job import Failure
from gpipe_cli.planner.data_sheet import number_of_gpus
from gpipe_cli.planner.process_layout import place_stages
from gpipe_cli.results.run import Restart
from gpipe_cli.system.gpus import refresh_gpus
from gpipe_cli.training.checkpoint.files import list_checkpoints, step_of


def prepare_restart(
    request: RunRequest, lost: Failure, chosen: TrainConfig, folder: Path
) -> tuple[RunRequest, Restart, str]:
    """The request with which the run in `folder` continues, the entry of result.json, and a phrase about both.
    `chosen`: the configuration so far, with the values chosen for `auto`."""
    current, change = _shrink_to_remaining_gpus(resume_or_restart(chosen, folder))
    step = step_of(list_checkpoints(folder)[-1]) if current.resume == str(folder) else 0
    continued = replace(request, config=current, auto=(), saved=chosen if step else request.saved)
    how = f"goes on after step {step:,}" if step else "begins again"
    return continued, Restart(lost.text, step, current.partitions), f"{how}{change}"


def _shrink_to_remaining_gpus(config: TrainConfig) -> tuple[TrainConfig, str]:
    """The configuration with as many partitions per GPU as before on the GPUs left, if these are fewer than it used,
    and a phrase about the change."""
    before = number_of_gpus(config)
    if before == 0:
        return config, ""
    layout = place_stages(config, before, config.threads, None)  # no torchrun: it itself starts processes again
    used = len({device for devices in layout.replica_devices for device in devices})
    refresh_gpus()
    left = number_of_gpus(config)
    if left == 0 or left >= used:  # 0: the CPU is taken
        return config, ""
    fewer = replace(
        config,
        partitions=max(1, config.partitions * left // used),
        stages_per_process=None,
        placement=None,
        partition=replace(config.partition, balance=None),
    )
    return fewer, f", with partitions={fewer.partitions}, as {left} of {before} GPUs are left"
