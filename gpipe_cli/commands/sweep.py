"""A sweep, `gpipe train -m micro_batches=1,4,8`: one fresh process tree for each run, one after the other.

Hydra's own launcher runs all jobs in one process, where a failed job keeps its tensors, process groups and CUDA context
alive for the next one. This launcher starts `gpipe train` anew for each run; Hydra's grammar and sweepers stay as they
are. A failing run is reported at once and the others go on.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpipe_cli.reporting.units import duration, percent, perplexity, rate

GRACE_SECONDS = 3.5  # from Ctrl-C until a run that has not ended by itself is killed; a command ends within 5 s
INTERRUPTED = 130


@dataclass(frozen=True)
class Run:
    """What became of one run."""

    differs: str  # `micro_batches=4`
    folder: Path
    exit_code: int
    seconds: float
    result: dict[str, object]  # the run's result.json, empty if it wrote none

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def status(self) -> str:
        if self.exit_code == INTERRUPTED:
            return "interrupted"
        return f"failed ({self.exit_code})" if self.failed else str(self.result.get("status", "completed"))


class SweepLauncher(Launcher):
    """Starts a process for each job of Hydra's multirun; what became of it goes to the task function."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.report = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        jobs = [[o for o in job if not o.lstrip("+~").startswith("hydra")] for job in job_overrides]
        options = _options(self.config)
        sweep_folder = Path(self.config.hydra.sweep.dir)
        names = differences(jobs, list(self.config.hydra.overrides.task))
        returns = []
        for index, (job, name) in enumerate(zip(jobs, names, strict=True)):
            title = f"run {initial_job_idx + index + 1} of {initial_job_idx + len(jobs)}: {name}"
            run, interrupted = _perform(title, name, [*options, *job], free_folder(sweep_folder, name))
            self.report(run)
            if interrupted:
                raise KeyboardInterrupt
            # A sweeper that searches gets the accuracy; that a run failed is not Hydra's to report.
            returns.append(JobReturn(overrides=job, status=JobStatus.COMPLETED))
            returns[-1].return_value = top1(run.result)
        return returns


def register_launcher() -> None:
    """Lets `hydra.launcher._target_` in conf/train.yaml name the launcher; Hydra wants names in `hydra_plugins`."""
    Plugins.instance().class_name_to_class["hydra_plugins.gpipe_cli.SweepLauncher"] = SweepLauncher


def differences(jobs: Sequence[Sequence[str]], task: Sequence[str]) -> list[str]:
    """What tells each job of a sweep from the others, `micro_batches=4,partitions=2`; `task` is what was typed."""

    def varies(override: str) -> bool:
        return override not in task and (len(jobs) == 1 or any(override not in job for job in jobs))

    return [",".join(sorted(override for override in job if varies(override))) or "run" for job in jobs]


def free_folder(parent: Path, name: str) -> Path:
    """A folder for the run `name` that does not exist yet; its name is one that every file system takes."""
    safe = re.sub(r"[^\w.,=+\[\]-]", "_", name.replace("'", "").replace('"', ""))[:150].strip(".") or "run"
    folder, count = parent / safe, 1
    while folder.exists():
        count += 1
        folder = parent / f"{safe}-{count}"
    return folder


def top1(result: dict[str, object]) -> float | None:
    """The accuracy on the test set in a run's result, if there is one."""
    return _of_test(result, "top1")


def show_table(runs: Sequence[Run]) -> None:
    """Prints what became of the runs."""
    # As the banner's: no lines between columns, so that names stay whole at 80 columns.
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("run", justify="right")
    table.add_column("what differs", overflow="fold")
    table.add_column("status", no_wrap=True)
    columns = _columns([run.result for run in runs])
    for heading in (*(heading for heading, _ in columns), "step", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, run in enumerate(runs, start=1):
        table.add_row(
            str(number),
            escape(run.differs),
            f"[red]{run.status}[/red]" if run.failed else run.status,
            *(cell(run.result) for _, cell in columns),
            "-" if (step := _number(run.result.get("step_seconds"))) is None else duration(step),
            duration(run.seconds),
        )
    console = Console()
    console.rule(Text(f"sweep {runs[0].folder.parent}"), align="left")
    console.print(table)


def _columns(results: Sequence[dict[str, object]]) -> list[tuple[str, Callable[[dict[str, object]], str]]]:
    """What runs are compared by: headings, and the cell of a result. A sweep over images and text has those of both."""
    text = {result.get("task", "classification") != "classification" for result in results if result}
    columns: list[tuple[str, Callable[[dict[str, object]], str]]] = []
    if text != {True}:
        columns.append(("top-1", lambda result: percent(top1(result))))
    if True in text:
        columns.append(("perplexity", lambda result: perplexity(_of_test(result, "perplexity"))))
    if text != {True}:
        columns.append(("samples/s", lambda result: rate(_number(result.get("samples_per_second")))))
    if True in text:
        columns.append(("tokens/s", lambda result: rate(_number(result.get("tokens_per_second")))))
    return columns


def _perform(title: str, name: str, arguments: Sequence[str], folder: Path) -> tuple[Run, bool]:
    """Performs one run in a process of its own; also returns whether the sweep was interrupted meanwhile."""
    console = Console()
    console.rule(Text(title), align="left")
    quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    command = [sys.executable, "-m", "gpipe_cli", "train", *arguments, f"run_folder='{quoted}'"]
    begin = time.monotonic()
    exit_code, error, interrupted = run_process(command)
    run = Run(name, folder, exit_code, time.monotonic() - begin, _result(folder))
    if run.failed:
        # One that failed while it trained says so in its summary; stderr is for what went wrong before.
        why = "" if interrupted else f": {escape(str(run.result.get('error') or error))}"
        console.print(f"[red]{run.status}[/red] {escape(name)}{why}", soft_wrap=True, highlight=False)
    return run, interrupted


def run_process(command: Sequence[str]) -> tuple[int, str, bool]:
    """Runs the command to its end, its output shown as it comes.

    Returns its exit code, its error line, and whether it was ended because we were interrupted (the code is then 130).
    """
    tail, interrupted = bytearray(), False
    # A session of its own: Ctrl-C reaches the run through us and only once, and its whole tree can be ended together.
    with _interruptible(), subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True) as process:
        assert process.stderr is not None
        try:
            copier = threading.Thread(target=_copy, args=(process.stderr.fileno(), tail), daemon=True)
            copier.start()
            exit_code = process.wait()
        except KeyboardInterrupt:
            interrupted, exit_code = True, INTERRUPTED
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                process.wait(GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):  # its whole tree has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
        copier.join(0.5)  # a process that outlives its run may hold the pipe open
    return exit_code, error_line(tail.decode(errors="replace")) or f"exit code {exit_code}", interrupted


def error_line(stderr: str) -> str:
    """The line of a run's stderr that says what went wrong: gpipe's own, or the last exception's, or the last one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    own = [line.removeprefix("gpipe train: ") for line in lines if line.startswith("gpipe train: ")]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (own or raised or lines or [""])[-1]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A closed terminal and `kill` end a sweep as Ctrl-C does: the run has a session of its own and would live on."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _copy(descriptor: int, tail: bytearray) -> None:
    """Copies what comes to our own stderr at once, unfinished lines included; `tail` keeps the end of it."""
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 65536):
            sys.stderr.write(chunk.decode(errors="replace"))
            sys.stderr.flush()
            tail += chunk
            del tail[:-8192]


def _options(config: DictConfig) -> list[str]:
    """The options of Hydra that say which configuration a run begins with."""
    options = ["-cn", str(config.hydra.job.config_name)]
    for source in config.hydra.runtime.config_sources:
        if source.provider == "command-line":
            options += ["-cd", str(source.path)]
        elif source.provider == "main" and source.schema == "file":
            options += ["-cp", str(source.path)]
    return options


def _result(folder: Path) -> dict[str, object]:
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _of_test(result: dict[str, object], score: str) -> float | None:
    test = result.get("test")
    return _number(test.get(score)) if isinstance(test, dict) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
