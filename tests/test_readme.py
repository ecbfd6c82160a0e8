"""The README says only what is so: its commands compose, its links lead somewhere, its refusals are the real ones."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from gpipe_cli.cli import COMMANDS, main
from gpipe_cli.config.settings import TrainConfig, from_tree, to_yaml
from gpipe_cli.config.typed import settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))


def commands() -> list[str]:
    """Every line that begins `gpipe` or `torchrun ... -m gpipe_cli`, in blocks and in the text, without its comment."""
    lines = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines()] + INLINE
    found = [re.sub(r"^torchrun .*-m gpipe_cli\b", "gpipe", line.partition("  #")[0].strip()) for line in lines]
    return sorted({line for line in found if line.startswith("gpipe ")})


def refusals() -> list[tuple[str, str]]:
    """The commands after a `$` and the line that each is answered with."""
    text = "".join(block for kind, block in BLOCKS if kind == "text")
    return re.findall(r"^\$ (gpipe .*)\n(gpipe .*)$", text, re.MULTILINE)


@pytest.fixture(autouse=True)
def _a_place_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty folder but for `outputs/my_run`, a run as far as its settings go."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pytest"])  # Hydra reads it, so main sets it
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # likewise
    monkeypatch.delenv("RANK", raising=False)
    assert main(["train", "--cfg", "job"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    run = tmp_path / "outputs" / "my_run"
    run.mkdir(parents=True)
    from omegaconf import OmegaConf

    (run / "config.yaml").write_text(to_yaml(from_tree(TrainConfig, OmegaConf.create(tree))), encoding="utf-8")


def test_the_readme_has_what_is_tested_here() -> None:
    assert len(commands()) >= 15
    assert len(refusals()) >= 3
    for command in COMMANDS:
        assert any(line.startswith(f"gpipe {command} ") for line in commands())


def composed() -> list[str]:
    """The commands that Hydra composes; the others are only run, by test_readme_runs.py."""
    return [line for line in commands() if line.split()[1] not in ("compare", "reproduce") and "my_sweep" not in line]


@pytest.mark.parametrize("line", composed())
def test_every_command_composes(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = shlex.split(line)[1:]
    if arguments[0] == "-sc":  # would write to the shell's own files
        return
    if "FOLDER" in arguments:
        (tmp_path / "FOLDER").mkdir()
        (tmp_path / "FOLDER" / "NAME.yaml").write_text("defaults:\n  - train\n  - _self_\npartitions: 3\n")
    asks = any(argument in ("--help", "--version", "--cfg") for argument in arguments)
    sweep = "-m" in arguments
    if sweep:  # --cfg shows one configuration: that of each value
        arguments.remove("-m")
        arguments = [re.sub(r"=([^\[,]+),.*", r"=\1", argument) for argument in arguments]
    try:
        code: object = main([*arguments, *([] if asks else ["--cfg", "job"])])
    except SystemExit as end:  # --help of a command
        code = end.code
    captured = capsys.readouterr()
    assert code in (0, None), captured.err
    assert captured.err == ""
    if asks:
        return
    shown = yaml.safe_load(captured.out)
    for argument in arguments:
        key, given, value = argument.partition("=")
        if given and key not in ("dataset", "model", "hardware"):
            found = shown
            for part in key.split("."):
                found = found[part]
            assert found == yaml.safe_load(value), argument


@pytest.mark.parametrize(("line", "answer"), refusals())
def test_refusals_are_the_real_ones(line: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)[1:]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{answer}\n")


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_settings_and_defaults_are_those_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of settings: every key is one, and its default is the one that is shown."""
    assert main(["train", "--cfg", "job"]) == 0
    defaults = yaml.safe_load(capsys.readouterr().out)
    table = README.partition("## Settings that matter")[2].partition("\n## ")[0]
    rows = [re.split(r" *\| *", row.strip("|").strip()) for row in re.findall(r"^\| `.*$", table, re.MULTILINE)]
    assert len(rows) >= 10
    for names, values, *_ in rows:
        for name, value in zip(re.findall(r"`([\w.]+)`", names), values.split(", "), strict=True):
            assert name in settings(TrainConfig)
            found = defaults
            for part in name.split("."):
                found = found[part]
            assert found == yaml.safe_load(value), name


def test_the_words_are_ours() -> None:
    """No machine's paths, and the versions of Python are those of pyproject.toml."""
    assert not re.search(r"/(home|root|work|tmp)/", README)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11,<3.14"' in project
    assert "Python 3.11, 3.12 or 3.13" in README
    assert '"torch>=2.9"' in project
    assert "PyTorch 2.9 or newer" in README
