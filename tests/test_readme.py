"""The READMEs say only what is so: commands compose, one of each kind runs, links lead somewhere, refusals are real."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training_runs import command

from gpipe_cli.cli import COMMANDS, main
from gpipe_cli.reporting.plots.moving_timeline import moving_timeline
from gpipe_cli.reporting.site.site import MOVING

ROOT = Path(__file__).parent.parent
PAGES = {
    page: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted((ROOT / "recipes").rglob("*.md")))
}
README, ALL = PAGES[ROOT / "README.md"], "".join(PAGES.values())
# One command of each kind, with what makes it short.
SMALL = ["model.normal_cells=3", "model.filters=4", "hardware=cpu", "data_workers=0", "threads=1"]
FIRST = {
    "gpipe train": [
        *SMALL, "partitions=1", "max_steps=2", "dataset.classes=[0,1,2,3,4]", "run_folder=outputs/my_run",
    ],
}  # fmt: skip
RUNS = {
    "gpipe train resume=outputs/my_run partitions=4 epochs=12": ["partitions=1", "max_steps=3"],
    "gpipe train dataset.classes=[5,6,7,8,9] init_from=outputs/my_run freeze=[stem,'cell_0*']": [
        *SMALL, "partitions=1", "max_steps=1", "logger=[]",
    ],
    "gpipe train model=custom model.target=mymodel:digits": ["dry_run=true", "hardware=cpu"],
    "gpipe train -cd FOLDER -cn NAME": [*SMALL, "dry_run=true"],
    "gpipe evaluate run=outputs/my_run partitions=1 checkpoint=last": [],
    "gpipe export run=outputs/my_run": ["partitions=1"],
    "gpipe diff outputs/my_run outputs/my_run": [],
    "gpipe list models": [],
    "gpipe help micro_batches": [],
    "gpipe plan partitions=2 micro_batches=auto recompute=auto hardware.memory_gib=0.05": SMALL,
    "gpipe bench partitions=2 micro_batches=8": [*SMALL, "partitions=1", "steps=1", "warm_up_steps=0"],
    "gpipe demo": ["--help"],  # test_demo_command.py runs it
    "gpipe check model=custom model.target=mymodel:digits": ["executor=in_process"],
    "gpipe launch slurm nodes=2 gpus_per_node=4 time=1-00:00 partitions=8 sbatch.partition=gpu": [
        *SMALL, "partitions=2", "gpus_per_node=1",
    ],
    "gpipe reproduce": [],
    "gpipe site public presets=digits": [],
}  # fmt: skip
SWEEP = {  # in this order
    "gpipe train -m partitions=1,2 micro_batches=4,16 max_steps=20": [
        *SMALL, "micro_batches=4", "dry_run=true", "hydra.sweep.dir=outputs/my_sweep",
    ],
    "gpipe train resume=outputs/my_sweep": [],
    "gpipe compare outputs/my_run outputs/my_sweep": [],
}  # fmt: skip
TRIED = FIRST | RUNS | SWEEP


def blocks(kind: str) -> list[str]:
    """The code blocks of a kind, of all pages, the README's first."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", ALL, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line that begins `gpipe` or `torchrun ... -m gpipe_cli`, in blocks and in the text, without its comment."""
    text = re.sub(r"^```.*?^```$", "", ALL, flags=re.MULTILINE | re.DOTALL)
    blocks_of_lines = [re.sub(r" *\\\n *", " ", block).splitlines() for block in blocks("bash")]
    lines = [line for block in blocks_of_lines for line in block] + re.findall(r"`([^`\n]+)`", text)
    found = [re.sub(r"^torchrun .*-m gpipe_cli\b", "gpipe", line.partition("  #")[0].strip()) for line in lines]
    named = {f"gpipe {command}" for command in COMMANDS} - TRIED.keys()  # the name of a command and not a call
    return sorted({line for line in found if line.startswith("gpipe ")} - named)


def refusals() -> list[tuple[str, str]]:
    """The commands after a `$` and the line that each is answered with."""
    return re.findall(r"^\$ (gpipe .*)\n(gpipe .*)$", "".join(blocks("text")), re.MULTILINE)


def composed() -> list[str]:
    """The commands that Hydra composes. The others only run."""
    only_run = ("demo", "compare", "diff", "list", "help", "reproduce", "site")
    return [line for line in commands() if line.split()[1] not in only_run and "my_sweep" not in line]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the README speaks of: its model, a configuration, recipes, a run."""
    folder = tmp_path_factory.mktemp("readme")
    model = blocks("python")[0]
    (folder / "mymodel.py").write_text(model)
    (folder / "FOLDER").mkdir()
    (folder / "FOLDER" / "NAME.yaml").write_text("defaults:\n  - train\n  - _self_\npartitions: 3\n")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    with pytest.MonkeyPatch().context() as patch:
        patch.chdir(folder)
        for line, settings in FIRST.items():
            assert run(line, settings) == 0
    return folder


@pytest.fixture(autouse=True)
def own_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def run(line: str, settings: list[str]) -> int:
    """Runs a command of the README with `settings` in the place of its own."""
    short = {argument.partition("=")[0] for argument in settings}
    given = [argument for argument in shlex.split(line)[1:] if argument.partition("=")[0] not in short]
    return command(*given, *settings)


def test_the_readme_has_what_is_tested_here() -> None:
    assert len(README.splitlines()) <= 220
    assert len(refusals()) >= 3
    assert TRIED.keys() <= {*commands()}
    assert {line.split()[1] for line in TRIED} == COMMANDS.keys()


@pytest.mark.parametrize("line", RUNS)
def test_one_command_of_each_kind_runs(line: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = run(line, RUNS[line])
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.parametrize("program", blocks("python")[1:])
def test_programs_run_alone_and_under_torchrun(program: str) -> None:
    """Each of the processes prints what one alone prints. To a file of its own: torchrun starts Python unbuffered, a
    line's end is written apart, and two processes' lines once ran into each other."""
    Path("program.py").write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    alone, _ = (
        subprocess.run([sys.executable, *starter, "program.py"], capture_output=True, text=True, check=True,
                       env=os.environ | {"OMP_NUM_THREADS": "1"}).stdout
        for starter in ([], [*torchrun, "--log-dir=logs", "--redirects=1"])
    )  # fmt: skip
    assert alone
    assert [file.read_text() for file in Path("logs").rglob("stdout.log")] == [alone, alone]


def test_a_sweep_runs_goes_on_and_is_compared() -> None:
    assert [run(line, settings) for line, settings in SWEEP.items()] == [0, 0, 0]


@pytest.mark.parametrize("line", composed())
def test_every_command_composes(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each setting is one, and has the value that was given. A sweep is tried with the first value of each."""
    arguments = [
        re.sub(r"=([^\[,]+),.*", r"=\1", argument) if " -m " in line else argument
        for argument in shlex.split(line)[1:]
        if argument != "-m"
    ]
    asks = any(argument in ("--help", "--version", "--cfg") for argument in arguments)
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


def test_the_line_for_tab_completion_installs_it() -> None:
    """Hydra prints a script for the shell; the README named the command that prints it, which installs nothing."""
    (line,) = re.findall(r"Tab completion in bash: `([^`]+)`", README)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = f"{line}\nCOMP_LINE='gpipe tr' COMP_CWORD=1; $(complete -p gpipe | cut -d' ' -f7); echo ${{COMPREPLY[@]}}"
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "train\n", result.stderr


@pytest.mark.parametrize(("line", "answer"), refusals())
def test_refusals_are_the_real_ones(line: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(line)[1:]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{answer}\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[)#]", PAGES[page])
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_moving_picture_is_the_programs() -> None:
    assert (ROOT / "recipes" / "pictures" / MOVING).read_text(encoding="utf-8") == moving_timeline()


def test_versions_are_those_of_the_package() -> None:
    assert not re.search(r"/(home|root|work|tmp)/", ALL)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11,<3.14"' in project
    assert "Python 3.11, 3.12 or 3.13" in README
    assert '"torch>=2.9"' in project
    assert "PyTorch 2.9 or newer" in README
