"""Code that a folder's files name, functions, classes and modules, is run only if the user who opens them also names
it. `target: subprocess:getoutput` in config.yaml was enough for every command."""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from training_runs import NAMED, SMALL, TINY, command, command_struck, configure, train_here, wait_until

import gpipe_cli
from gpipe_cli.errors import InputError
from gpipe_cli.results.files import read_result

OWN = [
    *SMALL, "partitions=1", "executor=in_process", "hardware=cpu", "checkpoint.every_steps=1", "recompute=never",
    "max_steps=1",
]  # fmt: skip
UNNAMED = [setting for setting in OWN if setting != NAMED]
MINE = "defaults:\n  - train\n  - _self_\nmodel:\n  target: custom_models:small\n"
PLANTED = """
from pathlib import Path

Path({ran!r}).touch()

def build(**arguments):
    Path({ran!r}).touch()
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the module `planted`, in the current folder, makes when it is imported, and when it is called."""
    file = tmp_path / "ran"
    (tmp_path / "planted.py").write_text(PLANTED.format(ran=str(file)))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted", raising=False)
    return file


def plant(file: Path) -> None:
    """Have a file name the planted function instead of the one that its run was trained with."""
    file.write_text(file.read_text().replace("custom_models:small", "planted:build"))


@pytest.fixture
def run(tmp_path: Path, ran: Path) -> Path:
    folder = tmp_path / "run"
    train_here(configure(*OWN), folder)
    plant(folder / "config.yaml")
    return folder


def line_of(capfd: pytest.CaptureFixture[str]) -> str:
    (line,) = capfd.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "line",
    [
        "evaluate run={}",
        "export run={}",
        "train resume={} max_steps=2",
        "train resume={} run_folder={} max_steps=2",
        "train resume=auto run_folder={} max_steps=2",
        "train -m resume={} max_steps=2,3",
    ],
)
def test_a_function_that_a_run_names_is_not_called(
    line: str, run: Path, ran: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With what the message asks to add, naming another function instead, the command does its work."""
    arguments = shlex.split(line.format(run, run))
    assert command(*arguments) == 2
    refused, remedy = line_of(capfd).split("if you trust it, add ")
    assert f": model.target=planted:build: {run} names this function" in refused
    assert remedy.endswith("model.target=planted:build")
    assert command(*arguments, *shlex.split(remedy.replace("planted:build", "custom_models:small"))) == 0
    assert not ran.exists()


def test_what_only_looks_at_a_run_calls_nothing(run: Path, ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its weights are loaded by a run with another function."""
    assert command("train", *OWN, f"init_from={run}", "dry_run=true") == 0
    assert command("train", *OWN, f"init_from={run}", "run_folder=tuned") == 0
    assert command("check", *OWN, f"init_from={run}") == 0
    assert command("compare", str(run), "tuned") == 0
    assert command("list", "runs", ".") == 0
    assert not ran.exists()
    assert command("train", *OWN, f"init_from={run}", "model=amoebanet", "~model.target") == 2
    assert not ran.exists()


def test_python_calls_the_function_that_it_is_given(run: Path, ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^model\.target=planted:build: .* add target='planted:build' to the call$"):
        gpipe_cli.load(run)
    model = gpipe_cli.load(run, target="custom_models:small")
    assert (len(model), ran.exists()) == (8, False)
    with pytest.raises(InputError, match="an object of type NoneType"):
        gpipe_cli.load(run, target="planted:build")
    assert ran.exists()
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("planted:build", "planted:build; touch ran"))
    with pytest.raises(InputError, match=r"not of the form package\.module:function"):  # and it is not said to be typed
        gpipe_cli.load(run)


def test_a_run_that_calls_no_function_takes_none(capfd: pytest.CaptureFixture[str]) -> None:
    assert command("train", *TINY, "dry_run=true", "partitions=1", "run_folder=other") == 0
    capfd.readouterr()
    assert command("evaluate", "run=other", NAMED) == 2
    assert line_of(capfd).startswith(f"gpipe evaluate: {NAMED}: ")


def test_a_resolver_of_this_process_is_not_called(run: Path, ran: Path) -> None:
    """Many programs have one, `eval`, for their own configurations; and `oc.env` would read what nobody has typed."""
    OmegaConf.register_new_resolver("planted", lambda: ran.touch() or "outputs", replace=True)
    text = (run / "config.yaml").read_text()
    for key, value in (("output", "'${planted:}'"), ("device", "${oc.env:DEVICE}")):
        changed = re.sub(rf"(?m)^{key}: .*$", f"{key}: {value}", text)
        assert changed != text
        (run / "config.yaml").write_text(changed)
        if key == "output":
            gpipe_cli.load(run, target="custom_models:small")
            assert command("evaluate", f"run={run}", NAMED) == 0
        else:
            with pytest.raises(InputError, match=r"device=\$\{oc\.env:DEVICE\}: must be one of"):
                gpipe_cli.load(run, target="custom_models:small")
    assert not ran.exists()


def test_the_line_of_a_stopped_run_names_its_function(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also where the function was named by a configuration file."""
    (tmp_path / "mine.yaml").write_text(MINE)
    last = tmp_path / "run" / "checkpoints" / "last"

    def interrupt() -> None:
        wait_until(last.exists, 60, "the first checkpoint")
        os.kill(os.getpid(), signal.SIGINT)

    options = ["-cd", str(tmp_path), "-cn", "mine", f"run_folder={tmp_path / 'run'}", "epochs=10000"]
    assert command_struck(interrupt, "train", *options, *UNNAMED[:-1]) == 130
    (line,) = re.findall(r"(?m)^resume with +gpipe (.*)$", capfd.readouterr().out)
    assert command(*shlex.split(line), f"max_steps={10**6}", "dry_run=true") == 0
    assert command("evaluate", f"run={tmp_path / 'run'}", shlex.split(line)[-1]) == 0


@pytest.fixture
def sweep(tmp_path: Path, ran: Path) -> Path:
    """The folder of a sweep of which one run is left; what it names was named by its configuration file."""
    (tmp_path / "mine.yaml").write_text(MINE)
    options = ["-cd", str(tmp_path), "-cn", "mine", "-m", "hydra.sweep.dir=sweep", "seed=1,2"]
    assert command("train", *options, *UNNAMED) == 0
    saved = json.loads(Path("sweep/sweep.json").read_text())
    assert [attempt["folder"] for attempt in saved["runs"]] == ["seed=1", "seed=2"]
    del saved["runs"][1]
    Path("sweep/sweep.json").write_text(json.dumps(saved))
    return Path("sweep")


def test_a_function_that_a_sweep_names_is_not_called(sweep: Path, ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Be it in sweep.json, in a configuration file that it names, or in the config.yaml of a resumed run."""
    plant(Path("mine.yaml"))
    hydra = {"callbacks": {"mine": {"_target_": "planted.build"}}, "launcher": {"_target_": "planted.build"}}
    with Path("mine.yaml").open("a") as file:
        file.write(OmegaConf.to_yaml({"hydra": hydra}))
    plant(sweep / "seed=1" / "config.yaml")
    capfd.readouterr()
    assert command("train", f"resume={sweep}") == 2
    refused, remedy = line_of(capfd).split("if you trust it, add ")
    assert f": model.target=planted:build: {sweep} names this function" in refused
    assert command("train", f"resume={sweep}", remedy.replace("planted:build", "custom_models:small")) == 0
    assert "run 1 of 2: seed=1: completed before, skipped" in capfd.readouterr().out
    assert read_result(sweep / "seed=2-2")["status"] == "completed"
    assert not ran.exists()
    saved = json.loads((sweep / "sweep.json").read_text())
    wrong = {
        "begin none": {"arguments": [*OWN[:-1], "model.target=planted:build"]},
        "hydra.searchpath=[pkg://planted]": {"arguments": [*saved["arguments"], "hydra.searchpath=[pkg://planted]"]},
        "../run": {"runs": [saved["runs"][0] | {"folder": "../run"}]},
    }
    for named, change in wrong.items():
        (sweep / "sweep.json").write_text(json.dumps(saved | change))
        assert command("train", f"resume={sweep}", "model.target=custom_models:small") == 2
        assert named in line_of(capfd)
    assert not ran.exists()


def test_each_function_of_a_sweep_is_named(ran: Path, capfd: pytest.CaptureFixture[str]) -> None:
    targets = "custom_models:small,custom_models:odd"
    assert command("train", *UNNAMED, "-m", f"model.target={targets}", "hydra.sweep.dir=sweep", "dry_run=true") == 0
    saved = json.loads(Path("sweep/sweep.json").read_text())
    Path("sweep/sweep.json").write_text(json.dumps(saved | {"runs": saved["runs"][:1]}))
    capfd.readouterr()
    for few in ([], [NAMED]):
        assert command("train", "resume=sweep", *few) == 2
        assert line_of(capfd).endswith(f"if you trust it, add -m model.target={targets}")
    assert command("train", "resume=sweep", "-m", f"model.target={targets}") == 0
