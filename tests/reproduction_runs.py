"""A machine that answers recipes at once, from a formula: what they make of its answers can then be checked exactly."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gpipe_cli.reporting.timeline_view import SHARES
from gpipe_cli.reproduction.runner import Runner

# (command, settings, folder) -> the file that it writes, and what is in it; or ValueError, which is exit code 2
Answer = Callable[[str, Mapping[str, str], Path], tuple[str, dict[str, Any]]]


def runner(folder: Path, answer: Answer, *given: str, desk: bool = True, settings: tuple[str, ...] = ()) -> Runner:
    """A runner of the recipe `nothing` whose commands are answered, and not run."""

    def perform(command: Sequence[str], log: IO[str]) -> tuple[int, str, bool]:
        values = dict(argument.partition("=")[::2] for argument in command if "=" in argument)
        place = next(Path(v.strip("'")) for k, v in values.items() if k in ("run_folder", "hydra.sweep.dir"))
        try:
            name, content = answer(command[3], values, place)
        except ValueError as error:
            return 2, str(error), False
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(json.dumps(content), encoding="utf-8")
        return 0, "", False

    every = (*settings, *given)
    return Runner("nothing", Path("recipes"), folder, every, perform, lambda line: None, desk, users=given)


def shares_of_a_step(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
    """An answer to the recipe `breakdown`."""
    if command == "plan":
        assert settings["cost"] == "measured"
        simulated = {**dict.fromkeys(SHARES, 0.0), "compute": 0.75, "recompute": 0.25}
        view = {"stages": [{}, {}], "micro_batches": 16, "model_name": "Some model", "breakdown": simulated}
        return "plan.json", {**view, "bubble": 0.05, "hardware": {"source": "layers measured on this machine"}}
    measured = {**dict.fromkeys(SHARES, 0.01), "compute": 0.7, "recompute": 0.21, "transfer": 0.05}
    row = {"breakdown": measured, "bubble": 0.07, "ideal_bubble": 1 / 17, "kind": "measured_one_device", "reason": None}
    return "bench.json", {"rows": [row]}


def cells(table: Any, heading: str, origin: str) -> list[str]:
    """A column of a table."""
    (at,) = (i for i, c in enumerate(table.columns) if (c.heading, c.origin) == (heading, origin))
    return [row[at] for row in table.rows]
