"""What holds on the GPU at hand, in ten parts that each have a time limit: all together less than nine minutes.

Every part is a process of its own, so that one that hangs or dies costs its own rows only. Written as a table to the
console (Markdown) and with every number to FOLDER/gpu_acceptance.json. Without a GPU, or with --device=cpu, the parts
that need none run at a small size.

Usage: python recipes/measurements/gpu_acceptance.py [--device cuda|cpu] [--parts versions,check,...] [--folder FOLDER]
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from runs import AMOEBANET, command_line

HERE = Path(__file__)
ROOT = HERE.parents[2]
TINY = ["model.normal_cells=3", "model.filters=8", "dataset=synthetic_images", "dataset.image_size=16",
        "dataset.num_classes=4", "dataset.train_samples=32", "dataset.test_samples=8", "batch_size=8",
        "micro_batches=4", "data_workers=0"]  # fmt: skip
TEXT = ["model=transformer_lm", "model.layers=4", "model.width=64", "model.hidden=128", "model.heads=4",
        "model.length=32", "dataset=synthetic_text", "dataset.vocabulary=1000", "dataset.train_samples=64",
        "dataset.test_samples=8", "batch_tokens=null", "batch_size=16", "data_workers=0"]  # fmt: skip
TRANSLATION = ["model=transformer_nmt", "batch_tokens=512", "dataset.train_samples=64", "dataset.test_samples=8"]
RESNET = ["model=resnet", "model.depth=18", *TINY[2:]]


@dataclass(frozen=True)
class Row:
    part: str
    what: str
    held: bool | None  # None: a figure, nothing to hold
    figures: str


@dataclass(frozen=True)
class Setting:
    """Where a part runs."""

    device: str
    folder: Path

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"

    def gpipe(self, *arguments: str, seconds: float = 240) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "gpipe_cli", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=self.folder, timeout=seconds, env=environment()
        )

    def run(self, command: str, name: str, *settings: str) -> dict[str, Any]:
        """The result.json of a command that must not fail."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        hardware = [] if self.gpu else ["hardware=cpu", "threads=1"]
        done = self.gpipe(command, *settings, f"device={self.device}", *hardware, f"run_folder={folder}")
        if done.returncode:
            raise RuntimeError(f"gpipe {command} {' '.join(settings)}: {done.stderr.strip()[-400:]}")
        found: dict[str, Any] = json.loads((folder / "result.json").read_text())
        return found


Found = Iterator[tuple[str, bool | None, str]]


def environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def versions(setting: Setting) -> Found:
    """1. What this is."""
    import torch

    from gpipe_cli.planner.data_sheet import sheet_of
    from gpipe_cli.system.gpus import usable_gpus
    from gpipe_cli.system.machine import cpu_model, usable_cores

    yield (
        "torch",
        None,
        f"{torch.__version__}, Python {sys.version.split()[0]}, {usable_cores()} cores of {cpu_model()}",
    )
    gpus = usable_gpus()
    if setting.gpu:
        yield "NCCL", None, ".".join(map(str, torch.cuda.nccl.version()))
        yield "GPUs by NVML as by torch", len(gpus) == torch.cuda.device_count(), f"{len(gpus)}"
    for gpu in gpus:
        yield gpu.name, sheet_of(gpu) is not None, f"{gpu.memory_bytes / 2**30:.1f} GiB, data sheet {sheet_of(gpu)}"


def tests(setting: Setting) -> Found:
    """2. The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/test_gpu.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment())
    yield "pytest -m gpu", done.returncode == 0, (done.stdout.strip().splitlines() or [""])[-1]


def check(setting: Setting) -> Found:
    """3. Partitions, recomputation and executors change no bit, in each precision."""
    models = {"amoebanet": TINY, "transformer_lm": TEXT, "transformer_nmt": TRANSLATION, "resnet": RESNET}
    for (name, model), precision in ((m, p) for m in models.items() for p in ("float32", "bfloat16")):
        if not setting.gpu and (name, precision) not in (("amoebanet", "float32"), ("transformer_lm", "bfloat16")):
            continue
        done = setting.gpipe(
            "check", *model, "partitions=2", f"precision={precision}", f"device={setting.device}", "hardware=cpu",
            f"run_folder={setting.folder / 'check'}",
        )  # fmt: skip
        shutil.rmtree(setting.folder / "check", ignore_errors=True)
        last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
        yield f"gpipe check {name}, {precision}", done.returncode == 0, last


def links(setting: Setting) -> Found:
    """4. Processes that share the GPU, over NCCL: the bits of one process."""
    from gpipe_cli.config.settings import TrainConfig, from_tree
    from gpipe_cli.launch.supervisor import run_task
    from gpipe_cli.planner.placement import make_placement
    from gpipe_cli.training.train_loop import train

    # several ranks on one GPU are refused but for these: NCCL 2.30 has the first
    os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    for schedule, partitions in (("gpipe", 2), ("1f1b", 4)) if setting.gpu else (("1f1b", 2),):
        digests = []
        for processes in (1, partitions):
            tree = compose_training(
                *TINY, f"schedule={schedule}", "max_steps=3", f"partitions={partitions}", "executor=in_process",
                f"device={setting.device}", "hardware=cpu", "threads=1",
            )  # fmt: skip
            config = from_tree(TrainConfig, tree)
            placement = make_placement(config)
            if processes > 1:
                placement = replace(placement, owners=tuple(range(partitions)))
            folder = setting.folder / f"links{processes}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            messages: list[object] = []
            failure = run_task(partial(train, config, "", placement, folder), placement, 60.0, messages.append)
            if failure is not None:
                yield f"{schedule}, K={partitions}, {processes} processes", False, failure.text
                return
            digests.append(digest(folder))
        same = sum(digests[0][name] == digests[1].get(name) for name in digests[0])
        yield (
            f"{schedule}, K={partitions} processes on one device",
            same == len(digests[0]),
            f"{same} of {len(digests[0])}",
        )


def nodes(setting: Setting) -> Found:
    """5. Two torchrun agents as machines; one of them is killed, and the other says so."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = setting.folder / "nodes"
    shutil.rmtree(folder, ignore_errors=True)
    settings = [*TINY, "partitions=2", "epochs=100000", "device=cpu", "hardware=cpu", "timeout_seconds=10",
                "evaluate_every_epochs=1000000", "checkpoint.every_epochs=0", f"run_folder={folder}"]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                "--master-addr=127.0.0.1", f"--master-port={port}"]  # fmt: skip
    agents = [
        subprocess.Popen(
            [*torchrun, f"--node-rank={rank}", "-m", "gpipe_cli", "train", *settings], cwd=setting.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment() | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while not (folder / "config.yaml").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(8)  # some steps
        began = time.monotonic()
        for process in family(agents[1].pid):
            os.kill(process, signal.SIGSTOP)
        assert agents[0].stdout is not None
        # torchrun itself waits much longer for its other agent
        line = next((line.strip() for line in agents[0].stdout if "nothing was heard" in line), "")
        taken = time.monotonic() - began
        yield "a stopped machine ends the run and is named", bool(line) and taken < 30, f"{taken:.0f} s; {line}"
    finally:
        for agent in agents:
            for process in family(agent.pid):
                os.kill(process, signal.SIGKILL)
            agent.wait()


def family(process: int) -> list[int]:
    """A process and all that it has started: torchrun gives each of its processes a session of its own."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [process, *(one for child in children for one in family(int(child)))]


def synchronisations(setting: Setting) -> Found:
    """6. How often a step waits for the GPU, and how much of it is idle."""
    if setting.gpu:
        # read by Python at its start, also in workers
        (setting.folder / "sitecustomize.py").write_text("import torch; torch.cuda.set_sync_debug_mode('warn')\n")
        paths = f"{setting.folder}:{environment()['PYTHONPATH']}"
        done = subprocess.run(
            [sys.executable, "-m", "gpipe_cli", "train", *TINY, "max_steps=6", "partitions=1",
             f"run_folder={setting.folder / 'sync'}"],
            capture_output=True, text=True, cwd=setting.folder,
            env=environment() | {"PYTHONPATH": paths, "PYTHONWARNINGS": "always"},
        )  # fmt: skip
        (setting.folder / "sitecustomize.py").unlink()
        places = re.findall(r"(\S+\.py:\d+): UserWarning: called a synchronizing", done.stderr)
        counted = {place: places.count(place) for place in places}
        yield "calls that wait for the GPU, in 6 steps", None, f"{len(places)}: {counted}"
    size = AMOEBANET if setting.gpu else TINY
    result = setting.run("train", "idle", *size, "max_steps=12", "partitions=1")
    yield "idle share of a step", None, f"{100 * result['idle']:.1f} %"


def speeds(setting: Setting) -> Found:
    """7. One factor at a time."""
    base = [*AMOEBANET, "batch_size=64", "partitions=1", "micro_batches=4"] if setting.gpu else [*TINY, "partitions=1"]
    factors = ["", "precision=tf32", "precision=bfloat16", "deterministic=false", "memory_format=contiguous",
               "recompute=never", "partitions=2", "partitions=4", "partitions=8"]  # fmt: skip
    first = 0.0
    for factor in factors if setting.gpu else factors[:3:2]:
        kept = [one for one in base if one.partition("=")[0] != factor.partition("=")[0]]
        result = setting.run("bench", "bench", *kept, *filter(None, [factor]), "executor=in_process", "warm_up_steps=5",
                             f"steps={20 if setting.gpu else 3}")  # fmt: skip
        speed = result["samples_per_second"]
        first = first or speed
        yield factor or "as it is: AmoebaNet-D, K=1, M=4", None, f"{speed:.1f} samples/s, {speed / first:.2f}"


def memory(setting: Setting) -> Found:
    """8. The planned bytes beside those that were there, and one line where they are not enough."""
    size = AMOEBANET if setting.gpu else TINY
    for precision in ("float32", "bfloat16"):
        result = setting.run("train", "memory", *size, "max_steps=3", "partitions=1", f"precision={precision}")
        planned, counted = result["predicted_activation_bytes"][0], result["activation_bytes"][0]
        peak = result["memory"][0]["peak"]
        yield (
            f"activations, {precision}", abs(planned / counted - 1) < 0.01,
            f"planned {planned / 2**20:.1f}, counted {counted / 2**20:.1f}, peak {peak / 2**20:.1f} MiB",
        )  # fmt: skip
    if setting.gpu:
        large = [*AMOEBANET, "dataset.image_size=512", "batch_size=512", "micro_batches=1", "recompute=never"]
        done = setting.gpipe("train", *large, "partitions=1", "max_steps=1", "dataset.train_samples=512")
        line = done.stderr.strip().splitlines()[-1:] or [""]
        yield "out of memory is one line", "more micro_batches" in done.stderr and "Traceback" not in line[0], line[0]


def resumption(setting: Setting) -> Found:
    """9. K = 2, then 4, with each optimizer: the tensors of a run without a break."""
    for optimizer in ("rmsprop", "sgd", "adam", "adafactor") if setting.gpu else ("adam",):
        common = [*TINY, f"optimizer={optimizer}", "executor=in_process", "checkpoint.every_steps=3", "epochs=3"]
        setting.run("train", "whole", *common, "partitions=1", "max_steps=6")
        setting.run("train", "half", *common, "partitions=2", "max_steps=3")
        setting.run("train", "rest", f"resume={setting.folder / 'half'}", "partitions=4", "max_steps=6")
        whole, rest = (digest(setting.folder / name) for name in ("whole", "rest"))
        same = sum(whole[name] == rest.get(name) for name in whole)
        yield f"resumed with another K, {optimizer}", same == len(whole), f"{same} of {len(whole)} tensors"


def prediction(setting: Setting) -> Found:
    """10. The step that was predicted, by the data sheet and by timed layers, beside the measured one."""
    size = [*AMOEBANET, "batch_size=64"] if setting.gpu else TINY
    for cost in ("figures", "measured_anew"):
        result = setting.run("train", "predicted", *size, "max_steps=24", "partitions=1", f"cost={cost}")
        predicted, measured = result["prediction"]["step_seconds"], result["step_seconds"]
        yield f"cost={cost}", None, f"{1e3 * predicted:.1f} ms predicted, {1e3 * measured:.1f} measured"


PARTS: dict[str, tuple[Callable[[Setting], Found], int]] = {
    "versions": (versions, 20),
    "tests": (tests, 90),
    "check": (check, 120),
    "links": (links, 60),
    "nodes": (nodes, 110),
    "synchronisations": (synchronisations, 60),
    "speeds": (speeds, 150),
    "memory": (memory, 60),
    "resumption": (resumption, 100),
    "prediction": (prediction, 60),
}  # by name: what is done, and its limit in seconds
NEEDS_GPU = ("tests",)


def compose_training(*settings: str) -> Any:
    from hydra import compose, initialize_config_module

    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        return compose("train", list(settings))


def digest(run: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, by name."""
    from safetensors import safe_open

    found = {}
    for file in sorted((run / "checkpoints" / "last").resolve().glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found[name] = tensors.get_tensor(name).numpy().tobytes()
    return found


def perform(name: str, setting: Setting) -> list[Row]:
    """One part, in a process of its own; what it has found when its time is over counts."""
    _, limit = PARTS[name]
    file = setting.folder / f"{name}.jsonl"
    command = [sys.executable, str(HERE), f"--one={name}", f"--device={setting.device}", f"--folder={setting.folder}"]
    began = time.monotonic()
    program = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               start_new_session=True, env=environment())  # fmt: skip
    try:
        _, said = program.communicate(timeout=limit)
        end = "" if program.returncode == 0 else f"{(said.strip().splitlines() or ['?'])[-1]}"
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGINT)  # it ends what it has started
        try:
            program.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        end = f"not done after {limit} s"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [Row(**json.loads(line)) for line in lines]
    taken = f"{time.monotonic() - began:.0f} s"
    return [*rows, Row(name, "the part", False, f"{end} ({taken})") if end else Row(name, "the part", True, taken)]


def main(arguments: Sequence[str] | None = None) -> None:
    import torch

    parser = command_line(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--one", default=None, help="this part alone, in this process")
    options = parser.parse_args(arguments)
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="gpu_acceptance_"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.device, folder)
    if options.one is not None:
        with (folder / f"{options.one}.jsonl").open("w") as file:
            for what, held, figures in PARTS[options.one][0](setting):
                file.write(json.dumps(asdict(Row(options.one, what, held, figures))) + "\n")
                file.flush()
        return
    rows: list[Row] = []
    print("| part | what | held | figures |\n| --- | --- | --- | --- |")
    for name in options.parts.split(","):
        if name in NEEDS_GPU and not setting.gpu:
            continue
        for row in perform(name, setting):
            rows.append(row)
            held = {True: "yes", False: "NO", None: ""}[row.held]
            print(f"| {row.part} | {row.what} | {held} | {row.figures.replace('|', '/')} |", flush=True)
    (folder / "gpu_acceptance.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    failed = [row for row in rows if row.held is False]
    print(f"\n{len(rows) - len(failed)} rows, {len(failed)} did not hold; {folder / 'gpu_acceptance.json'}")


if __name__ == "__main__":
    main()
