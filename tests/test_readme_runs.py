"""Every command of the README runs: shrunk to a step where it would take minutes, but through the same doors.

A command that needs data that has to be fetched stops at a dry run, which builds, cuts and places the model. Recipes
are only looked up: tests/test_recipes.py runs a step of each.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_readme import BLOCKS, commands
from training_runs import command

from gpipe_cli.reproduction.recipe import load

EMBEDDED = ("digits", "synthetic_images", "synthetic_text")  # fast to read; the others stop at a dry run
MOST_PROCESSES = 4
RUN = ["max_steps=2", "partitions=1", "threads=1"]
TRANSLATION = [
    "model=transformer_nmt", "model.layers=1", "model.width=8", "model.hidden=12", "model.heads=2",
    "model.head_width=4", "model.length=48", "dataset=parallel_text", "dataset.root=pairs", "dataset.vocabulary=270",
    "dataset.cache=cache",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the README speaks of: its model, runs, a configuration."""
    folder = tmp_path_factory.mktemp("readme")
    (model,) = (block for kind, block in BLOCKS if kind == "python")
    for name in ("mymodel.py", "my_model.py"):
        (folder / name).write_text(model.replace("def digits", "def build") if name == "my_model.py" else model)
    (folder / "FOLDER").mkdir()
    (folder / "FOLDER" / "NAME.yaml").write_text("defaults:\n  - train\n  - _self_\npartitions: 3\n")
    (folder / "pairs").mkdir()
    for name in ("train", "test"):
        lines = [f"{'ab' * size}\t{'ba' * size}\tde-en" for size in (1 + number % 9 for number in range(64))]
        (folder / "pairs" / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    with pytest.MonkeyPatch().context() as patch:
        patch.chdir(folder)
        for name, settings in (("my_run", ["dataset.classes=[0,1,2,3,4]"]), ("my_translation", TRANSLATION)):
            assert command(patch, "train", *RUN, f"run_folder=outputs/{name}", *settings) == 0
        sweep = ["-m", "seed=0,1", "dry_run=true", "hydra.sweep.dir=outputs/my_sweep"]
        assert command(patch, "train", *sweep) == 0
        yield folder


def shrunk(line: str) -> list[str]:
    """The arguments of a command, and what makes it short."""
    arguments = shlex.split(line)[1:]
    name, given = arguments[0], {argument.partition("=")[0] for argument in arguments}
    if name == "train" and not {"--help", "--cfg"} & given:
        dataset = next((argument.partition("=")[2] for argument in arguments if argument.startswith("dataset=")), None)
        model = next((argument.partition("=")[2] for argument in arguments if argument.startswith("model=")), "")
        real = dataset in EMBEDDED or (dataset is None and not model.startswith("transformer") and model != "resnet")
        partitions = next((int(a.partition("=")[2]) for a in arguments if re.match(r"partitions=\d+$", a)), 2)
        real = real and partitions <= MOST_PROCESSES
        arguments = [argument for argument in arguments if not argument.startswith(("max_steps=", "dry_run="))]
        if "resume=outputs/my_sweep" in arguments:
            return arguments
        arguments.append("max_steps=3" if real and "dry_run=true" not in line and "-m" not in given else "dry_run=true")
    if name == "bench":
        arguments = [argument for argument in arguments if not argument.startswith("rounds=")]
        arguments += ["steps=1", "warm_up_steps=0"]
    if name == "reproduce" and len(arguments) > 1:
        load(arguments[1])
        arguments = ["reproduce", "--help"]
    if name == "bench":  # one cell of a table
        return [re.sub(r"=([^\[,]+),.*", r"=\1", argument) for argument in arguments]
    if "-m" in given:  # a sweep: two runs of it
        first = next(argument for argument in arguments if re.search(r"=[^\[]*,", argument))
        arguments = [
            re.sub(r"=([^\[,]+),([^,]+).*", r"=\1,\2" if argument is first else r"=\1", argument)
            for argument in arguments
        ]
    if "decode." in line:
        arguments = [argument.replace("my_run", "my_translation") for argument in arguments]
    if name == "check":
        arguments.append("executor=in_process")
    return arguments


@pytest.mark.parametrize("line", commands())
def test_every_command_runs(
    line: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = shrunk(line)
    if arguments[0] == "-sc" or arguments == ["evaluate"]:  # would write to the shell's own files; names the command
        return
    monkeypatch.chdir(place)
    try:
        code: object = command(monkeypatch, *arguments)
    except SystemExit as end:  # --help of a command
        code = end.code
    said = capfd.readouterr()
    assert code in (0, None), said.out + said.err
    assert "Traceback" not in said.out + said.err
