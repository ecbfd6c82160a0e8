"""The lines between the rooms of the package, read from the sources: who may import whom, who may print, how long."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gpipe_cli"
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
NAMES = sorted(FILES)

# Every room and the rooms of the package that it may import; a file at the top is a room of its own. `typed`, `files`
# and `streams` know nothing of any other; they may be used by whoever checks settings, and by whoever writes.
SETTINGS = {"dataset_settings", "hardware_settings", "model_settings", "optimizer_settings"}
ALLOWED = {
    "__init__": set(),
    "__main__": {"cli"},
    "cli": {"commands", "interrupts", "torchrun", "streams", "typed"},
    "typed": set(),
    "files": set(),
    "streams": set(),
    "config": {*SETTINGS, "files", "typed"},
    "dataset_settings": {"typed"},
    "hardware_settings": {"typed"},
    "model_settings": {"typed"},
    "optimizer_settings": {"typed"},
    "lifetime": set(),
    "torchrun": set(),
    "interrupts": set(),
    "commands": {
        *("config", "model_settings", "training", "reporting", "reproduction", "files", "lifetime", "streams"),
        *("interrupts", "torchrun", "typed"),
    },
    "reproduction": {"reporting", "typed"},
    "training": {
        *("config", *SETTINGS, "files", "lifetime", "streams", "torchrun", "typed", "pipeline", "models"),
        *("data", "interrupts", "reporting"),
    },
    "pipeline": set(),
    "models": set(),
    "data": {"files", "lifetime"},
    "reporting": {"files", "typed"},
}
# Tested in milliseconds: neither they nor what they import know torch.
WITHOUT_TORCH = {
    f"pipeline/{name}.py"
    for name in ("schedule", "clock", "timeline", "simulator", "partition", "recomputation", "breakdown")
}
# The command line answers at once: torch may be imported inside a function only.
ANSWERS_AT_ONCE = {
    "__main__.py",
    "cli.py",
    "config.py",
    "dataset_settings.py",
    "files.py",
    "hardware_settings.py",
    "model_settings.py",
    "optimizer_settings.py",
    "streams.py",
    "typed.py",
    "commands/__init__.py",
    "commands/child.py",
    "commands/folders.py",
    "commands/train.py",
    "commands/bench.py",
    "commands/check.py",
    "commands/compare.py",
    "commands/evaluate.py",
    "commands/plan.py",
    "commands/sweep.py",
    "commands/sweep_folder.py",
    "commands/sweep_record.py",
    "commands/sweep_names.py",
    "training/__init__.py",
    "training/work.py",
    "training/fork_server.py",
    "lifetime.py",
    "torchrun.py",
    "interrupts.py",
}
# Where processes meet.
DISTRIBUTED = {
    "training/agreement.py",
    "pipeline/inbox.py",
    "pipeline/links.py",
    "training/measuring.py",  # of the link
    "training/engine.py",  # the groups of processes that a stage belongs to
    "training/team.py",
    "training/worker.py",
}


@dataclass(frozen=True)
class Import:
    """One module that a file imports."""

    module: str  # absolute: gpipe_cli.pipeline.schedule
    line: int
    deferred: bool  # inside a function or for type checkers only: not when the file itself is imported


def imports(source: str, file: str) -> list[Import]:
    """Every import of a file at `file` inside the package, wherever it stands."""
    package = ["gpipe_cli", *Path(file).parent.parts]
    found: list[Import] = []

    def visit(node: ast.AST, deferred: bool) -> None:
        match node:
            case ast.Import(names=names):
                found.extend(Import(alias.name, node.lineno, deferred) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = [*(package[: len(package) - level + 1] if level else []), *(module.split(".") if module else [])]
                # A name may be a module: `from torch import distributed`.
                found.extend(Import(".".join([*base, alias.name]), node.lineno, deferred) for alias in names)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                deferred = True
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for statement in node.body:
                    visit(statement, True)
                for statement in node.orelse:
                    visit(statement, deferred)
                return
        for child in ast.iter_child_nodes(node):
            visit(child, deferred)

    visit(ast.parse(source), False)
    return found


def imports_of(file: str) -> list[Import]:
    return imports(FILES[file].read_text(encoding="utf-8"), file)


def room(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def loaded_with(file: str) -> Iterator[tuple[str, Import]]:
    """What is imported when `file` is: its own imports and those of the files of the package that it imports."""
    waiting, seen = [file], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for entry in imports_of(current):
            if entry.deferred:
                continue
            yield current, entry
            parts = entry.module.split(".")
            if parts[0] == "gpipe_cli":
                inner = ["/".join(parts[1:end]) for end in range(1, len(parts) + 1)]
                candidates = [f"{name}{end}".lstrip("/") for name in inner for end in (".py", "/__init__.py")]
                waiting += [candidate for candidate in candidates if candidate in FILES]


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import os, torch.distributed as dist
from typing import TYPE_CHECKING
from . import stage
from ..models.cell import Cell
if TYPE_CHECKING:
    import hydra
def later():
    from torch import distributed
"""
    found = {(entry.module, entry.deferred) for entry in imports(source, "pipeline/x.py")}
    assert found == {
        ("os", False),
        ("torch.distributed", False),
        ("typing.TYPE_CHECKING", False),
        ("gpipe_cli.pipeline.stage", False),
        ("gpipe_cli.models.cell.Cell", False),
        ("hydra", True),
        ("torch.distributed", True),
    }


def test_every_room_is_known() -> None:
    assert {room(file) for file in NAMES} == set(ALLOWED)
    named = WITHOUT_TORCH | ANSWERS_AT_ONCE | DISTRIBUTED
    assert named <= set(NAMES), f"gone or renamed: {named - set(NAMES)}"


@pytest.mark.parametrize("file", NAMES)
def test_rooms_import_only_what_they_may(file: str) -> None:
    own = room(file)
    for entry in imports_of(file):
        parts = entry.module.split(".")
        if parts[0] == "gpipe_cli" and len(parts) > 1:
            allowed = ALLOWED[own] | {own, "__version__"}
            assert parts[1] in allowed, f"gpipe_cli/{file}:{entry.line} imports {entry.module}"


@pytest.mark.parametrize("file", sorted(WITHOUT_TORCH))
def test_schedules_know_no_torch(file: str) -> None:
    everything = [*loaded_with(file), *((file, entry) for entry in imports_of(file))]
    for where, entry in everything:
        assert not is_of(entry.module, "torch"), f"gpipe_cli/{where}:{entry.line} imports {entry.module}"


@pytest.mark.parametrize("file", sorted(ANSWERS_AT_ONCE))
def test_the_command_line_imports_no_torch(file: str) -> None:
    heavy = ("torch", "torchvision", "timm", "sklearn", "tensorboard", "safetensors")
    for where, entry in loaded_with(file):
        found = any(is_of(entry.module, package) for package in heavy)
        assert not found, f"gpipe_cli/{where}:{entry.line} imports {entry.module}"


@pytest.mark.parametrize("file", NAMES)
def test_hydra_stays_at_the_door(file: str) -> None:
    if room(file) in ("config", "commands", "cli"):
        return
    for entry in imports_of(file):
        hydra = is_of(entry.module, "hydra") or is_of(entry.module, "omegaconf")
        assert not hydra, f"gpipe_cli/{file}:{entry.line} imports {entry.module}"


@pytest.mark.parametrize("file", NAMES)
def test_processes_meet_in_few_places(file: str) -> None:
    """Neither imported nor reached through torch: `torch.distributed.barrier()`."""
    uses = [entry.line for entry in imports_of(file) if is_of(entry.module, "torch.distributed")]
    for node in ast.walk(ast.parse(FILES[file].read_text(encoding="utf-8"))):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                uses.append(node.lineno)
    assert bool(uses) == (file in DISTRIBUTED), f"gpipe_cli/{file}: torch.distributed in lines {uses}"


@pytest.mark.parametrize("file", NAMES)
def test_only_the_reporter_and_the_command_line_print(file: str) -> None:
    if room(file) in ("reporting", "cli"):
        return
    for node in ast.walk(ast.parse(FILES[file].read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Name(id="print")):
                raise AssertionError(f"gpipe_cli/{file}:{node.lineno} prints")
