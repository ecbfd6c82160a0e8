"""What `gpipe demo` shows: measurements of one process, of two, and of two with micro-batches, and what they mean."""

from collections.abc import Iterator, Sequence

from rich.console import Console

from gpipe_cli.pipeline.schedule.simulator import ideal_bubble
from gpipe_cli.reporting.run.lines import show_text
from gpipe_cli.reporting.tables.table import SYMBOLS, Column, Table, show_table
from gpipe_cli.results.measures import MEASURES, chosen
from gpipe_cli.results.run import RunResult
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.units import percent

_FASTER = 1.1  # speeds that differ by less are called equal: medians of so few steps vary by that much
_COLUMNS = chosen("step_seconds", "samples_per_second")
_SHARES = chosen("bubble_measured", "idle_measured")


def show_demo(console: Console, results: Sequence[RunResult]) -> None:
    """Shows a row for each measurement, and sentences about them. `results`: of K = 1, of K = 2, and of K = 2 with
    several micro-batches."""
    relative = [_speed(result, results[0]) for result in results]

    def column(key: str, values: Sequence[float | None]) -> Column:
        return Column.measured(MEASURES[key], values, values)

    cuts = [Column.of(key, symbol, [result.config[key] for result in results], str) for key, symbol in SYMBOLS.items()]
    columns = [column(one.key, [one.value(result) for result in results]) for one in _COLUMNS]
    shares = [column(one.key, [one.value(result) for result in results]) for one in _SHARES]
    console.print()
    show_table(console, Table("", [*cuts[:2], *columns, column("relative", relative), *shares], names=2))
    console.print()
    for sentence in explained(results, usable_cores()):
        show_text(console, sentence)


def explained(results: Sequence[RunResult], cores: int) -> Iterator[str]:
    """What the measurements show, and what they do not show. `cores`: that the processes could use."""
    one, cut, pieces = results
    plain, piped = _speed(cut, one), _speed(pieces, one)
    partitions, micro_batches = pieces.config["partitions"], pieces.config["micro_batches"]
    cause = "One stage computes at a time while the other waits, so that a second process alone gains nothing"
    if plain > _FASTER:
        cause = "One stage computes at a time, so that the gain is chance: the speed of this machine varies that much"
    yield f"K = {partitions}, M = 1: {plain:.2f} times the speed of K = 1. {cause} (idle {_idle(cut)} of the step)."
    most = partitions * (1 - ideal_bubble(partitions, micro_batches))
    begin = f"K = {partitions}, M = {micro_batches}: {piped:.2f} times the speed of K = 1."
    contended = max(result.without_core or 0.0 for result in results)
    disturbed = any(result.samples_per_second_kind == "measured_contended" for result in results)
    if cores < partitions:
        yield f"{begin} The processes take turns on one core here, so that no pipeline can be faster than one process."
    elif piped > _FASTER:
        yield (
            f"{begin} Both stages compute at the same time, on different micro-batches, and are idle for "
            f"{_idle(pieces)} of the step; as the pipeline fills and drains, {most:.2f} is the most."
        )
    else:
        why = "other programs used the cores" if disturbed else "smaller pieces and their transfers cost time, too"
        yield (
            f"{begin} That is no gain, although the stages compute at the same time (idle {_idle(pieces)} of the step) "
            f"and {most:.2f} is possible: {why}."
        )
    if disturbed and cores >= partitions:
        yield (
            f"Other programs used these cores for up to {percent(contended)} of the time, so that the numbers say "
            "little; run it again when the machine is idle."
        )


def _speed(result: RunResult, one: RunResult) -> float:
    assert result.samples_per_second is not None
    assert one.samples_per_second is not None
    return result.samples_per_second / one.samples_per_second


def _idle(result: RunResult) -> str:
    return MEASURES["idle_measured"].text(result)
