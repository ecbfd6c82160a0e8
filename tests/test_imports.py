"""The order of the rooms of the package, read from the sources: who may import whom, and who may print."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "gpipe_cli"
FILES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}

# From the lowest floor to the highest: a room imports only from itself and from the floors below its own.
FLOORS = (
    ("system", "units"),
    ("config",),
    ("models", "data", "pipeline.schedule"),
    ("pipeline.runtime",),
    ("pipeline.profile",),
    ("distributed",),
    ("assembly",),
    ("planner",),
    ("training",),
    ("verify",),
    ("reporting",),
    ("launch",),
    ("reproduction",),
    ("commands",),
    ("cli",),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


class Import(NamedTuple):
    """One module that a file imports, at its top or inside a function."""

    where: str  # gpipe_cli.pipeline.schedule.dependencies
    line: int
    module: str  # gpipe_cli.pipeline.schedule.schedules


def imports(name: str) -> list[Import]:
    found = []
    for node in ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found += [Import(name, node.lineno, alias.name) for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                # A name may be a module: `from torch import distributed`.
                inner = [f"{module}.{alias.name}" for alias in names]
                found += [Import(name, node.lineno, one if one in FILES else module) for one in inner]
            case ast.ImportFrom(level=level):
                raise AssertionError(f"{name}:{node.lineno}: an import relative to {level} folders up is not read here")
    return found


IMPORTS = [entry for name in sorted(FILES) for entry in imports(name)]
OWN = [entry for entry in IMPORTS if entry.module in FILES]


def room(name: str) -> str:
    """The room that a file is in: `pipeline.schedule` for gpipe_cli.pipeline.schedule.dependencies."""
    inner = name.removeprefix("gpipe_cli.")
    return next((room for room in FLOOR if inner == room or inner.startswith(f"{room}.")), "")


def is_of(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_rooms_import_from_the_floors_below() -> None:
    homeless = {name for name in FILES if not room(name)} - {"gpipe_cli.__init__", "gpipe_cli.pipeline.__init__"}
    assert not homeless
    uphill = [
        f"{entry.where}:{entry.line} imports {entry.module}"
        for entry in OWN
        if room(entry.where) != room(entry.module) and FLOOR[room(entry.where)] <= FLOOR[room(entry.module)]
    ]
    assert not uphill


def test_no_files_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for entry in OWN:
        graph.setdefault(entry.where, set()).add(entry.module)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_schedules_need_no_torch() -> None:
    names = ", ".join(name for name in FILES if room(name) == "pipeline.schedule")
    program = f"import sys, {names}\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_hydra_is_known_to_settings_and_commands_only() -> None:
    others = [entry for entry in IMPORTS if room(entry.where) not in ("config", "commands", "cli")]
    assert not [entry for entry in others if is_of(entry.module, "hydra", "omegaconf")]


def test_processes_communicate_in_few_rooms() -> None:
    rooms = {room(entry.where) for entry in IMPORTS if is_of(entry.module, "torch.distributed")}
    assert rooms <= {"pipeline.runtime", "distributed", "launch", "training"}


def test_only_reports_and_the_command_line_print() -> None:
    for name, path in FILES.items():
        if room(name) in ("reporting", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id="print")):
                    raise AssertionError(f"{name}:{node.lineno} prints")
