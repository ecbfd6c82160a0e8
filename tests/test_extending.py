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
    "pipeline/schedule/first_first.py": """
from gpipe_cli.pipeline.schedule.schedules import Action, Kind

def rows(partitions, micro_batches, devices):
    return [[Action(kind, k, m) for kind in (Kind.F, Kind.B) for m in range(micro_batches)] for k in range(partitions)]
""",
}
LINES = {
    "config/groups.py": ("IMAGES = {\n", '    "stripes": Images(root=False),\n'),
    "conf/train.yaml": ("schedule: gpipe             # ", "first_first: which a test has added | "),
    "pipeline/schedule/orders.py": ("ORDERS = {\n", '    "first_first": Order(),\n'),
}


@pytest.fixture(scope="module")
def extended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as a wheel installs it, and all of the above."""
    folder = tmp_path_factory.mktemp("extended")
    package = folder / "gpipe_cli"
    shutil.copytree(ROOT / "gpipe_cli", package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "conf", package / "conf", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (package / name).write_text(text)
    for name, (above, line) in LINES.items():
        file = package / name
        text = file.read_text()
        assert text.count(above) == 1
        file.write_text(text.replace(above, above + line))
    return folder


def gpipe(folder: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpipe_cli", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "120", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_added_is_listed_explained_and_completed(extended: Path) -> None:
    assert "two_maps" in gpipe(extended, "list", "models")
    assert "stripes" in gpipe(extended, "list", "datasets")
    for name in ("two_maps", "stripes", "first_first"):
        assert "which a test has added" in gpipe(extended, "help", name)
    assert "F0 F1 F2" in gpipe(extended, "help", "first_first")
    complete = {"_COMPLETE_INSTALL": "", "COMP_LINE": "gpipe train schedule=first"}
    assert "schedule=first_first" in gpipe(extended, "-sc", "query=bash", **complete)


def test_what_is_added_is_trained(extended: Path) -> None:
    said = gpipe(
        extended, "train", "model=two_maps", "dataset=stripes", "schedule=first_first", "model.arguments.width=8",
        "partitions=2", "micro_batches=2", "executor=in_process", "batch_size=8", "max_steps=1", "device=cpu",
        "hardware=cpu", "threads=1", "data_workers=0",
    )  # fmt: skip
    assert "two_maps" in said
