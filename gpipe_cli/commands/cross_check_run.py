"""The parent's side of `gpipe check against=torch`: other programs take the same step, and their gradients, speed and
memory are compared with ours.

Each way to train is a competitor. In every round they run in sequence, each with newly started processes, so that
a slow minute of the machine hits all of them. Ratios of speeds are taken within a round.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from pathlib import Path

import torch
from rich.console import Console

from gpipe_cli.commands.prepare_run import check_feasible
from gpipe_cli.config.groups import group_choice
from gpipe_cli.config.settings import CheckSettings, PartitionConfig, TrainConfig
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.launch.fork_server import temporary_folder
from gpipe_cli.launch.job import Reason
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.planner.process_layout import default_threads
from gpipe_cli.reporting.run.lines import print_fields
from gpipe_cli.reporting.tables.against import AgainstReport, Measurement, Row, show_against
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.training.data_feed import check_data
from gpipe_cli.units import plural
from gpipe_cli.verify import cross_check as verify
from gpipe_cli.verify.self_check import REFERENCES


@dataclass(eq=False)
class _Competitor:
    program: verify.Program
    schedule: str  # the name to show; for torch the name of its class
    spec: PipelineSpec
    gradients: Path  # the folder with the gradients of the competitor's first step
    excluded_reason: str = ""  # why the competitor does not take part
    failure: str = ""
    rounds: list[list[verify.TimedRun]] = field(default_factory=list)

    def seconds(self) -> float:
        """Seconds of a step; infinite if no step was measured."""
        measurement = self.measurement()
        return math.inf if measurement is None else measurement.seconds

    def measurement(self) -> Measurement | None:
        if not self.rounds:
            return None
        # a step ends when its slowest process does
        steps = [list(map(max, zip(*(ran.seconds for ran in runs), strict=True))) for runs in self.rounds]
        all_runs = [ran for runs in self.rounds for ran in runs]
        return Measurement(all_runs[0].samples, steps, max(ran.memory_bytes for ran in all_runs))


def run_cross_check(config: TrainConfig, settings: CheckSettings, folder: Path) -> int:
    """Compare with the other program, and write check.json into `folder`. Returns the exit code: 0 the gradients agree,
    1 some differ or cannot be compared. Raises InputError for what the user can fix."""
    _check_comparable(config, settings)
    check_feasible(config)
    check_data(config)
    console = Console()
    with (
        tempfile.TemporaryDirectory(dir=temporary_folder()) as files,
        console.status("starting ...") as status,  # shown in a terminal only
    ):
        cross_check = _CrossCheck(config, settings, Path(files))
        print_fields(console, cross_check.facts())
        for number in range(settings.against_rounds):
            cross_check.run_round(number, status.update)
        report = cross_check.report()
    show_against(console, folder, report)
    return 0 if report.agrees else 1


def _check_comparable(config: TrainConfig, settings: CheckSettings) -> None:
    against = f"against={settings.against}"
    single_stage = config.partitions == 1 and settings.against == "torch"
    for wrong, key, why in (
        (single_stage, "partitions", "needs a pipeline of two stages or more; use partitions=2"),
        (config.replicas > 1, "replicas", "compares one pipeline; use replicas=1"),
        (config.compile, "compile", "compares the layers as they are; use compile=false"),
        (config.init_from is not None, "init_from", "compares at the initial weights; remove it"),
        (config.stages_per_process is not None, "stages_per_process", "has a stage in each process; remove it"),
        (config.schedule_is_file, "schedule", "tries gpipe and 1f1b; remove it"),
    ):
        if wrong:
            raise InvalidSettingError(key, getattr(config, key), f"{against} {why}")
    if settings.against == "torchgpipe" and find_spec("torchgpipe") is None:
        raise InputError(f"{against}: torchgpipe is not installed; pip install 'gpipe-cli[torchgpipe]'")


class _CrossCheck:
    """All competitors: ours with each of `REFERENCES`, the other program's, and plain PyTorch."""

    def __init__(self, config: TrainConfig, settings: CheckSettings, files: Path) -> None:
        distributed = settings.against == "torch"
        if not distributed:  # torchgpipe seeds its micro-batches in another way
            zero = {key: 0.0 for key in ("dropout", "attention_dropout", "drop_path") if hasattr(config.model, key)}
            config = replace(config, model=replace(config.model, **zero))  # type: ignore[arg-type]  # fields that it has
        threads = config.threads or default_threads(config.partitions)
        self._settings, self._files, self._requested_config = settings, files, config
        self._config = replace(
            config, threads=threads, recompute="never" if config.recompute == "auto" else config.recompute,
            executor="distributed" if distributed else "in_process", placement=None, ema_decay=0.0,
            gradient_clipping=0.0, hardware=replace(config.hardware, memory_gib=None),
        )  # fmt: skip
        self._profile = profile_model(self._config)
        self._layers = [cost.name for cost in self._profile.costs]
        self._ours = [self._competitor("gpipe", name, schedule=name) for name in REFERENCES]
        gpipe, one_f_one_b = self._ours
        theirs = {"ScheduleGPipe": gpipe, "Schedule1F1B": one_f_one_b} if distributed else {"torchgpipe": gpipe}
        program: verify.Program = "torch" if distributed else "torchgpipe"
        # each competitor of another program, and ours that it is compared with; None: the fastest of ours
        self._pairs: list[tuple[_Competitor, _Competitor | None]] = [
            (self._competitor(program, name, schedule=ours.schedule), ours) for name, ours in theirs.items()
        ]
        threads = usable_cores()  # more would share cores, and flatter ours
        plain = self._competitor(
            "pytorch", f"plain PyTorch, {plural(threads, 'thread')}", schedule="gpipe", partitions=1, threads=threads,
            partition=PartitionConfig(None), executor="in_process", recompute="never",
        )  # fmt: skip
        self._pairs += [(plain, None)]

    def _competitor(self, program: verify.Program, name: str, **settings: object) -> _Competitor:
        config = replace(self._config, **settings)  # type: ignore[arg-type]  # fields that it has
        spec = make_pipeline_spec(config, self._profile)
        why = ""
        if program == "torch" and any(tensor.skip for tensor in chain.from_iterable(spec.training_boundaries)):
            why = "torch's stages pass nothing over another stage, and the model has skips"
        if program == "torchgpipe" and self._profile.tied:
            why = "torchgpipe refuses layers that share a parameter, and the model has tied weights"
        if program == "torchgpipe" and self._profile.skips:
            why = "torchgpipe passes on only what its own @skippable layers stash, and the model has skips"
        folder = self._files / name
        folder.mkdir()
        return _Competitor(program, name, spec, folder, why)

    def facts(self) -> list[tuple[str, str]]:
        config, settings = self._config, self._settings
        theirs = f"torch {torch.__version__}" if settings.against == "torch" else "torchgpipe"
        processes = plural(self._ours[0].spec.layout.processes, "process")
        facts = [
            ("model", f"{group_choice(config.model)}: {plural(len(self._layers), 'layer')}"),
            ("against", f"{theirs}; {processes}, {plural(config.threads or 1, 'thread')} each"),
            ("measured", f"{plural(settings.against_rounds, 'round')} in turns, median of "
                         f"{plural(settings.against_steps, 'step')}; gpipe has recompute={config.recompute}"),
        ]  # fmt: skip
        if settings.against == "torchgpipe":
            facts.append(("left out", "dropout, which torchgpipe seeds in another way, is 0 for both"))
        return facts

    def run_round(self, number: int, show_status: Callable[[str], None]) -> None:
        """Round `number`: all competitors that have not failed, in sequence."""
        for competitor in (*self._ours, *(theirs for theirs, _ in self._pairs)):
            if not competitor.excluded_reason and not competitor.failure:
                what = f"{competitor.program} {competitor.schedule}"
                show_status(f"round {number + 1} of {self._settings.against_rounds}: {what}")
                self._run(competitor)

    def _run(self, competitor: _Competitor) -> None:
        runs: list[verify.TimedRun] = []
        failed: dict[int, str] = {}

        def on_message(message: object) -> None:
            match message:
                case verify.TimedRun():
                    runs.append(message)
                case verify.ProgramFailed():
                    failed[message.rank] = message.text

        task = partial(
            verify.run, self._config, competitor.spec, program=competitor.program, schedule=competitor.schedule,
            steps=self._settings.against_steps, folder=competitor.gradients,
        )  # fmt: skip
        failure = run_task(task, competitor.spec, self._config.timeout_seconds, on_message)
        if failure is None:
            competitor.rounds.append(runs)
        elif failure.reason is Reason.USER:
            raise InputError(failure.text)
        else:
            competitor.failure = failed.get(failure.rank, " ".join(failure.text.split()))

    def report(self) -> AgainstReport:
        assert self._settings.against is not None
        return AgainstReport(
            against=self._settings.against,
            version=torch.__version__,
            rows=tuple(self._row(theirs, ours) for theirs, ours in self._pairs),
            config=asdict(self._requested_config),
        )

    def _row(self, theirs: _Competitor, ours: _Competitor | None) -> Row:
        if ours is None:
            ours = min(self._ours, key=_Competitor.seconds)
        row = Row(
            program=theirs.program, schedule=theirs.schedule, verdict="fails", ours=ours.schedule,
            measured=theirs.measurement(), ours_measured=ours.measurement(),
        )  # fmt: skip
        if theirs.excluded_reason:
            return replace(row, verdict="left out", text=theirs.excluded_reason)
        if theirs.failure:
            return replace(row, text=theirs.failure)
        for competitor in self._ours:
            if competitor.failure:
                why = f"gpipe {competitor.schedule}: {competitor.failure}"
                return replace(row, verdict="ours fails", text=why)
        first, second = (competitor.gradients for competitor in self._ours)
        references = (first, second)
        share = verify.EPSILON[self._config.precision] * _terms(self._ours[0]) ** 0.5
        nearest = min(
            (verify.distance(theirs.gradients, folder, references, self._layers, share) for folder in references),
            key=attrgetter("units"),
        )
        if nearest.units == 0:
            return replace(row, verdict="identical")
        row = replace(row, verdict="differs", layer=nearest.layer, units=nearest.units, share=nearest.share)
        return row if nearest.units > verify.MAX_UNITS else replace(row, verdict="within the order of summation")


def _terms(competitor: _Competitor) -> int:
    """How many terms a sum over the samples and the positions of the mini-batch may have."""
    spec, samples = competitor.spec, competitor.rounds[0][0].samples
    return math.prod(spec.inputs[0].shape(samples, spec.lengths))
