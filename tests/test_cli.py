"""The program `gpipe`: what it answers, and how it refuses."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpipe_cli.cli import LEADER_SECONDS, main
from gpipe_cli.reproduction.recipe import FOLDER
from gpipe_cli.system.interrupts import interruptible

NO_TORCH = """
import sys
from gpipe_cli.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
loaded = {"torch", "torchvision", "timm", "sklearn", "tensorboard"} & set(sys.modules)
sys.exit(f"imported {loaded}" if loaded else code)
"""

INTERRUPTED = """
import os, signal, sys
from gpipe_cli.__main__ import main
moment = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, *_):
        if name == moment:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.exit(main())
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which `gpipe` refuses the arguments."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    assert list(Path().iterdir()) == [], "nothing is left behind"
    return captured.err.rstrip("\n")


def test_the_installed_program_answers() -> None:
    program = Path(sys.executable).with_name("gpipe")
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert output.startswith("gpipe 0.")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert "  train " in output
    assert "  evaluate " in output


def test_no_command_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: gpipe COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("--help", "Commands"),
        ("train --help", "micro_batches    M, pieces that a mini-batch is cut into (4)"),
        ("train --cfg job", "micro_batches: 4"),
        ("evaluate --help", "run=FOLDER"),
    ],
)
def test_help_and_configuration_import_no_torch(arguments: str, shown: str) -> None:
    command = [sys.executable, "-c", NO_TORCH, *arguments.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert shown in result.stdout
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("tain", "gpipe: tain: there is no such command; did you mean train?; see gpipe --help"),
        ("train typo=4", "gpipe train: typo=4: there is no such setting; --cfg job lists all"),
        ("train +typo=4", "gpipe train: typo=4: there is no such setting; --cfg job lists all"),
        ("train filters=3", "gpipe train: filters=3: there is no such setting; did you mean model.filters?"),
        (
            "train ++model.filtrs=3",
            "gpipe train: model.filtrs=3: there is no such setting; did you mean model.filters?",
        ),
        ("train modle=amoebanet", "did you mean model?"),
        ("train replicas=2", "gpipe train: replicas=2: there is no such setting; --cfg job lists all"),
        ("train lr=0.1", "there is no such setting; write learning_rate=constant learning_rate.peak=0.1"),
        (
            "train learning_rate=0.1",
            "must be the name of a choice; write learning_rate=constant learning_rate.peak=0.1",
        ),
        ("train bs=4", "did you mean batch_size?"),
        ("list", "gpipe: list: there is no such command; choose one of train, bench,"),
        # Settings of another command, which a recipe may say to it: typed here they were once dropped without a word.
        ("train +rounds=5", "gpipe train: rounds=5: gpipe train has no such setting, gpipe bench has; leave it out"),
        (
            f"train -cd {FOLDER} -cn table2_amoebanet steps=5",
            "steps=5: gpipe train has no such setting, gpipe",
        ),
        ("train steps=5", "gpipe bench has; did you mean max_steps?"),
        ("plan +rounds=1", "gpipe plan has no such setting, gpipe bench has; leave it out"),
        ("bench +solve=3", "gpipe bench has no such setting, gpipe plan has; leave it out"),
        ("train foo/bar=1", "gpipe train: foo/bar=1: there is no such setting"),
        ("train hydra.foo=1", "gpipe train: hydra.foo=1: Hydra has no such setting"),
        (
            "train dataset=cifr10",
            "gpipe train: dataset=cifr10: there is no such choice; choose one of birdsnap, cifar10, cifar100,",
        ),
        ("train dataset.root=x", "gpipe train: dataset.root=x: the chosen dataset has no such setting; leave it out"),
        ("train model=3", "gpipe train: model=3: must be the name of a choice"),
        ("train model=null", "gpipe train: model=null: must be the name of a choice"),
        ("train micro_batches=64", "gpipe train: micro_batches=64: a mini-batch has only batch_size=32 samples"),
        ("train micro_batches=1,4", "gpipe train: micro_batches=1,4: several values are a sweep; add -m"),
        ("train partitions", "gpipe train: partitions: a setting without a value; write partitions=VALUE"),
        ("train schedule=[a", "gpipe train: schedule=[a: cannot be read"),
        ("train partitions=two", "gpipe train: partitions=two: must be a whole number"),
        ("train --foo", "gpipe train: unrecognized arguments: --foo"),
        ("train -cn foo", "gpipe train: -cn foo: there is no such configuration"),
        ("train -cd /nowhere/at/all", "gpipe train: configuration: Additional config directory"),
        ("train resume=outputs/x", "gpipe train: resume=outputs/x: no run there (looked for outputs/x/config.yaml)"),
        ("evaluate", "gpipe evaluate: run=???: a value is required; give run=..."),
        ("evaluate run=outputs/x", "gpipe evaluate: run=outputs/x: no run there (looked for outputs/x/config.yaml)"),
        ("evaluate run=x checkpoint=bst", "gpipe evaluate: checkpoint=bst: must be one of best, last"),
        ("evaluate run=x foo=1", "gpipe evaluate: foo=1: there is no such setting"),
        ("evaluate -m run=x,y", "gpipe evaluate: -m: evaluate has no sweeps"),
    ],
)
def test_bad_input_is_one_line(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, *arguments.split())


def test_a_fault_of_gpipe_can_be_seen_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPIPE_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="partitions=0"):
        main(["train", "partitions=0"])


def test_under_torchrun_rank_0_reports_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others wait, as torchrun ends all with the first one; then they report what only they can know."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr("gpipe_cli.cli.time.sleep", waited.append)
    assert main(["train", "partitions=0"]) == 2
    assert waited == [LEADER_SECONDS]
    assert capsys.readouterr().err.startswith("gpipe train: process 1: partitions=0:")


@pytest.mark.parametrize(
    ("module", "arguments", "name"),
    [
        ("gpipe_cli.cli", ["train"], "gpipe"),
        ("hydra", ["plan"], "gpipe plan"),
        ("torch.distributed", ["train", "dataset=synthetic_images"], "gpipe train"),
    ],
)
def test_interrupted_before_it_has_begun_it_says_so(module: str, arguments: list[str], name: str) -> None:
    """Of a KeyboardInterrupt while it is imported torch makes a warning, after which the run began, or it aborts."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, module, *arguments], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, f"{name}: interrupted\n", "")
    assert list(Path().iterdir()) == [], "nothing is left behind"


def test_an_interrupt_is_one_whatever_a_library_makes_of_it() -> None:
    @interruptible()
    def import_numpy() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt as error:
            raise ImportError from error

    with pytest.raises(KeyboardInterrupt):
        import_numpy()


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ("RANK=abc", "gpipe train: RANK='abc': torchrun sets it to a whole number from 0 to 0;"),
        ("RANK=5 WORLD_SIZE=2", "gpipe train: RANK='5': torchrun sets it to a whole number from 0 to 1;"),
        ("WORLD_SIZE=abc", "unset WORLD_SIZE"),
        ("WORLD_SIZE=2", "WORLD_SIZE=2: torchrun sets MASTER_ADDR beside it, which is missing"),
        ("WORLD_SIZE=2 MASTER_ADDR=localhost LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE='3'"),
        ("WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=x", "MASTER_PORT='x'"),
    ],
)
def test_what_torchrun_never_says_is_one_line(
    variables: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    assert line in refused(capsys, "train", "dry_run=true")


def bomb() -> str:
    """A few lines that stand for 9^9 values."""
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("defaults:\n  - table\n  - _self_\n", "a file includes itself in its defaults"),
        ("a: " + "[" * 5000 + "]" * 5000, "table.yaml: is nested too deeply"),
        (bomb(), "values by its aliases, more than 10000"),
        ("output: gr\udcfc\udcdfe", "table.yaml: is not written in UTF-8"),
        ("", "partitions: the setting is missing"),
        ("partitions: 2", "micro_batches: the setting is missing"),
        ("3", "table.yaml: holds no settings"),
    ],
    ids=["itself", "deep", "aliases", "latin1", "empty", "partial", "number"],
)
@pytest.mark.parametrize("command", ["train", "train -m", "bench"])
def test_a_file_that_is_no_configuration_is_one_line(
    text: str, line: str, command: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """One without our own settings of Hydra left folders and logs of Hydra's; others ended in 3,000 lines."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "table.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert line in refused(capsys, *command.split(), "-cd", str(folder), "-cn", "table")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("train +=output", "+=output: a value without a setting; write SETTING=output"),
        ("train presets=x", "presets=x: the model and the data set choose it; leave it out, or give ~presets"),
        (f"plan learning_rate.decay={'9' * 400}", "must be a finite number"),
        ("bench +dry_run.x=null", "dry_run.x=null: a measurement of nothing"),
        ("bench -m seed=range(0,-5)", "seed=range(0,-5): has no values; give one or more"),
        ("reproduce scale=desk", "scale=desk: of which recipe? gpipe reproduce lists them"),
        (f"compare {'a' * 300}", "File name too long"),
        ("compare outputs --output=", "argument --output: must not be empty; give the name of a folder"),
        ("reproduce breakdown output=", "output=: must be a text of one line that is not empty"),
        ("reproduce breakdown scale=desk model.filters=x", "model.filters=x: must be a whole number"),
    ],
)
def test_what_random_command_lines_found_is_one_line(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tracebacks, trainings that began, folders that were left."""
    assert main(arguments.split()) == 2
    said = capsys.readouterr().err
    assert line in said
    assert said.count("\n") == 1
    assert list(Path().iterdir()) == [], "nothing is left behind"


def test_a_value_that_is_nested_without_end_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a setting is nested too deeply" in refused(capsys, "train", "freeze=" + "[" * 3000 + "]" * 3000)


def test_recipes_extend_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes").mkdir()
    text = "defaults:\n  - train\n  - override dataset: synthetic_images\n  - _self_\n"
    text += "partitions: 8\nmodel:\n  filters: 256\n"
    Path("recipes/table.yaml").write_text(text)
    assert main(["train", "-cd", "recipes", "-cn", "table", "--cfg", "job", "seed=3"]) == 0
    output = capsys.readouterr().out
    for line in ("partitions: 8", "  filters: 256", "  name: synthetic_images", "seed: 3", "micro_batches: 4"):
        assert f"{line}\n" in output


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gpipe tr", "train bench plan evaluate check reproduce compare"),
        ("gpipe train micro", "micro_batches="),
        ("gpipe train model.fil", "model.filters="),
        ("gpipe train dataset=cifar", "dataset=cifar10 dataset=cifar100"),
        ("gpipe evaluate che", "checkpoint="),
        ("gpipe nonsense x", ""),
    ],
)
def test_tab_completion(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", typed)
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.strip() == offered


@pytest.mark.parametrize("arguments", ["--help", "train --cfg job", "compare --help", "reproduce"])
def test_a_reader_that_stops_reading_sees_no_traceback(arguments: str) -> None:
    command = f"'{sys.executable}' -m gpipe_cli {arguments}"
    # The reading end is closed before anything is written.
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(command, shell=True, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (result.stderr, result.returncode) == ("", 141)


@pytest.mark.parametrize("arguments", ["--version >/dev/full", "train --help >/dev/full", "--version >&-", "train >&-"])
def test_output_that_is_lost_is_one_line(arguments: str) -> None:
    """A full disk, or nobody who gave it a stdout: nothing is trained that nobody can follow."""
    command = f"'{sys.executable}' -m gpipe_cli {arguments}"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert re.fullmatch(r"gpipe[ a-z]*: stdout: (No space left on device|Bad file descriptor)\n", result.stderr)
    assert list(Path().iterdir()) == []


def test_where_there_is_no_stderr_either_the_exit_code_says_it() -> None:
    command = f"'{sys.executable}' -m gpipe_cli --version"
    for lost in (">/dev/full 2>/dev/full", ">&- 2>&- <&-"):
        assert subprocess.run(f"{command} {lost}", shell=True, check=False).returncode == 1


@pytest.mark.parametrize("name", ["micro_batches=4", "partition.balance=[4,8],seed=1", "it's here (1)"])
def test_the_folder_of_a_sweeps_run_needs_no_quotes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).mkdir()
    assert main(["evaluate", f"run={name}", "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"] == name
    assert main(["evaluate", f"run={name}"]) == 2
    assert f"run={name}: no run there" in capsys.readouterr().err


def test_settings_with_dashes_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert "; a setting has no dashes: partitions=4;" in refused(capsys, "train", "--partitions=4")
    assert "; a setting has no dashes: partitions=...;" in refused(capsys, "train", "--partitions", "4")


@pytest.mark.parametrize(
    "arguments", ["seed=3 --cfg job epochs=2", "--cfg job seed=3 epochs=2", "seed=3 epochs=2 --cfg=job"]
)
def test_options_may_stand_anywhere(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *arguments.split()]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["seed"], shown["epochs"]) == (3, 2)
