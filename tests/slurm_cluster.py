"""A SLURM of two nodes on this machine: munge, slurmctld and two slurmd in a temporary folder, without systemd."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from training_runs import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "unshare")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # where Debian has the daemons
HOST = socket.gethostname().partition(".")[0]
# Debian's slurmd is built for one node on a machine, which it knows by the name of the machine: the second one gets
# another name by `unshare --uts`. cred_expire: so long SLURM waits before a job that was queued again may begin.
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=sched_min_interval=0,sched_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName={host}-2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes={host},{host}-2 Default=YES State=UP
"""


def installed() -> bool:
    """Whether all of SLURM is here, and this process may start it."""
    return os.geteuid() == 0 and all(shutil.which(name, path=PATH) for name in PROGRAMS)


@contextlib.contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Inside, SLURM runs; yields the environment in which its commands find it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # of a short name, as sockets need it
        yield from _cluster(Path(folder))


def _cluster(folder: Path) -> Iterator[dict[str, str]]:
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=HOST, ports=_free_ports(3)))
    # the name of the second node leads nowhere, from which Gloo would conclude which address it has
    environment = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": PATH, "GLOO_SOCKET_IFNAME": "lo"}
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
        ["slurmctld", "-D", "-i"],
        ["slurmd", "-D"],
        ["unshare", "--uts", "sh", "-c", f"hostname {HOST}-2; exec slurmd -D"],
    ]
    with contextlib.ExitStack() as stack:
        for number, daemon in enumerate(daemons):
            output = stack.enter_context((folder / f"daemon{number}.txt").open("wb"))
            started = subprocess.Popen(daemon, env=environment, stdout=output, stderr=output)
            stack.callback(started.wait, 20)
            stack.callback(started.terminate)
            if number == 0:
                wait_until((folder / "munge.socket").exists, 120, "munged listens")
        wait_until(lambda: asked(environment, "sinfo", "-h", "-o", "%t %D") == "idle 2", 120, "two nodes are idle")
        try:
            yield environment
        finally:
            asked(environment, "scancel", "--user=root", "--signal=KILL", "--full")
            asked(environment, "scancel", "--user=root")
            wait_until(lambda: asked(environment, "squeue", "-h") == "", 120, "no job is left")


def asked(environment: dict[str, str], *command: str) -> str:
    """What a command of SLURM's answers."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout.strip()


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
