"""What holds on the GPU at hand, and how fast it is there beside other programs: one command, one table.

    python recipes/measurements/gpu_kit.py [--parts engine,peers,layers,memory,check,tests] [--minutes 8] [--folder F]

`engine` has programs in which CUDA graphs may go wrong, `peers` runs gpipe check against=torchgpipe, which times plain
PyTorch, too, in the sizes of torchgpipe's benchmarks, with graphs and in tf32 without, `layers` writes the times of
the layers of these models to F/layers, `memory` compares peaks of two replicas with what was planned, `check` runs
gpipe check of four models in two precisions and trainings that must use graphs, and `tests` runs pytest -m gpu. Every
row is a process that is killed after --seconds, and none begins when --minutes have passed. The table F/gpu_kit.md is
written after each row, so that a kit that is interrupted leaves what it has found. With --device=cpu all models are
tiny.

A machine without a network gets the wheels that images with PyTorch lack, made in the root of a checkout:

    pip wheel -q --no-deps -w kit . hydra-core 'omegaconf<2.4' antlr4-python3-runtime==4.9.3 Babel timm torchgpipe

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from gpipe_cli import Pipeline
from gpipe_cli.pipeline.runtime.stage_graphs import StageCudaGraphs
from gpipe_cli.reporting.tables.table import Column, Table, to_markdown
from gpipe_cli.system.files import write_atomic
from gpipe_cli.system.gpus import usable_gpus
from gpipe_cli.system.machine import cpu_model
from gpipe_cli.training import pipeline_part

ROOT = Path(__file__).parents[2]
PARTS = ("engine", "peers", "layers", "memory", "check", "tests")
GPIPE = "-m", "gpipe_cli"
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


def layers(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.1), *more, nn.Tanh(), nn.Linear(256, 64))


def steps(
    device: str, samples: Sequence[int], before: Callable[[nn.Sequential, int], None], *more: nn.Module, **settings: Any
) -> tuple[list[torch.Tensor], list[StageCudaGraphs]]:
    """The gradients of all steps, of so many samples, and the graphs of the stages; `before` is called before each."""
    pipeline = Pipeline(layers(*more), partitions=2, micro_batches=4, devices=[device], balance=[2, 2 + len(more)],
                        **settings)  # fmt: skip
    gradients = []
    for step, number in enumerate(samples):
        before(pipeline._module, step)
        batch = torch.full((number, 64), 1.0 + step)
        pipeline.step(batch, batch, nn.functional.mse_loss)
        gradients += [parameter.grad.clone() for parameter in pipeline.parameters() if parameter.grad is not None]
        for parameter in pipeline.parameters():
            parameter.grad = None
    assert pipeline._part is not None
    return gradients, [stage.cuda_graphs for stage in pipeline._part.stages.values() if stage.cuda_graphs is not None]


def compared(device: str, samples: Sequence[int], before: Any, *more: nn.Module, **settings: Any) -> str:
    """Raises AssertionError unless graphs give the bits of kernels launched one by one, and are used."""
    expected, _ = steps(device, samples, before, *more, graphs=False, **settings)
    found, graphs = steps(device, samples, before, *more, **settings)
    assert all(map(torch.equal, found, expected)), "other bits"
    assert not any(stage.fallback_reason for stage in graphs), [stage.fallback_reason for stage in graphs]
    assert sum(stage.captures > 0 for stage in graphs) == 2, "nothing was recorded"
    return f"the same bits, {[stage.captures for stage in graphs]} recordings"


def first_use(device: str) -> str:
    """As the docstring of Pipeline shows it, before CUDA is initialized."""
    assert not torch.cuda.is_initialized()
    pipeline = Pipeline(layers(), partitions=2, micro_batches=4)
    loss = pipeline.step(torch.ones(8, 64), torch.ones(8, 64), nn.functional.mse_loss)
    return f"a loss of {loss.item():.3f} on {loss.device}"


class Asking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device.type in ("cpu", "meta") or x.device.index == torch.cuda.current_device(), x.device
        return x


def current_device(device: str) -> str:
    """Of a layer on the last GPU."""
    last = device if device == "cpu" else f"cuda:{torch.cuda.device_count() - 1}"
    steps(last, [8], lambda layers, step: None, Asking(), graphs=False)
    return last


def later_shapes(device: str) -> str:
    """Micro-batches of three samples cannot be recorded while those of four run kernel by kernel."""
    return compared(device, [12, 14, 12, 14], lambda layers, step: None, recompute="never")


def no_memory(device: str) -> str:
    """Memory ends within the recordings of the first three steps; then there is enough."""
    make, full = pipeline_part.graph_maker, [True]

    def before(layers: nn.Sequential, step: int) -> None:
        full[0] = step < 3

    def maker_of(device: torch.device) -> Any:
        maker: Any = make(device)
        capture = maker.capture

        @contextmanager
        def capture_without_memory(*given: Any) -> Iterator[Any]:
            with capture(*given) as graph:
                yield graph
                if full[0]:
                    torch.empty(1 << 50, dtype=torch.uint8, device=device)

        maker.capture = capture_without_memory
        return maker

    vars(pipeline_part)["graph_maker"] = maker_of
    _, graphs = steps(device, [8, 8], before)
    assert all("memory" in stage.fallback_reason for stage in graphs), [stage.fallback_reason for stage in graphs]
    return f"{graphs[0].fallback_reason[:50]}; later {compared(device, [8] * 6, before)}"


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"scale": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.options["scale"]


def changed_options(device: str) -> str:
    """A dict of a layer is changed in place."""

    def before(layers: nn.Sequential, step: int) -> None:
        next(layer for layer in layers.modules() if isinstance(layer, Configured)).options["scale"] = 1.0 + step // 3

    return compared(device, [8] * 6, before, Configured())


def dropped_graphs(device: str) -> str:
    """Weights move after each step, so that graphs are dropped, and their memory is given back, while some may run."""

    def before(layers: nn.Sequential, step: int) -> None:
        for parameter in layers.parameters():
            parameter.data = parameter.data.clone()
        if device != "cpu":
            torch.cuda.empty_cache()

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return compared(device, [64] * 8, before)


def launches_of_seeds(device: str) -> str:
    """What is launched beside graphs for layers that draw random numbers."""
    fills = []
    for dropouts in (0, 24):
        more = [nn.Dropout(0.1) for _ in range(dropouts)]
        with profile() as profiler:
            steps(device, [8] * 4, lambda layers, step: None, *more)
        fills.append(sum(event.count for event in profiler.key_averages() if event.key == "aten::fill_"))
    return f"{fills[0]} and {fills[1]} fills in 4 steps of 4 micro-batches, without and with 24 more dropouts"


ENGINE = {check.__name__: check for check in (first_use, current_device, later_shapes, no_memory, changed_options,
                                              dropped_graphs, launches_of_seeds)}  # fmt: skip


def lines(part: str, device: str) -> Iterator[list[str]]:
    """The arguments of Python for each row of a part."""
    if part == "tests":
        yield [*TESTS]
    if part == "engine":
        yield from ([__file__, f"--program={name}", f"--device={device}"] for name in ENGINE)
    models = CHECKED if part in ("check", "memory") or device == "cpu" else PEERS
    several = torch.cuda.device_count() > 1 or device == "cpu"
    for model, settings in models.items():
        for precision in ("tf32" if part == "peers" else "float32", "bfloat16"):  # torch's own for convolutions is tf32
            line = [f"model={model}", *settings.split(), f"precision={precision}", f"device={device}",
                    "micro_batches=4", "threads=1", "data_workers=0"]  # fmt: skip
            check, train = [*GPIPE, "check", *line, "hardware=cpu"], [*GPIPE, "train", *line, "hardware=cpu"]
            if part == "check":
                yield [*check, "partitions=2", "executor=in_process"]
                if precision == "float32" and device != "cpu":  # every stage must be recorded
                    yield [*train, "graphs=true", "max_steps=4", "logger=[]"]
            if part == "memory" and several and precision == "float32" and model != "timm":
                for graphs in ("auto", "false"):
                    yield [*train, "replicas=2", "partitions=1", f"graphs={graphs}", "max_steps=4", "logger=[]"]
            if part == "layers":
                yield [*GPIPE, "plan", *line, "partitions=1", "cost=reprofile"]
            if part == "peers":
                for graphs in ("auto", "false") if precision == "tf32" else ("auto",):
                    yield [*check, "against=torchgpipe", "partitions=1", f"graphs={graphs}"]
                    if several:
                        yield [*check, "against=torch", "partitions=2", f"graphs={graphs}"]


def figures(folder: Path, printed: str) -> str:
    """What a check.json says: speeds beside other programs, or a verdict; what a result.json says about memory; without
    either the last line printed."""
    file, result = folder / "check.json", folder / "result.json"
    if result.exists():
        report = json.loads(result.read_text(encoding="utf-8"))
        used, planned = (sum(of["memory_bytes"]) / 2**20 for of in (report, report["prediction"]))
        return f"{used:.0f} MiB used, {planned:.0f} planned"
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


def perform(command: Sequence[str], folder: Path, seconds: float, cache: Path) -> Row:
    """Run Python with these arguments, for at most so many seconds; gpipe remembers in `cache` what it has timed."""
    began = time.monotonic()
    with (folder / "log").open("w+", encoding="utf-8") as log:
        program = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=log, cwd=ROOT, start_new_session=True,
            env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTHONSAFEPATH": "1",
                              "XDG_CACHE_HOME": str(cache)},
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
        found = figures(folder / "run", log.read())
    what = " ".join(command).removeprefix("-m ").partition(" run_folder=")[0]
    return what, held, f"{found} ({time.monotonic() - began:.0f} s)"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if usable_gpus() else "cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of each row")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no row begins")
    parser.add_argument("--folder", type=Path, default=Path("gpu_kit"))
    parser.add_argument("--program", choices=ENGINE, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.program is not None:
        print(ENGINE[options.program]("cpu" if options.device == "cpu" else "cuda:0"))
        return 0
    if unknown := set(options.parts.split(",")) - set(PARTS):
        parser.error(f"--parts={','.join(sorted(unknown))}: must be among {', '.join(PARTS)}")
    names = ", ".join(gpu.name for gpu in usable_gpus()) if options.device == "cuda" else cpu_model()
    title, rows = f"{names}, torch {torch.__version__}", list[Row]()
    options.folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    for part in options.parts.split(","):
        for command in lines(part, options.device):
            if (left := until - time.monotonic()) <= 0:
                rows.append((" ".join(command), "NO", "not begun"))
                continue
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                place = [f"run_folder={folder}/run"] if {"check", "train", "plan"} & set(command) else []
                limit, cache = min(options.seconds, left), options.folder.resolve() / "layers"
                rows.append(perform([*command, *place], Path(folder), limit, cache))
            table = to_markdown(Table.of_rows(title, map(Column, ("what", "held", "figures")), rows))
            write_atomic(options.folder / "gpu_kit.md", f"{table}\n")
            print(*rows[-1], sep="  ", flush=True)
    return 0 if all(held == "yes" for _, held, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
