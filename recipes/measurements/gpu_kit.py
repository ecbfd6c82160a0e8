"""What holds on the GPU at hand, and how fast it is there beside other programs: one command, one table.

    python recipes/measurements/gpu_kit.py [--parts tests,check,peers] [--seconds 180] [--folder gpu_kit]

`tests` runs pytest -m gpu, `check` gpipe check of four models in two precisions and trainings that must use graphs, and
`peers` gpipe check against=... in the sizes of torchgpipe's benchmarks. Every row is a process that is killed after
--seconds. The table FOLDER/gpu_kit.md is written after each row, so that a kit that is interrupted leaves what it has
found. With --device=cpu all models are tiny.

A machine without a network gets the wheels that images with PyTorch lack, made in the root of a checkout:

    pip wheel -q --no-deps -w kit . hydra-core omegaconf antlr4-python3-runtime Babel torchgpipe==0.0.7

and there, in the root of the same checkout:

    pip install -q --no-index --no-deps --target site kit/*.whl
    PYTHONPATH=site PYTHONSAFEPATH=1 python recipes/measurements/gpu_kit.py
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from gpipe_cli.reporting.tables.table import Column, Table, to_markdown
from gpipe_cli.system.files import write_whole
from gpipe_cli.system.gpus import usable_gpus
from gpipe_cli.system.machine import cpu_model

ROOT = Path(__file__).parents[2]
PARTS = ("tests", "check", "peers")
TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_gpu.py")
SMALL = ("dataset=synthetic_images dataset.image_size=16 dataset.num_classes=4 dataset.train_samples=32 "
         "dataset.test_samples=8 batch_size=8 model.normal_cells=3 model.filters=8")  # fmt: skip
TEXT = ("dataset=synthetic_text dataset.vocabulary=1000 dataset.train_samples=64 dataset.test_samples=8 batch_size=16 "
        "batch_tokens=null model.layers=4 model.width=64 model.hidden=128 model.heads=4 model.length=32")  # fmt: skip
IMAGES = SMALL.partition(" model.")[0].replace("size=16", "size=64")
CHECKED = {
    "amoebanet": SMALL,
    "resnet": f"{IMAGES} model.depth=18",
    "transformer_lm": TEXT,
    "timm": f"{IMAGES} model.name=convnext_atto",
}
# the models of torchgpipe's benchmarks and of the paper's Table 2, in a size that one device holds
LARGE = "dataset=synthetic_images dataset.image_size=224 dataset.num_classes=1000 dataset.test_samples=8"
PEERS = {
    "amoebanet": f"{LARGE} dataset.train_samples=64 model.normal_cells=18 model.filters=256 batch_size=32",
    "resnet": f"{LARGE} dataset.train_samples=128 model.depth=101 batch_size=64",
    "transformer_lm": "dataset=synthetic_text dataset.vocabulary=32000 dataset.train_samples=32 dataset.test_samples=8 "
                      "batch_tokens=null batch_size=16 model.layers=6 model.width=1024 model.hidden=4096 "
                      "model.heads=16 model.length=1024",
}  # fmt: skip
Row = tuple[str, str, str]  # what was run, whether it held, figures


def lines(part: str, device: str) -> Iterator[list[str]]:
    """The command lines of `gpipe` of a part."""
    models = CHECKED if part == "check" or device == "cpu" else PEERS
    several = torch.cuda.device_count() > 1 or device == "cpu"
    for model, settings in models.items():
        for precision in ("float32", "bfloat16"):
            line = ["check", f"model={model}", *settings.split(), f"precision={precision}", f"device={device}",
                    "micro_batches=4", "threads=1", "data_workers=0", "hardware=cpu"]  # fmt: skip
            if part == "check":
                line += ["partitions=2", "executor=in_process"]
                yield line
                if precision == "float32" and device != "cpu":  # every stage must be recorded
                    yield ["train", *line[1:], "graphs=true", "max_steps=4", "logger=[]"]
                continue
            yield [*line, "against=torchgpipe", "partitions=1"]
            if several:
                yield [*line, "against=torch", "partitions=2"]


def figures(file: Path, printed: str) -> str:
    """What a check.json says: speeds beside other programs, or a verdict; without one the last line printed."""
    if not file.exists():
        return (printed.strip().splitlines() or [""])[-1][:300]
    report = json.loads(file.read_text(encoding="utf-8"))
    if "against" not in report:
        return str(report["verdict"])
    shown = []
    for row in report["rows"]:
        speeds = [
            "-" if one is None else f"{one['samples'] / median(map(median, one['rounds'])):.1f}"
            for one in (row["measured"], row["ours_measured"])
        ]
        shown.append(f"{row['schedule']} {speeds[0]}, gpipe {speeds[1]} samples/s, {row['verdict']}")
    return "; ".join(shown)


def perform(command: Sequence[str], folder: Path, seconds: float) -> Row:
    """Run Python with these arguments, for at most so many seconds."""
    began = time.monotonic()
    with (folder / "log").open("w+", encoding="utf-8") as log:
        program = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=log, cwd=ROOT, start_new_session=True,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        try:
            held = "yes" if program.wait(seconds) == 0 else "NO"
        except subprocess.TimeoutExpired:
            held = f"NO: not done after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        log.seek(0)
        found = figures(folder / "check" / "check.json", log.read())
    what = " ".join(command).removeprefix("-m ").partition(" run_folder=")[0]
    return what, held, f"{found} ({time.monotonic() - began:.0f} s)"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if usable_gpus() else "cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of each row")
    parser.add_argument("--folder", type=Path, default=Path("gpu_kit"))
    options = parser.parse_args(arguments)
    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"--parts={','.join(sorted(unknown))}: must be among {', '.join(PARTS)}")
    names = ", ".join(gpu.name for gpu in usable_gpus()) if options.device == "cuda" else cpu_model()
    title, rows = f"{names}, torch {torch.__version__}", list[Row]()
    options.folder.mkdir(parents=True, exist_ok=True)
    for part in options.parts.split(","):
        commands = [TESTS] if part == "tests" else [("-m", "gpipe_cli", *line) for line in lines(part, options.device)]
        for command in commands:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                place = [] if part == "tests" else [f"run_folder={folder}/check"]
                rows.append(perform([*command, *place], Path(folder), options.seconds))
            table = to_markdown(Table.of_rows(title, map(Column, ("what", "held", "figures")), rows))
            write_whole(options.folder / "gpu_kit.md", f"{table}\n")
            print(*rows[-1], sep="  ", flush=True)
    return 0 if all(held == "yes" for _, held, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
