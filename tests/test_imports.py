"""The order of the parts of the package, read from the sources: who may import whom, and who may print."""

import ast
import graphlib
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from launch.test_forks import COUNTING, assert_forked_without_threads

PACKAGE = Path(__file__).parent.parent / "gpipe_cli"
FILES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}

# From the lowest level to the highest: a part imports only from itself and from the levels below its own.
LEVELS = (
    ("system", "units", "errors"),
    ("schedule",),
    ("config",),
    ("models", "data"),
    ("pipeline.runtime",),
    ("pipeline.profile",),
    ("distributed",),
    ("assembly",),
    ("results",),
    ("planner",),
    ("training",),
    ("library",),
    ("verify",),
    # What the parts of reporting share lies below them.
    (
        "reporting.plots.timeline_values",
        "reporting.run.description",
        "reporting.run.lines",
        "reporting.run.measurement",
    ),
    ("reporting.tables.table", "reporting.run.step_breakdown"),
    ("reporting.plots",),
    ("reporting.loggers", "reporting.page"),
    ("reporting.run.summary",),
    ("reporting.tables",),
    ("reporting.compare", "reporting.reproduced", "reporting.run"),
    ("reporting",),
    ("launch",),
    ("benchmark",),
    ("reproduction",),
    ("commands",),
    ("cli",),
    ("__main__",),
    ("__init__",),
)
ENGINE = ("schedule", "pipeline.runtime", "pipeline.profile", "distributed", "library")
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of the syntax of every file, with the file's name."""
    trees = {name: ast.parse(FILES[name].read_text(encoding="utf-8")) for name in sorted(FILES)}
    return [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]


@cache
def imports() -> list[tuple[str, str]]:
    """Each file, with each module that it imports, at its top or inside a function."""
    found = []
    for name, node in nodes():
        match node:
            case ast.Import(names=names):
                found += [(name, alias.name) for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                # A name may be a module: `from torch import distributed`.
                inner = [f"{module}.{alias.name}" for alias in names]
                found += [(name, one if one in FILES else module) for one in inner]
            case ast.ImportFrom(level=level):
                raise AssertionError(f"{name}:{node.lineno}: an import relative to {level} folders up is not read here")
    return found


def own_imports() -> list[tuple[str, str]]:
    return [(where, module) for where, module in imports() if module in FILES]


def part(name: str) -> str:
    """The part that a file is in: `schedule` for gpipe_cli.schedule.dependencies."""
    inner = name.removeprefix("gpipe_cli.")
    return next((part for part in LEVEL if inner == part or inner.startswith(f"{part}.")), "")


def is_of(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_parts_import_from_the_levels_below() -> None:
    unplaced = {name for name in FILES if not part(name)} - {"gpipe_cli.pipeline.__init__"}
    assert not unplaced
    apart = [(where, module) for where, module in own_imports() if part(where) != part(module)]
    assert not [(where, module) for where, module in apart if LEVEL[part(where)] <= LEVEL[part(module)]]


def test_contributing_names_every_folder_of_the_package() -> None:
    """Three folders of reporting/ were missing."""
    table = (PACKAGE.parent / "recipes" / "contributing.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)/`", table.partition("| `gpipe_cli/` |")[2])
    assert {*named} == {path.parent.name for path in FILES.values()} - {"gpipe_cli"}


def test_no_files_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for where, module in own_imports():
        graph.setdefault(where, set()).add(module)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_schedules_need_no_torch() -> None:
    names = ", ".join(name for name in FILES if part(name) == "schedule")
    program = f"import sys, {names}\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# What no process of the default training needs at all, and what its parent needs once the first table is shown.
NEVER = ("torch._dynamo", "torchvision", "timm", "sklearn", "scipy", "pandas", "transformers")
LATER = ("matplotlib", "PIL", "tensorboard", "google.protobuf")
# Python runs sitecustomize.py at the start of every process.
WATCH = f"""
import os, sys
def watch(event, arguments):
    if event == "import" and f"{{arguments[0]}}.".startswith({tuple(f"{name}." for name in NEVER + LATER)}):
        with open("imported", "a") as file:
            file.write(f"{{arguments[0]}} {{os.path.exists('run/result.json')}}\\n")
sys.addaudithook(watch)
"""


def test_a_run_imports_nothing_that_its_first_step_does_not_need_and_no_process_forks_while_it_has_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the parent, the fork server, the stages and the loaders. Importing torch._dynamo took as long as torch."""
    (tmp_path / "sitecustomize.py").write_text(WATCH + COUNTING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("FORKS", str(tmp_path / "forks"))
    tiny = ["model.normal_cells=3", "model.filters=4", "max_steps=1", "hardware=cpu", "run_folder=run"]
    tiny += ["partitions=2", "data_workers=1"]
    subprocess.run([sys.executable, "-m", "gpipe_cli", "train", *tiny], cwd=tmp_path, check=True)
    imported = [line.split() for line in (tmp_path / "imported").read_text().splitlines()]
    assert not {name for name, late in imported if late == "False" or is_of(name, *NEVER)}
    assert {name for name, _ in imported} >= {"matplotlib.axes", "tensorboard"}, "what is imported is seen"
    assert_forked_without_threads(tmp_path / "forks", {"fork_server.py", "loading.py"})


def test_hydra_is_known_to_settings_and_commands_only() -> None:
    parts = {part(where) for where, module in imports() if is_of(module, "hydra", "omegaconf")}
    assert parts <= {"config", "commands", "cli"}


def test_the_engine_does_not_import_the_commands_configuration() -> None:
    """A program with a `Pipeline` of its own has no settings files; the settings that both share are apart."""
    engine = [(where, module) for where, module in own_imports() if part(where) in ENGINE and part(module) == "config"]
    assert {module for where, module in engine if part(where) != "library"} == set()
    assert {module for _, module in engine} == {"gpipe_cli.config.pipeline_settings", "gpipe_cli.config.schema"}


def test_processes_communicate_in_few_parts() -> None:
    parts = {part(where) for where, module in imports() if is_of(module, "torch.distributed")}
    # verify: torch.distributed.pipelining is one of the programs that ours is compared with
    assert parts <= {"pipeline.runtime", "distributed", "launch", "benchmark", "training", "verify"}


def test_accelerators_have_one_door() -> None:
    """What another kind of accelerator needs is then in one file, and what the program does on one can be watched."""
    door = "gpipe_cli.system.accelerator"
    uses = {name for name, node in nodes() if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda"}
    types = {name for name, node in nodes() if isinstance(node, ast.Constant) and node.value == "cuda"}
    assert not uses
    spelt = "config.settings", "planner.data_sheet", "pipeline.profile.forward_trace"  # the setting `device`
    assert types <= {door, *(f"gpipe_cli.{name}" for name in spelt)}
    calls = [(name, ast.unparse(node.func)) for name, node in nodes() if isinstance(node, ast.Call)]
    watched = "torch.accelerator.", "torch.Stream", "torch.Event"
    assert {name for name, called in calls if called.startswith(watched)} == {door}


def test_only_reports_and_the_command_line_print() -> None:
    calls = ((name, node) for name, node in nodes() if isinstance(node, ast.Call))
    printing = {name for name, call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"}
    assert not [name for name in printing if not part(name).startswith(("reporting", "cli"))]
