"""Acceptance tests on the GPU at hand: eleven parts in three calls. --call=1, 2 and 3 take less than nine minutes each,
to fit a machine that is lent for ten.

Every part is a process with a time limit, at which it is killed with everything that it has started: a part that hangs
or dies only loses its own remaining rows. On a GPU, parts whose times do not matter run simultaneously.
After each part the table FOLDER/gpu_acceptance.md and FOLDER/gpu_acceptance.json are rewritten, so that an interrupted
call leaves what it has found. With --device=cpu every part runs at a tiny size, without what needs a GPU.

gpipe must be installed, as a checkout on PYTHONPATH lacks the packages gpipe_cli.conf and gpipe_cli.recipes. Without a
network: pip install --no-deps --no-build-isolation -e . (setuptools 70.1 or newer).

Usage: python recipes/measurements/gpu_acceptance.py [--device cuda|cpu] [--call 1|2|3] [--parts versions,check,...]
       [--folder FOLDER]
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_speed
import gpu_workers
import torch
from runs import AMOEBANET, command_line, config_of, same_tensors

from gpipe_cli.benchmark.machine_timing import machine_rates
from gpipe_cli.config.settings import load_hardware
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.planner.data_sheet import sheet_of
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.pipeline_spec import make_pipeline_spec
from gpipe_cli.reproduction.consistency import last_tensors
from gpipe_cli.system.gpus import usable_gpus
from gpipe_cli.system.machine import cpu_model, usable_cores

HERE = Path(__file__)
ROOT = HERE.parents[2]
CALL_SECONDS = 525  # limit of all parts of a call together; the rest of ten minutes is for installation
TINY = ["model.normal_cells=3", "model.filters=8", "dataset=synthetic_images", "dataset.image_size=16",
        "dataset.num_classes=4", "dataset.train_samples=32", "dataset.test_samples=8", "batch_size=8",
        "micro_batches=4", "data_workers=0"]  # fmt: skip
TEXT = ["model=transformer_lm", "model.layers=4", "model.width=64", "model.hidden=128", "model.heads=4",
        "model.length=32", "dataset=synthetic_text", "dataset.vocabulary=1000", "dataset.train_samples=64",
        "dataset.test_samples=8", "batch_tokens=null", "batch_size=16", "data_workers=0"]  # fmt: skip
TRANSLATION = ["model=transformer_nmt", "batch_tokens=512"]  # on CLDR's names, its default data set
TIMM = ["model=timm", "model.name=convnext_atto", *TINY[2:3], "dataset.image_size=64", *TINY[4:]]


@dataclass(frozen=True)
class Row:
    part: str
    what: str
    held: bool | None  # None: the row only reports figures
    figures: str
    published: str = ""  # torchgpipe's published speed


Found = Iterator[tuple[str, bool | None, str] | tuple[str, bool | None, str, str]]  # a row without its part


@dataclass(frozen=True)
class Setting:
    """The device of a part and the folder for its files."""

    device: str
    folder: Path

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    def new_folder(self, name: str) -> Path:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def gpipe(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "gpipe_cli", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, env=environment() | variables, check=False
        )

    def run(self, command: str, name: str, *settings: str, hardware: str = "auto") -> dict[str, Any]:
        """Run a command that must not fail; returns its result.json."""
        folder = self.new_folder(name)
        machine = [f"device={self.device}", *([f"hardware={hardware}"] if self.gpu else ["hardware=cpu", "threads=1"])]
        done = self.gpipe(command, *settings, *machine, f"run_folder={folder}")
        if done.returncode:
            raise RuntimeError(f"gpipe {command} {' '.join(settings)}: {last_line(done.stderr)}")
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found

    def bench(self, *settings: str) -> list[dict[str, Any]]:
        """Run `gpipe bench -m`; returns the rows of its table, of which some may be impossible or have failed."""
        folder = self.new_folder("bench")
        done = self.gpipe("bench", "-m", *settings, "steps=10", f"hydra.sweep.dir={folder}")
        file = folder / "bench.json"
        if not file.exists():
            raise RuntimeError(f"gpipe bench -m {' '.join(settings)}: {last_line(done.stderr)}")
        rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        return rows

    def work(self, name: str, task: Callable[..., None], *settings: str, processes: int = 1) -> Path:
        """Run ``task`` in ``processes`` workers of a training on one device; returns their folder.

        Raises RuntimeError with the failure of a worker.
        """
        folder = self.new_folder(name)
        folder.mkdir()
        config = config_of([*settings, f"device={self.device}", "hardware=cpu", "threads=1"])
        spec = make_pipeline_spec(replace(config, executor="in_process"))
        if processes > 1:
            stages = range(spec.partitions)
            process_of_stage = tuple(k * processes // spec.partitions for k in stages)
            spec = replace(spec, layout=replace(spec.layout, process_of_stage=process_of_stage))
        failure = run_task(partial(task, config, spec, folder), spec, 60.0, lambda message: None)
        if failure is not None:
            raise RuntimeError(failure.text)
        return folder


def environment() -> dict[str, str]:
    """The environment of a part, in which its workers can import gpu_workers."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def versions(setting: Setting) -> Found:
    """Versions, missing dependencies, GPUs, and the rates of this machine, timed while nothing else runs."""
    yield "Python, cores", None, f"{sys.version.split()[0]}, {usable_cores()} cores of {cpu_model()}"
    yield "torch, CUDA, cuDNN", None, f"{torch.__version__}, {torch.version.cuda}, {torch.backends.cudnn.version()}"
    needed = [re.split(r"[<>=\s]", one)[0] for one in metadata.requires("gpipe-cli") or () if "extra ==" not in one]
    missing = [name for name in needed if not [*metadata.distributions(name=name)]]
    yield "dependencies", not missing, f"{len(needed)}, missing: {', '.join(missing) or 'none'}"
    gpus = usable_gpus()
    if setting.gpu:
        import pynvml

        yield "NCCL", None, ".".join(map(str, torch.cuda.nccl.version()))
        yield "driver, NVML", None, f"{pynvml.nvmlSystemGetDriverVersion()}, {pynvml.nvmlSystemGetNVMLVersion()}"
        yield "GPUs by NVML as by torch", len(gpus) == torch.cuda.device_count(), f"{len(gpus)}"
    for gpu in gpus:
        sheet = sheet_of(gpu)
        yield gpu.name, sheet is not None, f"{gpu.memory_bytes / 2**30:.1f} GiB, data sheet {sheet}"
        if sheet is not None:
            yield f"hardware={sheet}", None, str(load_hardware(sheet))
    # the other parts then read these rates from the cache
    for precision in ("float32", "bfloat16") if setting.gpu else ("float32",):
        job = config_of([*TINY, f"device={setting.device}", f"precision={precision}"])
        yield f"hardware=auto, {precision}", None, str(machine_rates(job, layout_of(job), lambda line: None))


def tests(setting: Setting) -> Found:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
    last = last_line(done.stdout)
    yield "pytest -m gpu", done.returncode == 0 and "passed" in last if setting.gpu else None, last
    for line in failed:
        yield "failed", False, line[:300]


def check(setting: Setting) -> Found:
    """Partitions, recomputation and executors give bit-identical results in each precision."""
    models = {"amoebanet": TINY, "transformer_lm": TEXT, "transformer_nmt": TRANSLATION, "timm": TIMM}
    cells = [(model, precision) for model in models for precision in ("float32", "bfloat16")]

    def checked(model: str, precision: str) -> tuple[str, bool, str]:
        folder = setting.new_folder(f"check_{model}_{precision}")
        done = setting.gpipe(
            "check", *models[model], "partitions=2", f"precision={precision}", f"device={setting.device}",
            "executor=in_process", "hardware=cpu", "threads=1", f"run_folder={folder}",
        )  # fmt: skip
        shutil.rmtree(folder, ignore_errors=True)
        return f"gpipe check {model}, {precision}", done.returncode == 0, last_line(done.stdout or done.stderr)

    if not setting.gpu:
        cells = [("amoebanet", "float32"), ("transformer_lm", "bfloat16")]
    with ThreadPoolExecutor(4 if setting.gpu else 1) as pool:
        yield from pool.map(lambda cell: checked(*cell), cells)


def links(setting: Setting) -> Found:
    """Processes that share the GPU and communicate by NCCL give bit-identical results to a single process. Boundary
    tensors are large: NCCL buffers small ones, which hides deadlocks."""
    partitions, micro_batches, samples, size = (4, 8, 8, 256) if setting.gpu else (2, 2, 1, 8)
    boundary = samples * 64 * size**2 * 4
    job = [
        "model=custom", "model.target=gpu_workers:wide",
        f"model.arguments={{channels: 64, layers: {2 * partitions - 1}, classes: 4}}", "check_layers=false",
        *TINY[2:3], f"dataset.image_size={size}", "dataset.num_classes=4", "data_workers=0", "optimizer=sgd",
        f"dataset.train_samples={samples * micro_batches}", "dataset.test_samples=1", "ema_decay=0",
        f"batch_size={samples * micro_batches}", f"micro_batches={micro_batches}", f"partitions={partitions}",
        "recompute=always", "max_steps=2", "epochs=2", "evaluate_every_epochs=2", "memory_format=contiguous",
    ]  # fmt: skip
    for schedule in ("gpipe", "1f1b", "zero_bubble") if setting.gpu else ("1f1b",):
        settings = [*job, f"schedule={schedule}"]
        whole = last_tensors(setting.work("links", gpu_workers.train_on_one_gpu, *settings))
        began = time.monotonic()
        parts = setting.work("links", gpu_workers.train_on_one_gpu, *settings, processes=partitions)
        what = f"{schedule}, K={partitions} processes on one device, M={micro_batches}"
        note = f"boundaries of {boundary / 2**20:g} MiB, {time.monotonic() - began:.0f} s"
        yield same(what, parts, whole, note)


def nodes(setting: Setting) -> Found:
    """One of two torchrun agents, which stand for machines, is killed or stopped, and the other one reports it."""
    for how, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        folder, limit = setting.new_folder(f"nodes_{how}"), 15 if setting.gpu else 10
        settings = [*TINY, "partitions=2", "epochs=100000", f"device={setting.device}", "hardware=cpu", "threads=1",
                    f"timeout_seconds={limit}", "evaluate_every_epochs=1000000", "checkpoint.every_epochs=0",
                    "checkpoint.every_steps=20", f"run_folder={folder}"]  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                    "--master-addr=127.0.0.1", f"--master-port={port}"]  # fmt: skip
        logs = [(setting.folder / f"{how}_{rank}.log").open("w") for rank in range(2)]
        agents = [
            subprocess.Popen(
                [*torchrun, f"--node-rank={rank}", "-m", "gpipe_cli", "train", *settings], cwd=setting.folder,
                stdout=logs[rank], stderr=subprocess.STDOUT,
                env=environment() | (gpu_workers.shares_gpu(f"node-{rank}") if setting.gpu
                                     else {"GLOO_SOCKET_IFNAME": "lo"}),
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            wait_for(lambda: (folder / "checkpoints" / "last").exists() or agents[0].poll() is not None)  # noqa: B023  called at once
            began = time.monotonic()
            end_all(agents[1].pid, number)
            # torchrun itself waits much longer for its other agent
            log = setting.folder / f"{how}_0.log"
            error = wait_for(lambda: re.search(r"^error +(.+)$", log.read_text(), re.M))  # noqa: B023  called at once
            taken = time.monotonic() - began
            shown = error[1] if error else last_line(log.read_text())
            held = bool(error and re.search("(process|stage) 1", shown)) and taken < 3 * limit
            what = f"the other one names a machine that is {how}"
            yield what, held, f"{taken:.0f} s, timeout_seconds={limit}; {shown}"
        finally:
            for agent in agents:
                end_all(agent.pid)
                agent.wait()
            for one in logs:
                one.close()


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """The first true value that ``condition`` returns, or None after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.2)
    return None


def synchronisations(setting: Setting) -> Found:
    """The lines of code at which a step waits for the GPU."""
    text = ["model.length=512", "model.width=512", "model.hidden=2048", "dataset.train_samples=512"]
    jobs = {
        "amoebanet": AMOEBANET if setting.gpu else TINY,
        "transformer_lm": [*TEXT, *(text if setting.gpu else [])],
    }
    steps = [f"max_steps={gpu_workers.WATCHED.stop + 1}", "epochs=99", "evaluate_every_epochs=99"]
    for name, job in jobs.items():
        try:
            setting.work(name, gpu_workers.train_watched, *job, "partitions=1", *steps)
        except RuntimeError as error:
            yield f"{name}: the run", False, gpu_speed.first_line(error)
        waits = json.loads((setting.folder / name / "watched.json").read_text())
        by_line = ", ".join(f"{count} {line}" for line, count in sorted(waits.items(), key=lambda one: -one[1]))
        what = f"{name}: calls that wait, in {len(gpu_workers.WATCHED)} steps"
        yield what, None, f"{sum(waits.values())}: {by_line or 'none'}"


def memory(setting: Setting) -> Found:
    """Planned beside counted bytes of activations, and one line of error when memory runs out."""
    jobs = {"amoebanet": AMOEBANET if setting.gpu else TINY, "transformer_lm": TEXT}
    for (name, size), precision in ((job, p) for job in jobs.items() for p in ("float32", "bfloat16")):
        if not setting.gpu and (name, precision) != ("amoebanet", "bfloat16"):
            continue
        result = setting.run("train", "memory", *size, "max_steps=3", "partitions=1", f"precision={precision}",
                             hardware="cpu")  # fmt: skip
        planned, counted = result["predicted_activation_bytes"][0], result["activation_bytes"][0]
        parts = result["memory"][0]
        shown = {part: f"{parts[part] / 2**20:.1f}" for part in ("weights", "gradients", "optimizer", "other", "peak")}
        yield (
            f"activations of {name}, {precision}", abs(planned / counted - 1) < 0.01,
            f"MiB: planned {planned / 2**20:.2f}, counted {counted / 2**20:.2f}; "
            + ", ".join(f"{part} {value}" for part, value in shown.items()),
        )  # fmt: skip
    if setting.gpu:
        # logits of 134 GB
        large = [*TEXT[:5], "model.length=512", *TEXT[6:7], "dataset.vocabulary=32000", "dataset.train_samples=2048",
                 "dataset.test_samples=8", "batch_tokens=null", "batch_size=2048", "data_workers=0", "micro_batches=1",
                 "partitions=1", "recompute=never", "max_steps=1", "hardware=cpu", "device=cuda"]  # fmt: skip
        done = setting.gpipe("train", *large)
        lines = done.stderr.strip().splitlines()
        named = [line for line in lines if "OutOfMemory" in line and "stage 0" in line and "micro_batches" in line]
        held = done.returncode == 1 and len(named) == 1 and "Traceback" not in done.stderr
        yield "out of memory: one line, code 1", held, f"code {done.returncode}: {(named or lines[-1:] or [''])[0]}"


def resumption(setting: Setting) -> Found:
    """With each optimizer, a run with K = 2 resumed with K = 4 ends with the tensors of an uninterrupted run."""

    def resumed(optimizer: str) -> tuple[str, bool, str]:
        common = [*TINY, f"optimizer={optimizer}", "executor=in_process", "checkpoint.every_steps=3", "epochs=3"]
        run = partial(setting.run, "train", hardware="cpu")
        run(f"whole_{optimizer}", *common, "partitions=1", "max_steps=6")
        run(f"half_{optimizer}", *common, "partitions=2", "max_steps=3")
        rest = f"resume={setting.folder / f'half_{optimizer}'}"
        run(f"rest_{optimizer}", rest, "partitions=4", "max_steps=6")
        whole = last_tensors(setting.folder / f"whole_{optimizer}")
        return same(f"K=2, then 4, {optimizer}", setting.folder / f"rest_{optimizer}", whole)

    every = ("rmsprop", "sgd", "adam", "adafactor") if setting.gpu else ("adam",)
    with ThreadPoolExecutor(len(every)) as pool:
        yield from pool.map(resumed, every)


def prediction(setting: Setting) -> Found:
    """The step time predicted from the figures of the device and from timed layers, beside the measured one."""
    jobs = {"amoebanet": [*AMOEBANET, "micro_batches=4"], "transformer_lm": [*TEXT, "epochs=9"]}
    for (name, size), cost in ((job, c) for job in jobs.items() for c in ("figures", "measured_anew")):
        if not setting.gpu:
            if (name, cost) != ("amoebanet", "figures"):
                continue
            size = [*TINY, "epochs=9"]
        result = setting.run("train", "predicted", *size, "max_steps=24", "partitions=1", f"cost={cost}")
        predicted, measured = result["prediction"]["step_seconds"], result["step_seconds"]
        shown = f"{1e3 * predicted:.1f} ms predicted, {1e3 * measured:.1f} measured"
        yield f"{name}, cost={cost}", None, f"{shown}, {100 * (predicted / measured - 1):+.0f} %"


def peers(setting: Setting) -> Found:
    """The speeds of plain PyTorch and torchgpipe beside that of gpipe."""
    return gpu_speed.peers(setting.device, setting.bench)


def speeds(setting: Setting) -> Found:
    """The speeds with settings that may change them."""
    return gpu_speed.factors(setting.device, setting.bench)


PARTS: dict[str, tuple[Callable[[Setting], Found], int]] = {
    "versions": (versions, 90),
    "tests": (tests, 300),
    "check": (check, 300),
    "resumption": (resumption, 300),
    "links": (links, 150),
    "nodes": (nodes, 150),
    "synchronisations": (synchronisations, 90),
    "memory": (memory, 90),
    "prediction": (prediction, 90),
    "peers": (peers, 220),
    "speeds": (speeds, 300),
}  # the function of each part and its limit in seconds on a GPU
# The groups of parts of each call; the parts of a group run simultaneously. NCCL kernels of `links` and `nodes` spin
# while they wait and take turns on the GPU with other processes: beside them every wait would take 10 to 20 ms.
CALLS = (
    (("versions",), ("tests", "check", "resumption")),
    (("links", "nodes"), ("synchronisations",), ("memory",), ("prediction",)),
    (("peers",), ("speeds",)),
)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1][:400]


def same(what: str, one: Path, other: Mapping[str, torch.Tensor], note: str = "") -> tuple[str, bool, str]:
    """A row without its part: whether the last checkpoint of run ``one`` holds the tensors ``other``, bit for bit."""
    tensors = last_tensors(one)
    equal = same_tensors(tensors, other)
    shown = f"{equal} of {len(tensors)} tensors the same bits"
    return what, equal == len(tensors) == len(other) > 0, f"{shown}, {note}" if note else shown


def family(process: int) -> list[int]:
    """A process and its descendants, which torchrun starts in sessions of their own."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            parent = int(file.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = [process]
    for one in found:
        found += children.get(one, [])
    return found


def end_all(process: int, how: signal.Signals = signal.SIGKILL) -> None:
    for one in family(process):
        with suppress(ProcessLookupError):
            os.kill(one, how)


def perform(name: str, setting: Setting, deadline: float) -> list[Row]:
    """Run a part as a process; returns its rows, even if it did not end in time."""
    began = time.monotonic()
    seconds = min(PARTS[name][1], deadline - began) if setting.gpu else 600
    if seconds < 5:
        return [Row(name, "the part", False, "no time was left")]
    folder = setting.folder / name
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE), f"--one={name}", f"--device={setting.device}", f"--folder={folder}"]
    log = folder / "log.txt"
    with log.open("w") as output:
        program = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True, env=environment())
        try:
            code = program.wait(seconds)
            end = "" if code == 0 else f"code {code}: {last_line(log.read_text())}"
        except subprocess.TimeoutExpired:
            end = f"not done after {seconds:.0f} s"
        finally:
            end_all(program.pid)
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            program.wait()
    found = folder / "rows.jsonl"
    rows = [Row(**json.loads(line)) for line in found.read_text().splitlines()] if found.exists() else []
    shutil.rmtree(folder, ignore_errors=True)
    taken = f"{time.monotonic() - began:.0f} s"
    return [*rows, Row(name, "the part", not end, f"{taken}; {end}" if end else taken)]


def only(name: str, setting: Setting) -> None:
    """Run a part in this process, and write each row to rows.jsonl at once."""
    with (setting.folder / "rows.jsonl").open("w") as file:
        for found in PARTS[name][0](setting):
            file.write(json.dumps(asdict(Row(name, *found))) + "\n")
            file.flush()


def report(rows: Sequence[Row], device: str, seconds: float) -> str:
    """Machine, versions, and the table of all rows in the order of the parts, in Markdown."""
    ordered = sorted(rows, key=lambda row: list(PARTS).index(row.part))
    judged = [row for row in rows if row.held is not None]
    names = ", ".join(gpu.name for gpu in usable_gpus()) if device == "cuda" else cpu_model()
    lines = [
        f"{names or 'no GPU'}; torch {torch.__version__}, Python {sys.version.split()[0]}; {seconds:.0f} s",
        "",
        f"{sum(bool(row.held) for row in judged)} of {len(judged)} held.",
        "",
        "| part | what | held | figures | published: torchgpipe, P40 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in ordered:
        cells = (row.part, row.what, {True: "yes", False: "NO", None: ""}[row.held], row.figures, row.published)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if usable_gpus() else "cpu")
    parser.add_argument(
        "--call", type=int, choices=range(1, len(CALLS) + 1), help="run the parts of this call (default: of all)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="run only these of them")
    parser.add_argument("--folder", type=Path, default=Path("."), help="folder of the table (default: the current one)")
    parser.add_argument("--one", default=None, help="run this part in this process")
    options = parser.parse_args(arguments)
    if find_spec("gpipe_cli.conf") is None:
        parser.error(f"gpipe is not installed; pip install --no-deps --no-build-isolation -e {ROOT}")
    output: Path = options.folder.resolve()
    if options.one is not None:
        only(options.one, Setting(options.device, output))
        return
    output.mkdir(parents=True, exist_ok=True)
    began, rows = time.monotonic(), list[Row]()

    def note(found: Sequence[Row]) -> None:
        rows.extend(found)
        for row in found:
            held = {True: "yes", False: "NO", None: "-"}[row.held]
            print(f"{row.part:<17} {held:<4} {row.what}: {row.figures}", flush=True)
        (output / "gpu_acceptance.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
        (output / "gpu_acceptance.md").write_text(report(rows, options.device, time.monotonic() - began))

    calls = CALLS if options.call is None else CALLS[options.call - 1 : options.call]
    with tempfile.TemporaryDirectory(prefix="gpu_acceptance_", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault("XDG_CACHE_HOME", folder)  # one cache for all parts
        setting, deadline = Setting(options.device, Path(folder)), began + CALL_SECONDS * len(calls)
        for group in groups_of(calls, options.parts.split(","), setting.gpu):
            with ThreadPoolExecutor(len(group)) as pool:
                for done in as_completed([pool.submit(perform, name, setting, deadline) for name in group]):
                    note(done.result())
    print(f"\n{report(rows, options.device, time.monotonic() - began)}")


def groups_of(calls: Sequence[Sequence[Sequence[str]]], parts: Sequence[str], gpu: bool) -> list[list[str]]:
    """The groups of those of ``parts`` that run simultaneously; without a GPU each part is a group of its own."""
    groups = [[name for name in group if name in parts] for call in calls for group in call]
    return [group for group in (groups if gpu else ([name] for one in groups for name in one)) if group]


if __name__ == "__main__":
    main()
