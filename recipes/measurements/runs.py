"""What the measurements here share: `gpipe` as a user calls it, the model that they are about, their command line."""

import argparse
import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from gpipe_cli.cli import main

# AmoebaNet-D (6, 64) at 128 px on noise, read inline, so that no other process takes part
AMOEBANET = [
    "model.normal_cells=6", "model.filters=64", "dataset=synthetic_images", "dataset.image_size=128",
    "dataset.num_classes=1000", "dataset.train_samples=512", "dataset.test_samples=8", "batch_size=32",
    "data_workers=0", "epochs=9",
]  # fmt: skip


def command_line(description: str | None) -> argparse.ArgumentParser:
    """The options of a measurement, to which it adds its own; settings change what is measured."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="of gpipe, after those of the measurement")
    return parser


def gpipe(command: str, *settings: str) -> dict[str, Any]:
    """Runs `gpipe` in this process, which computes nothing: its workers do. Returns the plan.json or result.json that
    it wrote. Ends the program if it fails."""
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(output):
            code = main([command, f"output={folder}", *settings])
        if code:
            raise SystemExit(f"gpipe {command} {' '.join(settings)}\n{output.getvalue()}")
        (file,) = Path(folder).glob(f"*/{'plan' if command == 'plan' else 'result'}.json")
        read: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return read
