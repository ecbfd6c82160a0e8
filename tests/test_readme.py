"""The READMEs say only what is so: programs run, links lead somewhere, refusals are real."""

import hashlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from training_runs import SMALL

from gpipe_cli.cli import main
from gpipe_cli.results.files import read_result

ROOT = Path(__file__).parent.parent
PAGES = {
    page: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *sorted((ROOT / "recipes").rglob("*.md")))
}
README, ALL = PAGES[ROOT / "README.md"], "".join(PAGES.values())


def blocks(kind: str) -> list[str]:
    """The code blocks of a kind, of all pages, the README's first."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", ALL, re.MULTILINE | re.DOTALL)


def refusals() -> list[tuple[str, str]]:
    """The commands after a `$` and the line that each is answered with."""
    return re.findall(r"^\$ (gpipe .*)\n(gpipe .*)$", "".join(blocks("text")), re.MULTILINE)


def test_the_readme_has_what_is_tested_here() -> None:
    assert len(README.splitlines()) <= 180
    assert len(PAGES[ROOT / "recipes" / "README.md"].splitlines()) < 700
    assert refusals()


PROGRAMS = [program for program in blocks("python")[1:] if "optuna" not in program]
(SEARCH,) = (program for program in blocks("python") if "optuna" in program)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_run_alone_and_under_torchrun(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the processes prints what one alone prints, besides Gloo's greetings in torch 2.9. To a file of its own:
    torchrun starts Python unbuffered, a line's end is written apart, and two processes' lines once ran into each
    other."""
    Path("program.py").write_text(program)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [sys.executable, *torchrun, "--log-dir=logs", "--redirects=1", "program.py"]
    subprocess.run(command, capture_output=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    printed = [file.read_text() for file in Path("logs").rglob("stdout.log")]
    runpy.run_path("program.py", run_name="__main__")
    alone = capsys.readouterr().out
    assert alone
    assert [re.sub(r"^\[Gloo\] .*\n", "", text, flags=re.MULTILINE) for text in printed] == [alone, alone]


@pytest.mark.slow
def test_a_search_learns_from_the_runs_before() -> None:
    pytest.importorskip("optuna", "4")
    tiny = ", ".join(map(repr, [*SMALL, "partitions=1", "hardware=cpu", "max_steps=1"]))
    Path("program.py").write_text(SEARCH.replace('"epochs=3"', tiny).replace("n_trials=20", "n_trials=2"))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = str(Path(__file__).parent)  # where custom_models.py is
    ended = subprocess.run([sys.executable, "program.py"], env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"\{'momentum': 0\.\d+\} (.*)", ended.stdout)
    assert found is not None
    assert float(found[1]) == max(read_result(Path(f"outputs/search/{n}"))["validation"]["top1"] for n in (0, 1))


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
    assert capsys.readouterr().err == f"{answer}\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[)#]", PAGES[page])
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_versions_are_those_of_the_package() -> None:
    assert not re.search(r"/(home|root|work|tmp)/", ALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    assert "torch>=2.9" in project["dependencies"]
    for page in (README, project["readme"]["text"]):
        assert "Python 3.11, 3.12 or 3.13; PyTorch 2.9 or newer" in page
    # what .ci/run with DEPENDENCIES=floor installs: every package at the oldest release that is allowed
    packages = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    assert [name for name in packages if not re.match(r"[\w-]+>=[\d.]+(,|$)|gpipe-cli\[", name)] == []
    (file,) = project["license-files"]
    assert project["license"] == "Apache-2.0"
    assert f"({file})" in README
    official = "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"  # of apache.org
    assert hashlib.sha256((ROOT / file).read_bytes()).hexdigest() == official
