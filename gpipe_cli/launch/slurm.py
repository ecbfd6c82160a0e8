"""Writes the script of a SLURM job that trains, and is queued again until the training is complete.

srun starts every process of gpipe. torchrun is not used: its exit code is 1 whatever those of its processes are, and
SIGUSR1, which SLURM sends to all processes of a job step, ends torchrun at once. Options and variables are those of
the manual pages of sbatch, srun and scontrol.
"""

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpipe_cli.config.slurm import LaunchSettings
from gpipe_cli.config.typed import RefusedError, is_one_line, show


def script(job: LaunchSettings, trainings: Sequence[Sequence[str]], written_by: Sequence[str], path: Path) -> str:
    """The text of the script. `trainings`: the arguments of each `gpipe train`; several become a job array.

    `written_by`: the command line, for a comment; `path`: where the script will be, with the job's output beside it.
    """
    first, *others = trainings
    common = [argument for argument in first if all(argument in other for other in others)]
    lines = [
        "#!/bin/bash",
        f"# Written by: {_words(written_by)}",
        f"# Submit it by: sbatch {_words([str(path)])}",
        *_options(job, path, len(trainings)),
        "",
        "training=(",
        *(f"    {_words([argument])}" for argument in common),
        ")",
    ]
    if others:
        lines.append('case "$SLURM_ARRAY_TASK_ID" in')
        for number, arguments in enumerate(trainings, 1):
            lines.append(f"{number}) training+=({_words([one for one in arguments if one not in common])}) ;;")
        lines.append("esac")
    lines += [
        "",
        "# The processes meet on the first node, where process 0 is; SLURM_PROCID and SLURM_LOCALID number them.",
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))",
        f"export MASTER_ADDR MASTER_PORT WORLD_SIZE={job.processes} LOCAL_WORLD_SIZE={job.processes_here}",
        "",
        "# They share the cores of a node out themselves. A minute after one has ended, SLURM ends the others.",
        "srun --distribution=block --cpu-bind=none --kill-on-bad-exit=0 --wait=60 \\",
        f'    {_words([sys.executable, "-m", "gpipe_cli", "train"])} "${{training[@]}}"',
    ]
    if job.requeue:
        lines += [
            "",
            "# Before its time ends the job gets SIGUSR1: gpipe writes a checkpoint and ends with exit code 3.",
            "# Queued again, it goes on from there. After a node has failed SLURM queues it again by itself.",
            "code=$?",
            'if [ "$code" = 3 ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            'exit "$code"',
        ]
    return "\n".join(lines) + "\n"


def _options(job: LaunchSettings, path: Path, trainings: int) -> list[str]:
    """The #SBATCH lines. The user's `job.options` replace those that are set here."""
    log = str(path.with_suffix("")).replace("%", "%%") + ("_%a" if trainings > 1 else "") + ".log"
    options: dict[str, object] = {
        "job-name": "gpipe",
        "array": f"1-{trainings}" if trainings > 1 else None,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes_here,
        "gpus-per-node": None if "gres" in job.options else job.gpus_per_node or None,
        "time": job.time_limit,
        "chdir": Path.cwd(),
        "output": log,
        "open-mode": "append",  # keeps the output from before the job was queued again
        "requeue" if job.requeue else "no-requeue": True,
        "signal": job.signal,
    } | job.options
    lines = []
    for key, value in options.items():
        text = ",".join(map(show, value)) if isinstance(value, list) else show(value)
        if text not in ("null", "false"):
            lines.append(f"#SBATCH --{key}" + ("" if text == "true" else f"={_words([text])}"))
    return lines


def _words(arguments: Sequence[str]) -> str:
    """The arguments, quoted, as one line of shell."""
    return " ".join(map(_word, arguments))


def _word(text: str) -> str:
    """Quote an argument: double quotes around single ones, as Hydra's strings have; escapes for control characters."""
    if text and not is_one_line(text):
        plain = {*range(ord(" "), ord("~") + 1)} - {ord("'"), ord("\\")}
        escaped = (chr(c) if c in plain else f"\\x{c:02x}" for c in text.encode(errors="surrogateescape"))
        return f"$'{''.join(escaped)}'"
    return f'"{text}"' if re.fullmatch(r"""[^"$`!\\]*'[^"$`!\\]*""", text) else shlex.quote(text)


def submit(path: Path) -> str:
    """Submits the script with sbatch; returns the job's id.

    Raises:
        RefusedError: there is no sbatch on this machine.
        OSError: sbatch has refused the script; the text is its message.
    """
    try:
        ended = subprocess.run(["sbatch", "--parsable", path], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        why = f"there is no sbatch on this machine; leave it out, and submit {path} where there is one"
        raise RefusedError("submit", True, why) from None
    if ended.returncode:
        raise OSError(f"sbatch {path}: {' '.join(ended.stderr.split())}")
    return ended.stdout.strip().partition(";")[0]  # the cluster's name may follow
