"""A model, a data set and a schedule are added to a copy of the package: a file each, with its declaration in `conf/`,
and a line each in the tables of data sets and of orders. Then every command knows them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = {
    "models/two_maps.py": """
from torch import nn

def two_maps(num_classes: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, width), nn.ReLU(), nn.Linear(width, num_classes))
""",
    "conf/model/two_maps.yaml": """# Two linear maps, which a test has added.
name: custom
target: gpipe_cli.models.two_maps:two_maps
length: null
arguments:
  num_classes: ${dataset.num_classes}
  width: 16                 # entries between the two maps
""",
    "data/stripes.py": """
import torch
from gpipe_cli.data.readers import Samples

def read(dataset, seed):
    targets = torch.arange(64) % 2
    images = targets.float().view(-1, 1, 1, 1) * torch.tensor([0.0, 1.0] * 4).expand(64, 3, 8, 8)
    return (Samples(images, targets, ("plain", "striped")),) * 2
""",
    "conf/dataset/stripes.yaml": """# Plain and striped images, which a test has added.
name: stripes
image_size: 8
num_classes: 2
classes: null
drop_last: false
augmentation: {random_resized_crop: null, horizontal_flip: false, cutout: 0, shift: 0}
""",
    "schedule/first_first.py": """
from gpipe_cli.schedule.schedule import Action, Kind

def rows(partitions, micro_batches, devices):
    return [[Action(kind, k, m) for kind in (Kind.F, Kind.B) for m in range(micro_batches)] for k in range(partitions)]
""",
}
LINES = {
    "config/groups.py": ("IMAGE_DATASETS = {\n", '    "stripes": DatasetOptions(root=False),\n'),
    "conf/train.yaml": ("schedule: gpipe             # ", "first_first: which a test has added | "),
    "schedule/named_schedules.py": ("ORDERS = {\n", '    "first_first": Order(),\n'),
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as a wheel installs it, and all of the above."""
    folder = tmp_path_factory.mktemp("extended")
    package = folder / "gpipe_cli"
    shutil.copytree(ROOT / "gpipe_cli", package)
    shutil.copytree(ROOT / "conf", package / "conf")
    for name, text in FILES.items():
        (package / name).write_text(text)
    for name, (above, line) in LINES.items():
        file = package / name
        text = file.read_text()
        assert text.count(above) == 1
        file.write_text(text.replace(above, above + line))
    return folder


PROGRAM = """
import os, sys
from gpipe_cli.cli import main
for line in sys.argv[1:]:
    words = line.split()
    os.environ["COMP_LINE"] = line.removeprefix("complete ")
    code = main(["-sc", "query=bash"] if words[0] == "complete" else words)
    assert code == 0, line
    print("<END>", flush=True)
"""


def gpipe(folder: Path, *lines: str) -> list[str]:
    """What each of these command lines prints; they share a process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *lines], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "120", "_COMPLETE_INSTALL": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("<END>\n")[:-1]


def test_what_is_added_is_listed_explained_completed_and_trained(extended: Path) -> None:
    train = (
        "train model=two_maps dataset=stripes schedule=first_first model.arguments.width=8 partitions=2 batch_size=8 "
        "micro_batches=2 executor=in_process max_steps=1 device=cpu hardware=cpu threads=1 data_workers=0 logger=[]"
    )
    shown = {
        "list models": ["two_maps"],
        "list datasets": ["stripes"],
        "help two_maps": ["which a test has added"],
        "help stripes": ["which a test has added"],
        "help first_first": ["which a test has added", "F0 F1 F2"],
        "complete gpipe train model=two": ["model=two_maps"],
        "complete gpipe train dataset=str": ["dataset=stripes"],
        "complete gpipe train schedule=first": ["schedule=first_first"],
        "train --help": [" | two_maps |", " | stripes |"],
        train: ["two_maps", "completed"],
    }
    printed = dict(zip(shown, gpipe(extended, *shown), strict=True))
    assert {line: text for line in shown for text in shown[line] if text not in printed[line]} == {}, printed
