"""What a sweep runs: all combinations of its settings, and for measurements the baseline of their table."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from gpipe_cli.commands.command_line import CommandLine, setting_values
from gpipe_cli.commands.compose_config import TRAINING_KEYS, ConfigComposer, combinations
from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.commands.sweep_folder import SweepFolder
from gpipe_cli.config.settings import (
    ONE_DEVICE,
    allow_target,
    format_target_setting,
    key_of,
    single_device_baseline,
    target_of,
)
from gpipe_cli.errors import InputError, InvalidValueError
from gpipe_cli.reporting.tables.sweep import NOT_RETRYABLE, Run, bench_status

# Turns a tree and the typed settings into a request; raises InputError for a wrong setting.
MakeRequest = Callable[[DictConfig, Mapping[str, object]], RunRequest]


@dataclass(frozen=True)
class Cell:
    """A combination of settings that a sweep runs; in a sweep of several rounds it runs once in each."""

    number: int  # within the sweep; the first is 1, the baseline of measurements 0
    name: str  # the settings that differ: `micro_batches=4`
    settings: dict[str, object]  # the same as settings and values, in the order in which they were typed
    request: RunRequest | InputError  # InputError: why it cannot run


@dataclass(frozen=True)
class SweepPlan:
    """The cells of a sweep, and how often they run."""

    folder: Path  # of the sweep, unless it is there already
    cells: tuple[Cell, ...]
    rounds: int
    baseline: int | None  # number of the cell whose speed is 1 for the others; None: the first that is measured
    targets: tuple[str, ...]  # the functions that the runs call

    def title(self, round_number: int, cell: Cell) -> str:
        """`run 1 of 3, round 2 of 5: micro_batches=4`."""
        position = f"run {cell.number} of {self.cells[-1].number}" if cell.number else "baseline"
        return f"{position}{f', round {round_number} of {self.rounds}' if self.rounds > 1 else ''}: {cell.name}"

    def schedule(self, ended: Mapping[tuple[int, int], Run]) -> Iterator[tuple[int, Cell]]:
        """Each round and its cells, but those which another round would give the same; `ended`: runs that have ended,
        which may become more meanwhile."""
        for round_number in range(1, self.rounds + 1):
            for cell in self.cells:
                before = [ended.get((cell.number, earlier)) for earlier in range(1, round_number)]
                if not any(run is not None and bench_status(run) in NOT_RETRYABLE for run in before):
                    yield round_number, cell


def plan_sweep(line: CommandLine, make_request: MakeRequest, resumed: SweepFolder | None = None) -> SweepPlan:
    """The sweep that `line` describes; `resumed`: if it has begun. Raises InputError if it has not and no cell can run,
    or a value is wrong whatever the others are; and if it calls functions that were not named again."""
    composer = ConfigComposer(line, TRAINING_KEYS)
    whole = composer.compose_full(line.unswept)
    jobs = combinations(line, whole.hydra.sweeper.params)
    requests = [_request_or_error(composer, job, make_request) for job in jobs]
    targets = _targets(requests)
    if resumed is not None:
        requests = [_with_target(request, resumed, targets) for request in requests]
        targets = _targets(requests)
    refusals = [request for request in requests if isinstance(request, InputError)]
    for input_error in refusals if resumed is None else ():
        if isinstance(input_error, InvalidValueError) or len(refusals) == len(requests):
            raise input_error
    named = zip(describe_differences(jobs, line.single_valued), requests, strict=True)
    cells = [Cell(number, *name, request) for number, (name, request) in enumerate(named, 1)]
    baseline = None
    if line.command == "bench" and len(cells) > 1 and "recipe" not in whole:  # a recipe's table has a baseline
        baseline = _add_baseline(cells)
    benches = [request.bench for request in requests if isinstance(request, RunRequest)]
    rounds = max((bench.rounds for bench in benches if bench is not None), default=1)
    return SweepPlan(Path(whole.hydra.sweep.dir), tuple(cells), rounds, baseline, targets)


def _request_or_error(
    composer: ConfigComposer, job: Sequence[str], make_request: MakeRequest
) -> RunRequest | InputError:
    try:
        return make_request(composer.compose(job), setting_values(job))
    except InputError as error:
        return error


def _targets(requests: Sequence[RunRequest | InputError]) -> tuple[str, ...]:
    """The functions that the runs call, each once."""
    called = [target_of(request.config) for request in requests if isinstance(request, RunRequest)]
    return tuple(dict.fromkeys(target for target in called if target is not None))


def _with_target(
    request: RunRequest | InputError, resumed: SweepFolder, saved: Sequence[str]
) -> RunRequest | InputError:
    """The request of a sweep that is resumed, with the function that was named again; `saved`: the functions of all
    runs. Raises InvalidSettingError if it was not."""
    if isinstance(request, InputError):
        return request
    target, targets = target_of(request.config), resumed.targets
    if target not in targets:
        target = targets[0] if len(targets) == len(saved) == 1 else None
    return replace(request, config=allow_target(request.config, target, resumed.path, format_target_setting(*saved)))


def _add_baseline(cells: list[Cell]) -> int | None:
    """The number of the cell that is the baseline, a single device with the settings of the first cell that can run: a
    cell of the sweep, or one that is added here; None if no cell can run."""
    requests = {cell.number: cell.request for cell in cells if isinstance(cell.request, RunRequest)}
    if not requests:
        return None
    first = next(iter(requests))
    auto = tuple(key for key in requests[first].auto if key not in ONE_DEVICE)
    plain = replace(requests[first], config=single_device_baseline(requests[first].config), auto=auto)
    for number, request in requests.items():
        if request.config.recompute != "always" and replace(request.config, recompute="never") == plain.config:
            return number
    settings = {key: ONE_DEVICE.get(key, value) for key, value in cells[first - 1].settings.items()}
    cells.insert(0, Cell(0, "one device", settings, plain))
    return 0


def describe_differences(jobs: Sequence[Sequence[str]], same: Collection[str]) -> list[tuple[str, dict[str, object]]]:
    """The settings in which each job differs from the others: as a name, `partitions=2,seed=4`, and their values in the
    order in which they were typed. `same`: the settings that were typed with a single value."""

    def varies(setting: str) -> bool:
        return key_of(setting) not in same and (len(jobs) == 1 or any(setting not in job for job in jobs))

    varied = [[setting for setting in job if varies(setting)] for job in jobs]
    return [(",".join(sorted(setting.lstrip("+") for setting in job)) or "run", setting_values(job)) for job in varied]
