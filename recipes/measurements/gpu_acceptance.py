"""Acceptance tests on the GPU at hand: eleven parts in three calls. --call=1, 2 and 3 take less than nine minutes each,
to fit a machine that is lent for ten. Every part is a process with a time limit, at which it is killed with everything
that it has started: a part that hangs or dies only loses its own remaining rows. On a GPU, parts whose times do not
matter run simultaneously. With --device=cpu every part runs at a tiny size, without what needs a GPU.

After each part the table FOLDER/gpu_acceptance.md and FOLDER/gpu_acceptance.json are rewritten, so that an interrupted
call leaves what it has found. The rows of earlier calls that are in FOLDER stay; --join writes one table of the JSON
files that calls on several machines have left.

For a machine without gpipe and without a network --pack fills the folder KIT with wheels, which go into the root of the
checkout there, and prints a command line for each call. --rehearse runs these lines here with the packages of the
interpreter PYTHON: on the CPU, and once more with parts that only sleep, some for ever, in S times the limits.

Usage: python recipes/measurements/gpu_acceptance.py [--device cuda|cpu] [--call 1|2|3] [--parts versions,check,...]
       [--folder FOLDER] | --join FILE... | --pack KIT [--missing NAME,...] | --rehearse KIT --python PYTHON [--scale S]
"""

import argparse
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
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_kit
import gpu_speed
import gpu_workers
import torch
from gpu_report import Call, Row, attempt, first_line, joined, read, report, write
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from runs import AMOEBANET, command_line, config_of, same_tensors

from gpipe_cli.benchmark.machine_timing import machine_rates
from gpipe_cli.config.settings import load_hardware
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.planner.data_sheet import sheet_of
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.pipeline_spec import make_pipeline_spec
from gpipe_cli.reproduction.consistency import last_tensors
from gpipe_cli.system.gpus import driver_version, usable_gpus
from gpipe_cli.system.machine import cpu_model, usable_cores

HERE = Path(__file__)
ROOT = HERE.parents[2]
# A part that is only rehearsed: it writes a row, and sleeps for some seconds.
SLEEP = "import pathlib, sys, time; pathlib.Path('rows.jsonl').write_text(sys.argv[1]); time.sleep(float(sys.argv[2]))"
TINY = ["model.normal_cells=3", "model.filters=8", "dataset=synthetic_images", "dataset.image_size=16",
        "dataset.num_classes=4", "dataset.train_samples=32", "dataset.test_samples=8", "batch_size=8",
        "micro_batches=4", "data_workers=0"]  # fmt: skip
TEXT = ["model=transformer_lm", "model.layers=4", "model.width=64", "model.hidden=128", "model.heads=4",
        "model.length=32", "dataset=synthetic_text", "dataset.vocabulary=1000", "dataset.train_samples=64",
        "dataset.test_samples=8", "batch_tokens=null", "batch_size=16", "data_workers=0"]  # fmt: skip
TRANSLATION = ["model=transformer_nmt", "batch_tokens=512"]  # on CLDR's names, its default data set
TIMM = ["model=timm", "model.name=convnext_atto", *TINY[2:3], "dataset.image_size=64", *TINY[4:]]


Found = Iterator[tuple[str, bool | None, str] | tuple[str, bool | None, str, str]]  # a row without its part


@dataclass(frozen=True)
class Setting:
    """The device of a part and the folder for its files."""

    device: str
    folder: Path
    sleep: float | None = None  # parts only sleep, in limits of time that are so many times as long

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
    """The environment of a part, in which its workers can import gpu_workers. They take gpipe from where it is
    installed, also in the root of the checkout, whose gpipe_cli lacks the packages conf and recipes."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def versions(setting: Setting) -> Found:
    """Versions, missing dependencies, GPUs, and the rates of this machine, timed while nothing else runs."""
    yield "Python, cores", None, f"{sys.version.split()[0]}, {usable_cores()} cores of {cpu_model()}"
    yield "torch, CUDA, cuDNN", None, f"{torch.__version__}, {torch.version.cuda}, {torch.backends.cudnn.version()}"
    needed, unmet = dependencies("gpipe-cli")
    yield "dependencies", not unmet, f"{len(needed)} packages; not met: {', '.join(unmet) or 'none'}"
    other = [
        file.name for folder, pattern in (("gpipe_cli", "**/*.py"), ("conf", "**/*.yaml"), ("recipes", "**/*.yaml"))
        for file in (ROOT / folder).glob(pattern) if not installed(folder, file.relative_to(ROOT / folder), file)
    ]  # fmt: skip
    yield "gpipe is that of the checkout", not other, f"files that differ: {len(other)}{', '.join(['', *other[:5]])}"
    gpus = usable_gpus()
    if setting.gpu:
        yield "NCCL", None, ".".join(map(str, torch.cuda.nccl.version()))
        yield "driver", None, driver_version() or "NVML does not say"
        yield "GPUs by NVML as by torch", len(gpus) == torch.cuda.device_count(), f"{len(gpus)}"
    for gpu in gpus:
        sheet = sheet_of(gpu)
        yield f"data sheet of {gpu.name}", sheet is not None, f"{sheet}; {gpu.memory_bytes / 2**30:.1f} GiB"
        if sheet is not None:
            yield f"hardware={sheet}", None, str(load_hardware(sheet))
    # the other parts then read these rates from the cache
    for precision in ("float32", "bfloat16") if setting.gpu else ("float32",):
        job = config_of([*TINY, f"device={setting.device}", f"precision={precision}"])
        rates = machine_rates(job, layout_of(job), lambda line: None)
        yield f"hardware=auto, {precision}", rates is not None, f"{rates and rates.figures}; {rates}"


def dependencies(package: str) -> tuple[list[str], list[str]]:
    """The packages that a package needs, with those that they need, and the requirements that are not met."""
    needed, unmet = [package], []
    for name in needed:
        for line in metadata.requires(name) or ():
            one = Requirement(line)
            if one.marker is not None and not one.marker.evaluate({"extra": ""}):
                continue
            versions = [found.version for found in metadata.distributions(name=one.name)]  # the first is imported
            if not versions or not one.specifier.contains(versions[0], prereleases=True):
                unmet.append(f"{line} of {name}")
            elif canonicalize_name(one.name) not in needed:
                needed.append(canonicalize_name(one.name))
    return needed[1:], unmet


def installed(folder: str, name: Path, same_as: Path) -> bool:
    """Whether the package that ``folder`` of the checkout becomes has a file ``name`` with the same content."""
    package = resources.files("gpipe_cli" if folder == "gpipe_cli" else f"gpipe_cli.{folder}")
    file = package.joinpath(name.as_posix())
    return file.is_file() and file.read_bytes() == same_as.read_bytes()


def tests(setting: Setting) -> Found:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}  # whatever plugins that machine has
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment() | alone, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.M)
    last = last_line(done.stdout or done.stderr)
    yield "pytest -m gpu", done.returncode == 0 and ("passed" if setting.gpu else "skipped") in last, last
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
    tensors are large: NCCL buffers small ones, which hides deadlocks. They are few, as the kernels take turns.
    """
    partitions, micro_batches, samples, size = (4, 5, 8, 256) if setting.gpu else (2, 2, 1, 8)
    boundary = samples * 64 * size**2 * 4
    job = [
        "model=custom", "model.target=gpu_workers:wide",
        f"model.arguments={{channels: 64, layers: {2 * partitions - 1}, classes: 4}}", "check_layers=false",
        *TINY[2:3], f"dataset.image_size={size}", "dataset.num_classes=4", "data_workers=0", "optimizer=sgd",
        f"dataset.train_samples={samples * micro_batches}", "dataset.test_samples=1", "ema_decay=0",
        f"batch_size={samples * micro_batches}", f"micro_batches={micro_batches}", f"partitions={partitions}",
        "recompute=always", "max_steps=2", "epochs=2", "evaluate_every_epochs=2", "memory_format=contiguous",
    ]  # fmt: skip

    def linked(what: str, schedule: str) -> tuple[str, bool, str]:
        settings = [*job, f"schedule={schedule}"]
        whole = last_tensors(setting.work("links", gpu_workers.train_on_one_gpu, *settings))
        began = time.monotonic()
        parts = setting.work("links", gpu_workers.train_on_one_gpu, *settings, processes=partitions)
        return same(what, parts, whole, f"boundaries of {boundary / 2**20:g} MiB, {time.monotonic() - began:.0f} s")

    for schedule in ("gpipe", "1f1b", "zero_bubble") if setting.gpu else ("1f1b",):
        what = f"{schedule}, K={partitions} processes on one device, M={micro_batches}"
        yield attempt(what, partial(linked, what, schedule))


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

    def watched(what: str, name: str) -> tuple[str, None, str]:
        waits = json.loads((setting.folder / name / "watched.json").read_text())
        by_line = ", ".join(f"{count} {line}" for line, count in sorted(waits.items(), key=lambda one: -one[1]))
        return what, None, f"{sum(waits.values())}: {by_line or 'none'}"

    for name, job in jobs.items():
        try:
            setting.work(name, gpu_workers.train_watched, *job, "partitions=1", *steps)
        except RuntimeError as error:
            yield f"{name}: the run", False, first_line(error)
        what = f"{name}: calls that wait, in {len(gpu_workers.WATCHED)} steps"
        yield attempt(what, partial(watched, what, name))


def memory(setting: Setting) -> Found:
    """Planned beside counted bytes of activations, and one line of error when memory runs out."""
    jobs = {"amoebanet": AMOEBANET if setting.gpu else TINY, "transformer_lm": TEXT}

    def counted(what: str, job: Sequence[str], precision: str) -> tuple[str, bool, str]:
        result = setting.run("train", "memory", *job, "max_steps=3", "partitions=1", f"precision={precision}",
                             hardware="cpu")  # fmt: skip
        planned, counted = result["predicted_activation_bytes"][0], result["activation_bytes"][0]
        parts = ("weights", "gradients", "optimizer", "other", "peak")
        shown = ", ".join(f"{part} {result['memory'][0][part] / 2**20:.1f}" for part in parts)
        figures = f"MiB: planned {planned / 2**20:.2f}, counted {counted / 2**20:.2f}; {shown}"
        return what, abs(planned / counted - 1) < 0.01, figures

    for (name, job), precision in ((job, p) for job in jobs.items() for p in ("float32", "bfloat16")):
        if setting.gpu or (name, precision) == ("amoebanet", "bfloat16"):
            what = f"activations of {name}, {precision}"
            yield attempt(what, partial(counted, what, job, precision))
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

    def resumed(what: str, optimizer: str) -> tuple[str, bool, str]:
        common = [*TINY, f"optimizer={optimizer}", "executor=in_process", "checkpoint.every_steps=3", "epochs=3"]
        run = partial(setting.run, "train", hardware="cpu")
        run(f"whole_{optimizer}", *common, "partitions=1", "max_steps=6")
        run(f"half_{optimizer}", *common, "partitions=2", "max_steps=3")
        rest = f"resume={setting.folder / f'half_{optimizer}'}"
        run(f"rest_{optimizer}", rest, "partitions=4", "max_steps=6")
        whole = last_tensors(setting.folder / f"whole_{optimizer}")
        return same(what, setting.folder / f"rest_{optimizer}", whole)

    every = ("rmsprop", "sgd", "adam", "adafactor") if setting.gpu else ("adam",)
    with ThreadPoolExecutor(len(every)) as pool:
        cells = {f"K=2, then 4, {optimizer}": optimizer for optimizer in every}
        yield from pool.map(lambda what: attempt(what, partial(resumed, what, cells[what])), cells)


def prediction(setting: Setting) -> Found:
    """The step time predicted from the figures of the device and from timed layers, beside the measured one."""
    jobs = {"amoebanet": [*(AMOEBANET if setting.gpu else TINY), "micro_batches=4", "epochs=9"],
            "transformer_lm": [*TEXT, "epochs=9"]}  # fmt: skip

    def compared(what: str, job: Sequence[str], cost: str) -> tuple[str, None, str]:
        result = setting.run("train", "predicted", *job, "max_steps=24", "partitions=1", f"cost={cost}")
        predicted, measured = result["prediction"]["step_seconds"], result["step_seconds"]
        shown = f"{1e3 * predicted:.1f} ms predicted, {1e3 * measured:.1f} measured"
        return what, None, f"{shown}, {100 * (predicted / measured - 1):+.0f} %"

    for (name, job), cost in ((job, c) for job in jobs.items() for c in ("figures", "measured_anew")):
        if setting.gpu or (name, cost) == ("amoebanet", "figures"):
            what = f"{name}, cost={cost}"
            yield attempt(what, partial(compared, what, job, cost))


def peers(setting: Setting) -> Found:
    """The speeds of plain PyTorch and torchgpipe beside that of gpipe."""
    return gpu_speed.peers(setting.device, setting.bench)


def speeds(setting: Setting) -> Found:
    """The speeds with settings that may change them."""
    return gpu_speed.factors(setting.device, setting.bench)


PARTS: dict[str, tuple[Callable[[Setting], Found], int]] = {
    "versions": (versions, 120),
    "tests": (tests, 390),
    "check": (check, 390),
    "resumption": (resumption, 390),
    "links": (links, 210),
    "nodes": (nodes, 210),
    "synchronisations": (synchronisations, 100),
    "memory": (memory, 100),
    "prediction": (prediction, 100),
    "peers": (peers, 205),
    "speeds": (speeds, 315),
}  # the function of each part and its limit in seconds on a GPU; time that a part leaves goes to the next ones
# The groups of parts of each call; the parts of a group run simultaneously. NCCL kernels of `links` and `nodes` spin
# while they wait and take turns on the GPU with other processes: beside them every wait would take 10 to 20 ms.
CALLS = (
    (("versions",), ("tests", "check", "resumption")),
    (("links", "nodes"), ("synchronisations",), ("memory",), ("prediction",)),
    (("peers",), ("speeds",)),
)
HANGING = {group[0] for call in CALLS for group in call}  # the parts that must be killed if parts only sleep


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
    seconds = deadline - began if setting.gpu or setting.sleep else 600
    folder = setting.folder / name
    folder.mkdir(exist_ok=True)
    command = [sys.executable, str(HERE), f"--one={name}", f"--device={setting.device}", f"--folder={folder}"]
    if setting.sleep:
        row = json.dumps(asdict(Row(name, "slept", None, f"limit {seconds:.1f} s")))
        command = [sys.executable, "-c", SLEEP, row, str((10 if name in HANGING else 0.8) * seconds)]
    log = folder / "log.txt"
    with log.open("w") as output:
        program = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=environment(), cwd=folder
        )
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if usable_gpus() else "cpu")
    parser.add_argument(
        "--call", type=int, choices=range(1, len(CALLS) + 1), help="run the parts of this call (default: of all)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="run only these of them")
    parser.add_argument("--folder", default="gpu_acceptance", help="folder of the table (default: gpu_acceptance)")
    parser.add_argument("--join", type=Path, nargs="+", metavar="FILE", help="write one table of these JSON files")
    parser.add_argument("--pack", type=Path, metavar="KIT", help="fill this folder with wheels and print the commands")
    parser.add_argument(
        "--missing", default=gpu_kit.MISSING, help="what that machine lacks beside gpipe (default: %(default)s)"
    )
    parser.add_argument("--rehearse", type=Path, metavar="KIT", help="run the commands of this kit here, on the CPU")
    parser.add_argument("--python", type=Path, help="an interpreter with the packages of that machine")
    parser.add_argument(
        "--scale", type=float, default=0.1, help="of the limits of the parts that sleep (default: 0.1; 0: without)"
    )
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)  # run this part in this process
    parser.add_argument("--sleep", type=float, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if find_spec("gpipe_cli.conf") is None:
        parser.error(f"gpipe is not installed; pip install --no-deps --no-build-isolation -e {ROOT}")
    if unknown := set(options.parts.split(",")) - PARTS.keys():
        parser.error(f"--parts={','.join(sorted(unknown))}: must be among {', '.join(PARTS)}")
    output = Path(options.folder).resolve()
    if options.one is not None:
        only(options.one, Setting(options.device, output))
        return 0
    try:
        if options.join:
            show([call for file in options.join for call in read(file)], output)
            return 0
        if options.pack:
            print(gpu_kit.pack(options.pack, [name for name in options.missing.split(",") if name]), end="\n\n")
            print(*gpu_kit.commands(options.pack, options.folder, len(CALLS)), sep="\n\n")
            return 0
        if options.rehearse:
            if options.python is None:
                parser.error("--rehearse: needs --python, an interpreter with the packages of that machine")
            return 0 if rehearse(options.rehearse, options.python, options.parts, options.scale, output) else 1
        file = output / "gpu_acceptance.json"
        earlier = read(file) if file.exists() else []
    except (gpu_kit.Refused, OSError, ValueError) as error:
        parser.error(str(error))
    accept(options, earlier, output)
    return 0


def accept(options: argparse.Namespace, earlier: Sequence[Call], output: Path) -> None:
    """Run the parts of a call, and write their rows to ``output`` beside those of earlier calls."""
    names = ", ".join(gpu.name for gpu in usable_gpus()) if options.device == "cuda" else cpu_model()
    began, rows = time.monotonic(), list[Row]()
    machine = f"{names or 'no GPU'}; torch {torch.__version__}, Python {sys.version.split()[0]}"

    def so_far() -> list[Call]:
        return joined([*earlier, Call(machine, time.monotonic() - began, rows)])

    calls = CALLS if options.call is None else CALLS[options.call - 1 : options.call]
    with tempfile.TemporaryDirectory(prefix="gpu_acceptance_", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault("XDG_CACHE_HOME", folder)  # one cache for all parts
        setting, ends = Setting(options.device, Path(folder), options.sleep), began
        for group in groups_of(calls, options.parts.split(","), setting.gpu):
            limits = {name: PARTS[name][1] * (options.sleep or 1) for name in group}
            with ThreadPoolExecutor(len(group)) as pool:
                for done in as_completed([pool.submit(perform, name, setting, ends + limits[name]) for name in group]):
                    rows += done.result()
                    for row in done.result():
                        held = {True: "yes", False: "NO", None: "-"}[row.held]
                        print(f"{row.part:<17} {held:<4} {row.what}: {row.figures}", flush=True)
                    write(output, so_far())
            ends += max(limits.values())
    show(so_far(), output)


def show(calls: Sequence[Call], output: Path) -> None:
    write(output, joined(calls))
    print(f"\n{report(joined(calls))}")


def rehearse(kit: Path, python: Path, parts: str, scale: float, output: Path) -> bool:
    """Run the command lines of a kit on the CPU, and with parts that sleep; returns whether all went as expected."""
    numbers = [number for number, call in enumerate(CALLS, 1) if groups_of([call], parts.split(","), True)]
    lines = [f"{kit}: {gpu_kit.size_mib(kit):.1f} MiB"]
    sound = True
    for name, option in (("cpu", "--device=cpu"), ("sleep", f"--sleep={scale}"))[: 2 if scale else 1]:
        calls = list[Call]()
        with tempfile.TemporaryDirectory(prefix="rehearsal_", ignore_cleanup_errors=True) as place:
            for number, done in gpu_kit.rehearse(kit, python, numbers, Path(place), f"--parts={parts}", option):
                found = read(done.table) if done.table.exists() else []
                groups = groups_of([CALLS[number - 1]], parts.split(","), True)
                limits = sum(max(PARTS[part][1] for part in group) for group in groups)
                seconds = done.seconds + (limits * (1 - scale) if name == "sleep" else 0)
                expected = {(part, name == "cpu" or part not in HANGING) for group in groups for part in group}
                ended = {(row.part, row.held) for call in found for row in call.rows if row.what == "the part"}
                failed = [row for call in found for row in call.rows if row.held is False and row.what != "the part"]
                right = done.code == 0 and ended == expected and not failed and seconds < gpu_kit.COMMAND_SECONDS
                sound = sound and right
                lines.append(
                    f"{name}, call {number}: {'as expected' if right else 'NOT as expected'}, code {done.code}, "
                    f"{done.seconds:.0f} s" + (f"; {seconds:.0f} s in whole limits" if name == "sleep" else "")
                )
                print(f"{lines[-1]}\n{'' if right else done.printed}", flush=True)
                calls += found
        show(calls, output / name)
    print(*lines, sep="\n")
    return sound


def groups_of(calls: Sequence[Sequence[Sequence[str]]], parts: Sequence[str], gpu: bool) -> list[list[str]]:
    """The groups of those of ``parts`` that run simultaneously; without a GPU each part is a group of its own."""
    groups = [[name for name in group if name in parts] for call in calls for group in call]
    return [group for group in (groups if gpu else ([name] for one in groups for name in one)) if group]


if __name__ == "__main__":
    sys.exit(main())
