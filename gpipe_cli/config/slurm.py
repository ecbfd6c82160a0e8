"""What `gpipe launch slurm` asks SLURM for: the settings of a job, with the names and forms of sbatch's manual page."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from gpipe_cli.config.typed import RefusedError, SettingError, Within, is_one_line, nearest, show

# The long options of sbatch, from its manual pages of SLURM 22.05 to 26.05.
_OPTIONS = (
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster-constraint", "clusters",
    "comment", "consolidate-segments", "constraint", "container", "container-id", "container-type", "contiguous",
    "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot",
    "dependency", "distribution", "error", "exclude", "exclusive", "export", "export-file", "extra",
    "extra-node-info", "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "help", "hint", "hold", "ignore-pbs", "input", "job-name",
    "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu",
    "mem-per-gpu", "mem-update", "mincpus", "network", "nice", "no-kill", "no-requeue", "nodefile", "nodelist",
    "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "oom-kill-step",
    "open-mode", "output", "overcommit", "oversubscribe", "parsable", "partition", "power", "prefer", "priority",
    "profile", "propagate", "qos", "quiet", "reboot", "requeue", "reservation", "resources", "resv-ports", "segment",
    "signal", "sockets-per-node", "spread-job", "spread-segments", "stepmgr", "switches", "test-only", "thread-spec",
    "threads-per-core", "time", "time-min", "tmp", "tres-bind", "tres-per-task", "uid", "usage", "use-min-nodes",
    "verbose", "version", "wait", "wait-all-nodes", "wckey", "wrap",
)  # fmt: skip
_TYPO = 0.85  # similarity that makes an unknown option a typo; pyxis' container-image has 0.81 to container-id
# Options that would repeat or contradict one that gpipe writes -> what to give in their place.
_SAID = {
    "nodes": "nodes",
    "ntasks": "processes_per_node",
    "ntasks-per-node": "processes_per_node",
    "tasks-per-node": "processes_per_node",
    "time": "time",
    "requeue": "requeue",
    "no-requeue": "requeue",
    "array": "-m",
}
# Options that make sbatch do something other than queue a script, or, as wait does, return later.
_OF_SBATCH_ALONE = ("wrap", "test-only", "help", "usage", "version", "wait")
_TIME = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,4}):([0-5][0-9])(?::([0-5][0-9]))?")
_WARNING = "USR1@120"  # signal@seconds before the job's time limit
# USR1 and TERM make gpipe write a checkpoint. Not with the prefix B:, which sends them to the batch shell only.
_SIGNAL = re.compile(r"(?:R:)?(?:(?:SIG)?(?:USR1|TERM)|10|15)(?:@([0-9]{1,5}))?", re.IGNORECASE)
_SIGNAL_SECONDS = 60  # SLURM's default lead of a signal before the time limit
_BEFORE_WARNING = 180  # seconds: SLURM may send the signal 60 s early, and a run takes 1 to 2 minutes to start


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What `conf/launch.yaml` adds to the settings of `gpipe train`. Raises InputError if two contradict each other."""

    nodes: Annotated[int, Within(1, 10_000)]
    gpus_per_node: Annotated[int, Within(0, 64)]
    processes_per_node: Annotated[int, Within(1, 1024)] | None
    time: str | None  # may be hours:minutes, which SLURM reads as minutes:seconds: it gets `time_limit`
    requeue: bool
    submit: bool
    sbatch: dict[Any, Any]  # option (underscores stand for dashes) -> value

    def __post_init__(self) -> None:
        if self.gpus_per_node and self.processes_here > self.gpus_per_node:
            why = f"each needs a GPU, and a node has gpus_per_node={self.gpus_per_node}; use as many or fewer"
            raise RefusedError("processes_per_node", self.processes_here, why)
        for key, value in self.sbatch.items():
            _check_option(str(key), value)
        self._check_time()

    def _check_time(self) -> None:
        """Raises InputError for an invalid time or signal, and if the signal would come before the run's first step."""
        warned = 0
        if self.requeue and self.signal not in (None, False):
            found = _SIGNAL.fullmatch(show(self.signal))
            if found is None:
                why = "must be USR1 or TERM, on which gpipe writes a checkpoint, for all processes of the job"
                use = "for example sbatch.signal=USR1@300, or use requeue=false"
                raise SettingError("sbatch.signal", self.signal, f"{why}; {use}")
            warned = int(found[1] or _SIGNAL_SECONDS)
        if self.time is None:
            return
        if (parts := _TIME.fullmatch(self.time)) is None:
            why = "must be [days-]hours:minutes[:seconds], minutes and seconds below 60"
            raise SettingError("time", self.time, f"{why}; for example time=24:00:00")
        days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
        given = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        if given == 0:
            why = "must be above 0, which SLURM reads as no limit"
            raise SettingError("time", self.time, f"{why}; use time=null for the partition's, or time=24:00:00")
        if warned and given < (least := warned + _BEFORE_WARNING):
            minutes, seconds = divmod(least, 60)
            use = f"use time={minutes // 60}:{minutes % 60:02}:{seconds:02} or more, or requeue=false"
            why = f"SLURM warns a job {warned} to {warned + 60} s before its time ends"
            why += ", and a run that is warned before its first step would be queued again for ever"
            raise RefusedError("time", self.time, f"{why}; {use}")

    @property
    def options(self) -> dict[str, Any]:
        """`sbatch` with the options' names as sbatch spells them."""
        return {_long(str(key)): value for key, value in self.sbatch.items()}

    @property
    def time_limit(self) -> str | None:
        """`time` as SLURM reads it, always with seconds."""
        return None if self.time is None else self.time + ":00" * (2 - self.time.count(":"))

    @property
    def signal(self) -> object:
        """The value of sbatch's --signal: what SLURM sends before the time limit; None or False: nothing."""
        return self.options.get("signal", _WARNING if self.requeue else None)

    @property
    def processes_here(self) -> int:
        """Processes on each node."""
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_here


def _check_option(key: str, value: object) -> None:
    """Raises InputError for an option that sbatch does not have or a script must not set, and for an invalid value.

    An option unlike all in the table is accepted: it may come from a newer SLURM or a plugin of the cluster (SPANK),
    and sbatch refuses an unknown one before it queues anything.
    """
    option, setting = _long(key), f"sbatch.{key}"
    if option in _SAID:
        raise RefusedError(setting, value, f"gpipe has a setting for it; give {_SAID[option]} instead")
    if option in _OF_SBATCH_ALONE:
        raise SettingError(setting, value, "belongs on the command line of sbatch, not in a script; leave it out")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", option):
        raise SettingError(setting, value, "must be the long name of an option of sbatch, as sbatch.partition")
    if option not in _OPTIONS and (hint := nearest(option, _OPTIONS, _TYPO)):
        raise SettingError(setting, value, f"sbatch has no such option{hint}")
    several = value if isinstance(value, list) else [value]
    texts = [str(one) for one in several if isinstance(one, str | int | float)]
    if value is not None and not (texts and len(texts) == len(several) and all(map(is_one_line, texts))):
        why = "must be a text of one line that is not empty, or a list of such texts"
        raise SettingError(setting, value, f"{why}; for example {setting}=[a,b]")


def _long(key: str) -> str:
    return key.replace("_", "-")
