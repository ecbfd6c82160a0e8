"""The way to the first optimizer step that recipes/contributing.md lists is the way that a run takes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import SMALL

PAGE = (Path(__file__).parent.parent / "recipes" / "contributing.md").read_text(encoding="utf-8")
# Python runs sitecustomize.py at the start of every process; a fork keeps the function that is set here.
WATCH = """
import sys
def watch(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_name in {names} and code.co_filename.endswith({files}):
        with open("entered", "a") as file:
            file.write(f"{{code.co_filename}}, {{code.co_name}}\\n")
sys.setprofile(watch)
"""


def test_a_run_enters_the_functions_that_the_page_lists_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`, `(\w+)`: ", PAGE, re.MULTILINE)
    assert len(listed) == 10
    files, names = zip(*listed, ("optim/rmsprop_tf.py", "step"), strict=True)
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(names={*names}, files=files))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    settings = [*SMALL, "partitions=1", "cost=datasheet", "max_steps=1", "run_folder=run"]
    subprocess.run([sys.executable, "-m", "gpipe_cli", "train", *settings], cwd=tmp_path, check=True)
    entered = [line.rpartition("/gpipe_cli/")[2] for line in (tmp_path / "entered").read_text().splitlines()]
    way = [f"{file}, {name}" for file, name in listed]
    assert [line for line in dict.fromkeys(entered) if line in way] == way
    assert entered[entered.index(way[-1]) + 1].endswith("optim/rmsprop_tf.py, step")


def test_no_function_of_the_way_is_in_a_higher_layer_than_the_one_before() -> None:
    table = PAGE.partition("| `gpipe_cli/` |")[2]
    folders = re.findall(r"^\d+\. `(\w+/)", PAGE, re.MULTILINE)
    places = [table.index(f"`{folder}`") for folder in folders]
    assert places == sorted(places)
