"""The parent's side of `gpipe check against=torch`: other programs take the same step, and their gradients, speed and
memory are compared with ours.

Each way to train is a contestant; its processes are started anew in every round, one contestant after another, so that
a slow minute of the machine hits all of them. Ratios of speeds are taken within a round.
"""

import fnmatch
import inspect
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console

from gpipe_cli.config.groups import choice_of
from gpipe_cli.config.settings import CheckSettings, PartitionConfig, TrainConfig
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.distributed.torchrun import refuse_torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import temporary_folder
from gpipe_cli.launch.job import Reason
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.pipeline.schedule.named_schedules import AUTO_SCHEDULE, SCHEDULES
from gpipe_cli.pipeline.schedule.schedule_file import csv_of
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.reporting.run.lines import show_facts
from gpipe_cli.reporting.tables.against import AgainstReport, Measured, Row, show_against, write_against
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.units import plural
from gpipe_cli.verify import against as verify

# Our counterpart of a schedule of torch, by its name without `Schedule`. Our executor performs the others in torch's
# order; if it cannot read that, 1f1b stands beside them.
_COUNTERPARTS = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved", "ZBVZeroBubble": "zbv"}
# Schedules of torch whose stages go up the devices and down again: of device p, stages p and 2 P - 1 - p.
_V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
_TO_TORCH = ("zero_bubble", AUTO_SCHEDULE)  # schedules of ours that torch performs from a file


@dataclass(eq=False)
class _Contestant:
    program: verify.Program
    schedule: str  # for people; of torch the name of a class, or of our order in a file
    spec: PipelineSpec | None  # None: it does not take part, as `failure` says
    gradients: Path  # the folder of its first step's gradients
    file: str = ""  # of our order, for torch
    failure: str = ""
    rounds: list[list[verify.Ran]] = field(default_factory=list)

    def measured(self) -> Measured | None:
        if not self.rounds:
            return None
        # a step ends when its slowest process does
        steps = [list(map(max, zip(*(ran.seconds for ran in one), strict=True))) for one in self.rounds]
        of_all = [ran for one in self.rounds for ran in one]
        return Measured(of_all[0].samples, steps, max(ran.memory_bytes for ran in of_all))


# A contestant of another program and ours beside it; None: ours is known after the first round.
_Pair = tuple[_Contestant, _Contestant | None]


def run_against(config: TrainConfig, settings: CheckSettings, folder: Path) -> int:
    """Compare with the other program, and write check.json into `folder`. Returns the exit code: 0 the gradients agree,
    1 some differ or cannot be compared. Raises InputError for what the user can fix."""
    refuse_torchrun("gpipe check starts its own processes; call it without torchrun")
    _refuse(config, settings)
    console = Console()
    with (
        tempfile.TemporaryDirectory(dir=temporary_folder()) as files,
        console.status("starting ...") as status,  # shown in a terminal only
    ):
        match = _Match(config, settings, Path(files))
        show_facts(console, match.facts())
        for number in range(settings.against_rounds):
            match.hold(number, status.update)
        report = match.report()
    try:
        write_against(folder, report)
    finally:  # show the verdict even if it cannot be written
        show_against(console, folder, report)
    return 0 if report.agrees else 1


def _refuse(config: TrainConfig, settings: CheckSettings) -> None:
    against = f"against={settings.against}"
    if config.partitions == 1:
        raise RefusedError("partitions", 1, f"{against} needs a pipeline of two stages or more; use partitions=2")
    if config.replicas > 1:
        raise RefusedError("replicas", config.replicas, f"{against} compares one pipeline; use replicas=1")
    if config.compile:
        raise RefusedError("compile", True, f"{against} compares the layers as they are; use compile=false")
    if config.init_from is not None:
        raise RefusedError("init_from", config.init_from, f"{against} compares at the initial weights; leave it out")
    if config.schedule_is_file:
        raise RefusedError("schedule", config.schedule, f"{against} tries all schedules by itself; leave it out")
    if settings.against == "torchgpipe":
        if find_spec("torchgpipe") is None:
            raise InputError(f"{against}: torchgpipe is not installed; pip install 'gpipe-cli[torchgpipe]'")
        if config.precision == "bfloat16":
            why = f"{against} runs layers in threads of its own, which autocast does not reach; use precision=float32"
            raise RefusedError("precision", config.precision, why)


class _Match:
    """The contestants, and pairs of them that are compared: another program's, and ours beside it."""

    def __init__(self, config: TrainConfig, settings: CheckSettings, files: Path) -> None:
        each = config.stages_per_process or 1
        self._devices = -(-config.partitions // each)
        threads = config.threads or max(1, usable_cores() // self._devices)
        mode = "never" if config.recompute == "auto" else config.recompute
        if settings.against == "torchgpipe":  # it seeds its micro-batches in another way
            zero = {key: 0.0 for key in ("dropout", "attention_dropout", "drop_path") if hasattr(config.model, key)}
            config = replace(config, model=replace(config.model, **zero))  # type: ignore[arg-type]  # fields that it has
        self._settings, self._files = settings, files
        self._config = replace(
            config, threads=threads, recompute=mode, schedule="1f1b", stages_per_process=None, placement=None,
            executor="distributed", hardware=replace(config.hardware, memory_gib=None), ema_decay=0.0,
            gradient_clipping=0.0,
        )  # fmt: skip
        self._given = config
        self._profile: ModelProfile = profile_model(self._config)
        self._several = self._devices * max(2, each)  # stages where each process has several
        self._contestants: dict[tuple[str, str], _Contestant] = {}
        self._orders = self._ours("gpipe"), self._ours("1f1b")
        if self._orders[0].spec is None:
            raise InputError(self._orders[0].failure)
        makers = self._torchs() if settings.against == "torch" else {"torchgpipe": self._torchgpipe}
        makers["pytorch"] = self._plain
        self._pairs = [makers[name]() for name in _chosen(settings.against_schedules, [*makers])]

    def facts(self) -> list[tuple[str, str]]:
        config = self._config
        ours = f"{plural(self._devices, 'process')}, {plural(config.threads or 1, 'thread')} each"
        theirs = f"torch {torch.__version__}" if self._settings.against == "torch" else "torchgpipe, in one process"
        mode = f"recompute={config.recompute}"
        facts = [
            ("model", f"{choice_of(config.model)}: {plural(len(self._layers), 'layer')}"),
            ("against", f"{theirs}; {ours}"),
            ("measured", f"{plural(self._settings.against_rounds, 'round')} in turns, median of "
                         f"{plural(self._settings.against_steps, 'step')}; gpipe has {mode}"),
        ]  # fmt: skip
        if self._settings.against == "torchgpipe":
            facts.append(("left out", "dropout, which torchgpipe seeds in another way, is 0 for both"))
        return facts

    @property
    def _layers(self) -> list[str]:
        return [cost.name for cost in self._profile.costs]

    def _torchs(self) -> dict[str, Callable[[], _Pair]]:
        """For each schedule of torch, and each of ours that torch is to perform, a function that makes the pair."""
        schedules = import_module(verify.SCHEDULES_OF_TORCH)
        found: dict[str, Callable[[], _Pair]] = {
            name: partial(self._of_torch, name, single=issubclass(kind, schedules.PipelineScheduleSingle))
            for name, kind in vars(schedules).items()
            if name.startswith("Schedule") and inspect.isclass(kind)
        }
        return found | {name: partial(self._to_torch, name) for name in _TO_TORCH}

    def _to_torch(self, name: str) -> _Pair:
        ours = self._ours(name)
        theirs = self._contestant("torch", name, ours.spec, ours.failure)
        if theirs.spec is not None:
            file = self._files / f"{name}.csv"
            file.write_text(csv_of(theirs.spec.order, theirs.spec.layout.process_of_stage), encoding="utf-8")
            theirs.file = str(file)
        return theirs, ours

    def _of_torch(self, name: str, *, single: bool) -> _Pair:
        if single:
            spec, why = self._spec(self._devices)
        elif name not in _V:
            spec, why = self._spec(
                self._several, schedule="interleaved", stages_per_process=self._several // self._devices
            )
        else:
            spec, why = self._spec(2 * self._devices, placement="v", stages_per_process=2)
        counterpart = _COUNTERPARTS.get(name.removeprefix("Schedule"))
        ours = self._ours(counterpart) if counterpart in SCHEDULES else None
        return self._contestant("torch", name, spec, why), ours

    def _torchgpipe(self) -> _Pair:
        spec, why = self._spec(self._devices, schedule="gpipe", executor="in_process")
        ours = self._contestant("gpipe", "gpipe, one process", spec, why)
        return self._contestant("torchgpipe", "torchgpipe", spec, why), ours

    def _plain(self) -> _Pair:
        threads = self._devices * (self._config.threads or 1)
        spec, why = self._spec(1, executor="in_process", threads=threads, recompute="never")
        return self._contestant("pytorch", f"plain PyTorch, {plural(threads, 'thread')}", spec, why), None

    def _ours(self, name: str) -> _Contestant:
        """Our contestant with the schedule of this name."""
        if name in ("interleaved", "zbv", AUTO_SCHEDULE):
            each = self._several // self._devices if name != "zbv" else 2
            spec, why = self._spec(each * self._devices, schedule=name, stages_per_process=each)
        else:
            spec, why = self._spec(self._devices, schedule=name)
        return self._contestant("gpipe", name, spec, why)

    def _spec(self, partitions: int, **settings: object) -> tuple[PipelineSpec | None, str]:
        """The pipeline with so many stages, or why there is none."""
        given = self._given
        cut = given.partition if partitions == given.partitions else PartitionConfig(None)
        settings |= {"partitions": partitions, "partition": cut}
        config = replace(self._config, **settings)  # type: ignore[arg-type]  # fields that it has
        try:
            return make_pipeline_spec(config, self._profile), ""
        except InputError as error:
            return None, str(error)

    def _contestant(self, program: verify.Program, schedule: str, spec: PipelineSpec | None, why: str) -> _Contestant:
        crossing = () if spec is None else chain.from_iterable(spec.training_boundaries)
        if program == "torch" and any(tensor.skip for tensor in crossing):
            spec, why = None, "torch's stages pass nothing over another stage, and the model has skips"
        if program == "torchgpipe" and self._profile.tied:
            spec, why = None, "torchgpipe refuses layers that share a parameter, and the model has tied weights"
        if program == "torchgpipe" and self._profile.skips:
            spec, why = None, "torchgpipe passes on only what its own @skippable layers stash, and the model has skips"
        return self._add(_Contestant(program, schedule, spec, self._files, failure=why))

    def _add(self, one: _Contestant) -> _Contestant:
        known = self._contestants.get((one.program, one.schedule))
        if known is not None:
            return known
        one.gradients = self._files / str(len(self._contestants))
        one.rounds = []
        one.gradients.mkdir()
        self._contestants[one.program, one.schedule] = one
        return one

    def hold(self, number: int, begins: Callable[[str], None]) -> None:
        """Round `number`: all contestants that have not failed, in turns."""
        for one in list(self._contestants.values()):
            self._run(one, number, begins)
        if number:
            return
        for place, (theirs, ours) in enumerate(self._pairs):
            if ours is None and theirs.program == "torch":
                beside = self._in_their_order(theirs)
                if beside not in self._orders:
                    self._run(beside, number, begins)
                self._pairs[place] = theirs, beside

    def _in_their_order(self, theirs: _Contestant) -> _Contestant:
        """Our contestant that performs the order of a schedule of torch, or 1f1b if we cannot read it."""
        file = theirs.gradients / verify.ORDER_FILE
        if theirs.spec is not None and file.is_file():
            spec, _ = self._spec(theirs.spec.partitions, schedule=str(file))
            if spec is not None:
                return self._add(_Contestant("gpipe", f"order of {theirs.schedule}", spec, self._files))
        return self._orders[1]

    def _run(self, one: _Contestant, number: int, begins: Callable[[str], None]) -> None:
        if one.failure or one.spec is None:
            return
        begins(f"round {number + 1} of {self._settings.against_rounds}: {one.program} {one.schedule}")
        ran: list[verify.Ran] = []
        failed: dict[int, str] = {}

        def on_message(message: object) -> None:
            match message:
                case verify.Ran():
                    ran.append(message)
                case verify.Failed():
                    failed[message.process] = message.text

        config, spec = self._config, one.spec
        own = replace(config, partitions=spec.partitions, partition=PartitionConfig(None))  # the spec has the cut
        task = partial(
            verify.run, own, spec, program=one.program, schedule=one.file or one.schedule,
            steps=self._settings.against_steps, folder=one.gradients,
        )  # fmt: skip
        failure = run_task(task, spec, config.timeout_seconds, on_message)
        if failure is None:
            one.rounds.append(ran)
        elif failure.reason is Reason.USER:
            raise InputError(failure.text)
        else:
            one.failure = failed.get(failure.process, " ".join(failure.text.split()))

    def report(self) -> AgainstReport:
        rows = [self._row(theirs, ours) for theirs, ours in self._pairs]
        assert self._settings.against is not None
        return AgainstReport(
            against=self._settings.against,
            version=torch.__version__,
            rows=tuple(rows),
            config=asdict(self._given),
        )

    def _row(self, theirs: _Contestant, ours: _Contestant | None) -> Row:
        if ours is None:  # plain PyTorch stands beside the fastest of ours
            able = [one for one in self._contestants.values() if one.program == "gpipe"]
            times = [(took.seconds, at) for at, one in enumerate(able) if (took := one.measured()) is not None]
            ours = able[min(times)[1]] if times else self._orders[1]
        row = Row(
            program=theirs.program, schedule=theirs.schedule,
            stages=0 if theirs.spec is None else theirs.spec.partitions, verdict="fails",
            ours=ours.schedule, measured=theirs.measured(), ours_measured=ours.measured(),
        )  # fmt: skip
        if theirs.spec is None:
            return replace(row, verdict="left out", text=theirs.failure)
        if theirs.failure:
            return replace(row, text=theirs.failure)
        failed = next((one for one in (*self._orders, ours) if one.failure), None)
        if failed is not None:
            return replace(row, verdict="ours fails", text=f"gpipe {failed.schedule}: {failed.failure}")
        own = self._distance(ours)
        if own.units > verify.MOST_UNITS:
            text = f"gpipe {ours.schedule} differs in layer {own.layer} by {own.units:.1e} units; gpipe check says more"
            return replace(row, verdict="ours fails", text=text)
        found = self._distance(theirs)
        if found.units == 0:
            return replace(row, verdict="identical")
        row = replace(row, verdict="differs", layer=found.layer, units=found.units, share=found.share)
        return row if found.units > verify.MOST_UNITS else replace(row, verdict="within the order of summation")

    def _distance(self, one: _Contestant) -> verify.Distance:
        first, second = (of.gradients for of in self._orders)
        layers, terms = self._layers, _terms(self._orders[0])
        return verify.distance(one.gradients, (first, second), layers, terms, self._config.precision)


def _chosen(patterns: tuple[str, ...] | None, names: list[str]) -> list[str]:
    """Those of `names` that a pattern matches. Raises RefusedError for a pattern that matches none."""
    for pattern in patterns or ():
        if not fnmatch.filter(names, pattern):
            raise RefusedError("against_schedules", pattern, f"matches none of {', '.join(names)}; use some of these")
    return [name for name in names if patterns is None or any(fnmatch.fnmatch(name, one) for one in patterns)]


def _terms(one: _Contestant) -> int:
    """How many terms a sum over the samples and the positions of the mini-batch may have."""
    assert one.spec is not None
    return math.prod(one.spec.inputs[0].shape(one.rounds[0][0].samples, one.spec.lengths))
