"""Every command line that README, the pages of recipes and the helps quote is run as it is printed: to its end, or, if
that takes more than half a minute, to its first step, where it gets a Ctrl-C."""

import os
import re
import shlex
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_readme import PAGES, ROOT, blocks
from training_runs import command

from gpipe_cli.cli import COMMANDS
from gpipe_cli.launch.supervisor import Supervisor

# Those that end by themselves within half a minute.
SHORT = re.compile(
    r"gpipe (evaluate|export|compare|list|help|plan|site |reproduce$"
    r"|check model=custom|train .*(--help|--cfg|dry_run|resume=.*sweep))"
)
# What needs machines, memory or files that are not here is only composed.
ELSEWHERE = re.compile(
    r"gpipe .*(partitions=16|download=true|filters=256 batch_size=128$|-cn table2_amoebanet|model=hf)"
)
# Refused without the data set, or as the folder has a sweep of gpipe train.
REFUSED = (
    "imagenet_amoebanet_b partitions=8",
    "scale=paper dataset.root=data",
    "bench resume=outputs/2026-01-31_12-00-00_sweep",
)
EXTRAS = {"format=onnx": "onnxscript", "against=torchgpipe": "torchgpipe"}


def quoted() -> list[str]:
    """The lines without their comments, each once; torchrun's are run by this process alone."""
    lines = re.sub(
        r" *\\\n *| {2}# .*", lambda found: " " if "\\" in found[0] else "", "".join(blocks("bash"))
    ).splitlines()
    lines = [part for line in lines for part in line.split(" && ")]
    lines += [code for page in PAGES.values() for code in re.findall(r"`(gpipe [^`\n]+ [^`\n]+)`", page)]
    for file in (*(ROOT / "conf").glob("*.yaml"), *(ROOT / "gpipe_cli" / "commands").glob("*.py")):
        lines += re.findall(r"^ {2,}((?:gpipe|torchrun .*-m gpipe_cli) (?:\S| (?! ))+)", file.read_text("utf-8"), re.M)
    lines = [re.sub(r"^torchrun .*-m gpipe_cli\b", "gpipe", line.strip()) for line in lines]
    patterns = r"\[FOLDER\]|\[setting| \.\.\. |\[\.\.\.\]|reproduce NAME"  # what to type, not a line
    wanted = sorted({line for line in lines if line.startswith("gpipe ") and not re.search(patterns, line)})
    # of lines that differ in the names of folders only, one
    return [*{re.sub(r"outputs/(?!\S*(sweep|translation))\S+", "FOLDER", line): line for line in wanted}.values()]


@pytest.fixture(scope="module", autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the lines speak of: a model, a configuration, texts, runs and a sweep."""
    folder = tmp_path_factory.mktemp("quoted")
    (folder / "mymodel.py").write_text(blocks("python")[0])
    (folder / "FOLDER").mkdir()
    (folder / "FOLDER" / "NAME.yaml").write_text("defaults:\n  - train\n  - _self_\npartitions: 3\n")
    (folder / "book.txt").write_text("a quick brown fox jumps over the lazy dog\n" * 3000)
    (folder / "pairs.tsv").write_text("".join(f"the fox {n}\tle renard {n}\tfr-en\n" for n in range(600)))
    outputs, short = folder / "outputs", ["max_steps=1", "partitions=1", "threads=1", "data_workers=0", "hardware=cpu"]
    pairs = ["model=transformer_nmt", "dataset=parallel_text", "dataset.root=pairs.tsv", "dataset.vocabulary=300"]
    pairs += ["model.layers=1", "model.width=16", "model.hidden=32", "model.heads=2"]
    with pytest.MonkeyPatch().context() as patch:
        patch.chdir(folder)
        assert command("train", *short, "dataset.classes=[0,1,2,3,4]", "run_folder=outputs/my_run") == 0
        assert command("train", *short, *pairs, "run_folder=outputs/my_translation") == 0
        own = ["model=custom", "model.target=mymodel:digits"]
        assert command("train", *short, *own, "run_folder=outputs/my_digits") == 0
        sweep = ["-m", "micro_batches=1,2", "dry_run=true", "hydra.sweep.dir=outputs/my_sweep"]
        assert command("train", *short, *sweep) == 0
    for name in ("first", "second", "2026-01-31_12-00-00_amoebanet_digits_K2_M4"):
        shutil.copytree(outputs / "my_run", outputs / name)
    shutil.copytree(outputs / "my_sweep", outputs / "2026-01-31_12-00-00_sweep")
    return folder


@pytest.fixture(autouse=True)
def own_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a Ctrl-C that a destructor lost
@pytest.mark.parametrize("line", quoted())
def test_a_quoted_line_runs_as_printed(
    line: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    receive, command_process, struck = Supervisor._receive, os.getpid(), list[bool]()

    def received(supervisor: Supervisor, *arguments: Any) -> None:
        """Ctrl-C once a process of the run has begun to compute; the runs of a sweep are forks of the command."""
        receive(supervisor, *arguments)
        if not struck and any(supervisor._activity_of(number).kind for number in supervisor._running):
            struck.append(True)
            os.kill(command_process, signal.SIGINT)

    arguments, expected = shlex.split(re.split(r" [|>] ", line)[0])[1:], 0
    if ELSEWHERE.match(line):
        arguments += ["--cfg", "job"]
    elif not SHORT.match(line):
        monkeypatch.setattr(Supervisor, "_receive", received)
        expected = 130
    if line.endswith(REFUSED) or any(key in line and find_spec(extra) is None for key, extra in EXTRAS.items()):
        expected = 2
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    if expected == 130 and arguments[0] in ("list", "plan", "reproduce"):
        signal.setitimer(signal.ITIMER_REAL, 0.7, 1)  # it plans in this process, where a destructor may lose the first
    try:
        code: object = command(*arguments)
    except SystemExit as end:  # --help of a command
        code = end.code or 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, alarm)
    printed = capfd.readouterr()
    # a measurement may have ended before the Ctrl-C
    assert code == expected or (code == 0 and arguments[0] == "bench"), printed.out + printed.err
    assert "Traceback" not in printed.out + printed.err


def test_every_command_is_quoted() -> None:
    assert {line.split()[1] for line in quoted()} == COMMANDS.keys()
