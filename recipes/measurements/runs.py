"""What the measurements share: `gpipe` as a user calls it, a model to measure, and their command line."""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from torch import Tensor

from gpipe_cli.cli import main
from gpipe_cli.config.settings import TrainConfig, from_tree
from gpipe_cli.pipeline.runtime.boundary import same_bits

# AmoebaNet-D (6, 64) at 128 px on noise, read inline, so that no other process takes part
AMOEBANET = [
    "model.normal_cells=6", "model.filters=64", "dataset=synthetic_images", "dataset.image_size=128",
    "dataset.num_classes=1000", "dataset.train_samples=512", "dataset.test_samples=8", "batch_size=32",
    "data_workers=0", "epochs=9",
]  # fmt: skip


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser of settings, to which a measurement adds its own options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "settings", nargs="*", metavar="setting=value", help="settings of gpipe, added to those of the measurement"
    )
    return parser


def config_of(settings: Sequence[str]) -> TrainConfig:
    """The configuration of `gpipe train`; the last value of a setting counts."""
    given = {setting.partition("=")[0]: setting for setting in settings}
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        return from_tree(TrainConfig, compose("train", list(given.values())))


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> int:
    """The number of tensors that are bit-identical."""
    return sum(name in other and same_bits(tensor, other[name]) for name, tensor in one.items())


def gpipe(command: str, *settings: str, run_folder: Path | None = None) -> dict[str, Any]:
    """Call `gpipe` in this process, whose workers do the computations; returns its plan.json or result.json.

    Ends the program if it fails.
    """
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as temporary:
        place = f"output={temporary}" if run_folder is None else f"run_folder={run_folder}"
        with contextlib.redirect_stdout(output):
            code = main([command, place, *settings])
        if code:
            raise SystemExit(f"gpipe {command} {' '.join(settings)}\n{output.getvalue()}")
        (folder,) = Path(temporary).iterdir() if run_folder is None else (run_folder,)
        file = folder / f"{'plan' if command == 'plan' else 'result'}.json"
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return read
