"""The program `gpipe`: what it answers, and how it refuses."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import gpipe_cli
from gpipe_cli.cli import COMMANDS, RANK_ZERO_GRACE_SECONDS, main
from gpipe_cli.commands.command_runner import run_command, run_guarded
from gpipe_cli.errors import BAD_INPUT, InputError, InvalidSettingError
from gpipe_cli.launch.job import Reason
from gpipe_cli.launch.worker import _failure
from gpipe_cli.reproduction.runner import RECIPES_DIR

LIGHT = """
import sys
from gpipe_cli.cli import main
codes = [main(line.split()) for line in sys.argv[1:]]
heavy = {"numpy", "torch", "torchvision", "timm", "sklearn", "tensorboard", "safetensors", "matplotlib"}
loaded = heavy & set(sys.modules)
sys.exit(f"imported {loaded}" if loaded else max(codes))
"""

INTERRUPTED = """
import os, signal, sys, time
from gpipe_cli.__main__ import run
moment = sys.argv.pop(1)
class Finder:
    def find_spec(self, name, *_):
        if name == moment:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(600)
sys.meta_path.insert(0, Finder())
sys.argv[0] = "gpipe"
run()
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which `gpipe` refuses the arguments."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1, captured.err
    assert list(Path().iterdir()) == [], "nothing is left behind"
    return captured.err.rstrip("\n")


def test_only_what_the_user_can_mend_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError from inside, the greatest of nothing, was shown as a wrong setting, with exit code 2."""

    def fails(error: Exception) -> Callable[[], int]:
        def work() -> int:
            raise error

        return work

    refused = InvalidSettingError("partitions", 0, "must be at least 1; use partitions=1")
    inside = ValueError("max() arg is an empty sequence")
    assert (run_guarded(fails(refused)).exit_code, run_guarded(fails(refused)).input_error) == (BAD_INPUT, refused)
    with pytest.raises(ValueError, match="empty sequence"):  # as a fault of the program, with its traceback
        run_guarded(fails(inside))
    monkeypatch.setenv("GPIPE_FULL_ERROR", "1")
    with pytest.raises(InputError, match="partitions=0"):
        run_guarded(fails(refused))
    reasons = [_failure(0, error) for error in (refused, inside)]
    assert [failure.reason for failure in reasons] == [Reason.USER, Reason.OTHER]
    assert reasons[1].text == "ValueError: max() arg is an empty sequence"


def test_the_installed_program_answers() -> None:
    program = Path(sys.executable).with_name("gpipe")
    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert output == f"gpipe {gpipe_cli.__version__}\n" == f"gpipe {version('gpipe-cli')}\n"
    ended = subprocess.run([program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Usage: gpipe COMMAND" in ended.stderr
    lines = ended.stderr.splitlines()
    assert (len(lines) <= 24, max(map(len, lines)) <= 80) == (True, True), "a screen"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = subprocess.run([program, "list", "runs", "bücher"], capture_output=True, env=os.environ | ascii_only)
    assert (ended.returncode, ended.stderr.decode().startswith("gpipe list: bücher: ")) == (2, True)


def test_help_lists_and_configuration_import_nothing_heavy() -> None:
    lines = ["--help", "train --cfg job", "list models", "list hardware", "list recipes"]
    lines += ["list models vit*", "help micro_batches"]
    lines += [f"{command} --help" for command in COMMANDS]
    result = subprocess.run([sys.executable, "-c", LIGHT, *lines], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    for shown in ("  evaluate ", "micro_batches    M, pieces that", "micro_batches: 4", "run=FOLDER"):
        assert shown in result.stdout
    assert list(Path().iterdir()) == []


def test_help_shows_what_most_users_need_and_names_the_option_for_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(option: str) -> list[str]:
        assert main(["train", option]) == 0
        return capsys.readouterr().out.splitlines()

    short, whole = shown("--help"), shown("--help-all")
    settings = [line.split()[0] for line in short if re.match(r"  \w+ {2,}\S", line)]
    assert len(settings) == 15
    assert short[-1].endswith("gpipe train --help-all")
    assert whole[: len(short) - 1] == short[:-1]
    assert any(line.startswith("  executor ") for line in whole[len(short) :])


def test_a_file_that_does_not_fit_is_refused_before_anything_heavy_is_imported() -> None:
    result = subprocess.run([sys.executable, "-c", LIGHT, "train schedule=gone.csv"], capture_output=True, text=True)
    assert result.returncode == 2, "not the exit code of sys.exit with a text"
    assert result.stderr.startswith("gpipe train: schedule=gone.csv: cannot be read")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            "train model=${..}",
            "gpipe train: model=${..}: no such choice; choose one of amoebanet, custom, hf, resnet, timm, "
            "transformer_lm, transformer_nmt, unet",
        ),
        ("tain", "gpipe: tain: no such command; did you mean train?; see gpipe --help"),
        ("train filters=3", "gpipe train: filters=3: no such setting; did you mean model.filters?"),
        # Settings of another command, which a recipe may have for it: typed here they once had no effect.
        ("train +rounds=5", "gpipe train: rounds=5: gpipe train has no such setting, gpipe bench has; remove it"),
        (
            f"train -cd {RECIPES_DIR} -cn table2_amoebanet steps=5",
            "steps=5: gpipe train has no such setting, gpipe bench",
        ),
        ("train dataset.root=x", "gpipe train: dataset.root=x: the chosen dataset has no such setting; remove it"),
        ("train micro_batches=1,4", "gpipe train: micro_batches=1,4: several values are a sweep; add -m"),
        ("train partitions", "gpipe train: partitions: a setting without a value; write partitions=VALUE"),
        ("train schedule=[a", "gpipe train: schedule=[a: cannot be read"),
        ("train presets=x", "presets=x: the model and the data set choose it; remove it, or give ~presets"),
        ("train --partitions=4", "; a setting has no dashes: partitions=4;"),
        ("train checkpoint=[1,2]", "gpipe train: checkpoint=[1,2]: is a group of settings; set one of them, e.g."),
        ("train -cn foo", "gpipe train: -cn foo: no such configuration"),
        ("evaluate -m run=x,y", "gpipe evaluate: -m: evaluate has no sweeps"),
        ("bench max_steps=3", "max_steps=3: a measurement ends after its steps; give steps=... and warm_up_steps=..."),
        ("bench resume=nowhere", "resume=nowhere: a measurement starts from scratch, and this is not a sweep"),
        ("check partitions=auto", "gpipe check: partitions=auto: "),
        ("help recompte", "gpipe help: recompte: no such topic; did you mean recompute?"),
        ("help -k bubbel", "-k bubbel: no topic has this word; the nearest are bubble, "),
        ("site", "gpipe site: FOLDER: give the folder"),
        ("site public partitions=99", "gpipe site: partitions=99: "),
        ("compare nowhere empty", "gpipe compare: nowhere: "),
        ("compare x fromat=csv", "fromat=csv: no such setting; did you mean format?"),
        ("reproduce seed=1", "gpipe reproduce: seed=1: of which recipe?"),
        ("reproduce breakdown foo=1", "gpipe reproduce: foo=1: no such setting"),
        ("reproduce all steps=5", "steps=5: table1_amoebanet does not take this setting of gpipe bench"),
        ("plan -m partitions=1,2 run_folder=x", "run_folder=x: each plan of a sweep has its own folder"),
        ("check partitions=1 against=torch", "against=torch needs a pipeline of two stages or more; use partitions=2"),
        ("train model=unet dataset=digits", "model=unet: predicts a class for each pixel"),
        ("list recipe", "recipe: no such list; did you mean recipes?"),
    ],
)
def test_bad_input_is_one_line(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line in refused(capsys, *arguments.split())


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("optimizer=adamw", "optimizer=adam optimizer.decoupled=true"),
        ("model=resnet50", "model=resnet model.depth=50"),
        ("model=vit", "model=timm model.name=vit_base_patch16_224 dataset.image_size=224"),
        ("model=convnext", "model=timm model.name=convnext_atto dataset.image_size=224"),
        ("model=gpt2", "model=hf model.name=gpt2"),
        ("model=llama", "model=hf model.name=FOLDER"),
        ("precision=bf16", "precision=bfloat16"),
        ("recompute=false", "recompute=never"),
        ("optimizer.lr=0.1", "learning_rate=constant learning_rate.peak=0.1"),
        ("optimizer.learning_rate=0.1", "learning_rate=constant learning_rate.peak=0.1"),
        ("partition=4", "partitions=4"),
    ],
)
def test_what_other_programs_call_a_setting_is_translated_and_accepted_when_typed(
    typed: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """optimizer=adamw was answered by adam, whose weight decay is another one; optimizer.lr=0.1 by learning_rate, which
    takes no number."""
    line = refused(capsys, "train", typed)
    meant = re.search(r"(?:write|for example) (\S+=\S+(?: \S+=[^\s,;]+)*)", line)
    named = re.search(r"did you mean (\w+)\?", line)
    assert (meant[1].rstrip(",;") if meant else f"{named and named[1]}={typed.partition('=')[2]}") == ours, line
    here = ["--cfg", "job"] if "model=hf" in ours else ["dry_run=true", "hardware=cpu"]  # such a model is elsewhere
    assert main(["train", *ours.split(), *here]) == 0


@pytest.mark.parametrize("words", ["list runs", "train"])
def test_an_empty_argument_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of an unset variable of the shell, `gpipe list runs "$FOLDER"`, the folder in which one is was taken."""
    assert "'': " in refused(capsys, *words.split(), "")


def test_under_torchrun_rank_0_reports_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others wait, as torchrun ends all with the first one; then they report what only they can know."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr("gpipe_cli.cli.time.sleep", waited.append)
    assert main(["train", "partitions=0"]) == 2
    assert waited == [RANK_ZERO_GRACE_SECONDS]
    assert capsys.readouterr().err.startswith("gpipe train: process 1: partitions=0:")


@pytest.mark.parametrize(("moment", "line"), [("torch.distributed", "train"), ("torch", "plan partitions=3")])
def test_interrupted_before_it_has_begun_it_says_so(moment: str, line: str) -> None:
    """Of a KeyboardInterrupt while it is imported torch makes a warning, after which the run began, or it aborts. Where
    the interrupt waited for the end of the import, a busy machine took 23 s."""
    command = [sys.executable, "-c", INTERRUPTED, moment, *line.split()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (130, f"gpipe {line.split()[0]}: interrupted\n")
    assert ended.stdout.startswith("AmoebaNet-D (6, 16) on digits") == (line == "train"), "it does not wait for torch"
    assert "model  " not in ended.stdout
    assert list(Path().iterdir()) == [], "nothing is left behind"


@pytest.mark.parametrize("line", ["train -m seed=1,2", "plan"])
def test_what_is_one_process_is_refused_under_torchrun(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its processes once ran the whole sweep, all in the same folder."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun"):
        run_command(line.split()[0], line.split()[1:])
    assert list(Path().rglob("*.json")) == []


# a few lines that stand for 9^9 values
BOMB = "a0: &a0 x\n" + "\n".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("defaults:\n  - table\n  - _self_\n", "a file includes itself in its defaults"),
        ("output: gr\udcfc\udcdfe", "table.yaml: holds no settings (line 1 is not UTF-8"),
        (BOMB, "table.yaml: holds no settings (more than 20 aliases"),
        ("seed: 1\nepochs: [1\n", "table.yaml: holds no settings (line 3: expected ',' or ']'"),
        ("", "partitions: the setting is missing"),
    ],
    ids=lambda text: text[:12],
)
def test_a_file_that_is_no_configuration_is_one_line(
    text: str, line: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """One without our own settings of Hydra left folders and logs of Hydra's; others ended in 3,000 lines, or, as
    Python refuses to read a number with more than 4,300 digits and PyYAML fails at tags, in a traceback."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "table.yaml").write_text(text, encoding="utf-8", errors="surrogateescape")
    assert line in refused(capsys, "train", "-cd", str(folder), "-cn", "table")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("gpipe tr", "train evaluate plan bench check reproduce compare export site list help"),
        ("gpipe train model.fil", "model.filters="),
        ("gpipe compare outputs/my_run format=c", "format=csv"),
        ("gpipe evaluate run=", "run=outputs/my_run"),
        ("gpipe reproduce table2_", "table2_amoebanet table2_transformer"),
        ("gpipe train -cd recipes -cn figure", "figure3_resnet101"),
        ("gpipe help micro", "micro-batch micro_batches"),
    ],
)
def test_tab_completion(
    typed: str, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("outputs", "my_run").mkdir(parents=True)
    Path("outputs", "my_run", "config.yaml").touch()
    monkeypatch.setenv("COMP_LINE", typed)
    assert main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.strip() == offered


def test_a_reader_that_stops_reading_sees_no_traceback() -> None:
    command = f"'{sys.executable}' -m gpipe_cli train --cfg job"
    # The reading end is closed before anything is written.
    reading, writing = os.pipe()
    os.close(reading)
    result = subprocess.run(command, shell=True, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (result.stderr, result.returncode) == ("", 141)


@pytest.mark.parametrize("arguments", ["--version >/dev/full", "train >&-"])
def test_output_that_is_lost_is_one_line(arguments: str) -> None:
    """A full disk, or nobody who gave it a stdout: nothing is trained that nobody can follow."""
    command = f"'{sys.executable}' -m gpipe_cli {arguments}"
    result = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert re.fullmatch(r"gpipe[ a-z]*: stdout: (No space left on device|Bad file descriptor)\n", result.stderr)
    assert list(Path().iterdir()) == []


def test_the_folder_of_a_sweeps_run_needs_no_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    name = "partition.balance=[4,8],it's (1) \\"
    Path(name).mkdir()
    assert main(["evaluate", f"run={name}", "--cfg", "job"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["run"] == name
    assert main(["evaluate", f"run={name}"]) == 2
    assert f"run={name}: no run there" in capsys.readouterr().err


def test_options_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "seed=3", "--cfg", "job", "epochs=2"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["seed"], shown["epochs"], shown["micro_batches"]) == (3, 2, 4)
