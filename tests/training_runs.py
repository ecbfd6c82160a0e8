"""Tiny trainings for the tests of the whole program: in this process, by the command, or as a process of their own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig

from gpipe_cli.commands.command_line import parse_command_line
from gpipe_cli.commands.compose_config import TRAINING_KEYS, ConfigComposer, training_config
from gpipe_cli.commands.run_request import RunRequest
from gpipe_cli.commands.training_run import find_source
from gpipe_cli.config.settings import TrainConfig, fallback_values, read_config, to_yaml
from gpipe_cli.distributed.control_group import BlockedOnContext, ControlGroup
from gpipe_cli.distributed.rendezvous import Decision
from gpipe_cli.pipeline.runtime.executor import OnAction, ignore_action
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.schedule.schedule import Action, Kind
from gpipe_cli.training.checkpoint.files import find_checkpoint, read_index, read_tensors
from gpipe_cli.training.checkpoint.restore import collect_stage_state
from gpipe_cli.training.engine import Engine, WorkerProcess, build_engine
from gpipe_cli.training.train_loop import train

Message = TypeVar("Message")

# 22 samples in mini-batches of 8: two of 3 + 3 + 2 samples and one of 2 + 2 + 2 an epoch. Tests that read a dashboard's
# events ask for it: its pictures take longer than the steps.
TINY = [
    "model.normal_cells=3", "model.filters=4", "dataset=synthetic_images", "dataset.image_size=16",
    "dataset.num_classes=4", "dataset.train_samples=22", "dataset.test_samples=10", "logger=[]", "batch_size=8",
    "micro_batches=3", "data_workers=0", "threads=1", "device=cpu",
]  # fmt: skip
# The same with eight layers of a user's own, which have batch norm and dropout, for all that is not about AmoebaNet:
# shapes are traced in a tenth of the time, and steps take a sixth.
NAMED = "model.target=custom_models:small"  # again, where a run with it is resumed or evaluated
SMALL = [*TINY[2:], "model=custom", NAMED, "check_layers=false"]
# everything that has a state or draws random numbers
LIVELY_SMALL = [
    "ema_decay=0.9",
    "gradient_clipping=0.5",
    "dataset.augmentation.shift=2",
    "dataset.augmentation.horizontal_flip=true",
    "learning_rate.warmup_epochs=1",
]
LIVELY = ["model.drop_path=0.3", *LIVELY_SMALL]


@cache
def _trees(command: str) -> ConfigComposer:
    return ConfigComposer(parse_command_line(command, []), TRAINING_KEYS)


def composed(*settings: str, command: str = "train") -> DictConfig:
    """The tree of a command with these settings; each choice of groups is composed once."""
    return _trees(command).compose(settings)


def configure(*settings: str) -> TrainConfig:
    """The configuration that `gpipe train` would have with these settings."""
    return training_config(composed(*settings), {})[0]


def spec_of(config: TrainConfig, profile: ModelProfile | None = None) -> PipelineSpec:
    """The parts of a model that is cut by the data sheet, placed by this machine."""
    return make_pipeline_spec(config, profile)


def train_here(
    config: TrainConfig,
    folder: Path,
    on_action: OnAction = ignore_action,
    blocked_on: BlockedOnContext = nullcontext,
    *,
    only_steps: bool = False,
) -> list[object]:
    """Train in this process, all stages of it; returns the messages for the parent. `only_steps`: as a bench does."""
    folder.mkdir(parents=True, exist_ok=True)
    messages: list[object] = []
    spec = spec_of(config)
    assert not spec.layout.distributed, "executor=in_process is needed here"
    process = WorkerProcess(0, lambda: (ControlGroup(0, 1, blocked_on=blocked_on), None), messages.append, on_action)
    decision = Decision(folder, config.resume, source_of(config))
    train(config, spec, decision, process, only_steps=only_steps)
    (folder / "config.yaml").write_text(to_yaml(config))  # the parent's part, so that the run can be resumed
    return messages


def source_of(config: TrainConfig) -> Path | None:
    """The checkpoint that a run with these settings would go on from, or take weights of."""
    saved = None if config.resume is None else read_config(Path(config.resume), fallback_values(config))
    return find_source(RunRequest(config, (), saved=saved))


def pipeline_of(config: TrainConfig, on_action: OnAction = ignore_action) -> Engine:
    """All stages of a run before its first step, in this process."""
    return build_engine(config, spec_of(config), ControlGroup(0, 1), on_action=on_action)


def state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """All that a pipeline holds, as a checkpoint would have it."""
    return {name: tensor for k in engine.stages for name, tensor in collect_stage_state(engine, k).items()}


def of_type(messages: list[object], kind: type[Message]) -> list[Message]:
    return [message for message in messages if isinstance(message, kind)]


def command(*arguments: str) -> int:
    """`gpipe ...` called from this process; its workers come out of a fork server that all tests share."""
    from gpipe_cli.cli import main

    return main(list(arguments))


def command_struck(strike: Callable[[], object], *arguments: str) -> int:
    """`gpipe ...` called from this process, while another thread does something to it, or ends it if it cannot."""

    def strike_or_end() -> None:
        try:
            strike()
        except BaseException:
            os.kill(os.getpid(), signal.SIGINT)
            raise

    with ThreadPoolExecutor(1) as pool:
        struck = pool.submit(strike_or_end)
        code = command(*arguments)
        struck.result()
    return code


def start_program(*arguments: str) -> "subprocess.Popen[str]":
    """`gpipe ...` as a user starts it, leading its own session, so that Ctrl-C can be sent to all of it."""
    return subprocess.Popen(
        [sys.executable, "-m", "gpipe_cli", *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},  # where custom_models.py is
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def final_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint of a run, by name."""
    checkpoint = find_checkpoint(folder, "last", "run")
    return read_tensors(checkpoint, read_index(checkpoint).layers, ("model", "optimizer", "ema"))


def steps_of(folder: Path) -> list[int]:
    """The steps of a run's curves, which logger=[csv] has written."""
    _, *rows = (folder / "metrics.csv").read_text().splitlines()
    return [int(row.partition(",")[0]) for row in rows]


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    different = [
        name for name in one if one[name].dtype != other[name].dtype or not torch.equal(one[name], other[name])
    ]
    assert not different, f"{len(different)} of {len(one)} differ: {different[:5]}"


def wait_until(true: Callable[[], Any], seconds: float, what: str) -> Any:
    """What `true` returns as soon as it is something."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := true():
            return value
        time.sleep(0.02)
    raise TimeoutError(f"{what}: not within {seconds} s")


def processes() -> Iterator[tuple[int, list[str], str]]:
    """The living processes: number, what /proc/PID/stat says behind the name, command line (Linux)."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if fields[0] not in "ZX":
                yield int(folder.name), fields, line


def children(parent: int, line: str = "") -> list[int]:
    """The children of a process, in the order in which they were started, that have `line` in their command line."""
    return sorted(number for number, fields, own in processes() if int(fields[1]) == parent and line in own)


def workers_of(parent: int) -> list[int]:
    """The processes of the stages of a run, in order."""
    return [worker for server in children(parent, "fork_server") for worker in children(server)]


def session_members(session: int) -> dict[int, str]:
    """The processes of a session by number, with their command lines."""
    return {number: line for number, fields, line in processes() if int(fields[3]) == session}


def until_asked(process: WorkerProcess) -> None:
    """A task that has begun its first action, and ends once it is asked to."""
    control, _ = process.connect()
    process.on_action(Action(Kind.F, 0, 0), 1, ())
    process.report("begun")
    while not control.reason():
        time.sleep(0.01)
