"""The templates of recipes/slurm, on a real SLURM where it is installed."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import slurm_cluster
from training_runs import TINY, assert_same_tensors, configure, final_tensors, train_here, wait_until

from gpipe_cli.results.files import read_result

TEMPLATES = sorted((Path(__file__).parent.parent / "recipes" / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.stem)
def test_bash_reads_a_template(template: Path) -> None:
    subprocess.run(["bash", "-n", template], check=True)


@pytest.mark.slow
@pytest.mark.skipif(not slurm_cluster.installed(), reason="needs slurmctld, slurmd and munged, and root to start them")
def test_a_job_that_is_stopped_is_queued_again_and_goes_on() -> None:
    """On two nodes without GPUs. SIGUSR1 to all processes of the job is what SLURM sends before its time ends."""
    for template in TEMPLATES:
        lines = template.read_text().splitlines(keepends=True)
        Path(template.name).write_text("".join(line for line in lines if not line.startswith("#SBATCH --gpus")))
    log, run = Path("my_run.log"), Path("outputs/my_run")
    torchrun = Path("bin/torchrun")  # of the interpreter of the tests, wherever it is installed
    torchrun.parent.mkdir()
    torchrun.write_text(f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n')
    torchrun.chmod(0o755)
    settings = [*TINY, "partitions=2", "ema_decay=0.9", "epochs=20", "hardware=cpu"]
    with slurm_cluster.cluster() as environment:
        environment["PATH"] = f"{torchrun.parent.absolute()}:{environment['PATH']}"
        asked = partial(slurm_cluster.asked, environment)
        ended = partial(subprocess.run, env=environment, capture_output=True, text=True)
        options = ["--cpus-per-task=2", "--job-name=my_run"]
        for template in TEMPLATES:
            test = ended(["sbatch", "--test-only", *options, template.name])
            assert test.returncode == 0, test.stderr
        job = asked("sbatch", "--parsable", *options, "train.sbatch", *settings)
        wait_until(lambda: log.exists() and "\n1/20 " in log.read_text(), 300, "the first epoch is done")
        asked("scancel", "--signal=USR1", job)
        wait_until(lambda: "JobState=COMPLETED" in asked("scontrol", "show", "job", job), 300, "the job has ended")
        assert "Restarts=1 " in asked("scontrol", "show", "job", job)
    assert "resumed from" in log.read_text()
    assert read_result(run)["status"] == "completed"
    train_here(configure(*settings, "executor=in_process"), Path("whole"))
    assert_same_tensors(final_tensors(run), final_tensors(Path("whole")))
