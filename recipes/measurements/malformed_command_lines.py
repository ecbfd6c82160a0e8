"""Malformed command lines, made up from a seed: what `gpipe` makes of each.

Each must end with exit code 2 and one line on stderr, which names something of what was typed, within a time limit, and
leave no file and no process behind.
Each runs in a child of this process, which has imported what takes long; every twentieth as a program of its own.
Prints how many there were of each kind, and those that failed; exit code 1 if one did.

    python recipes/measurements/malformed_command_lines.py [--lines 400] [--seed 0] [setting=value ...]
"""

import atexit
import ctypes
import importlib
import json
import math
import os
import random
import re
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from runs import command_line

from gpipe_cli.__main__ import main as gpipe
from gpipe_cli.cli import COMMANDS
from gpipe_cli.commands.evaluate import OF_THE_RUN
from gpipe_cli.config.groups import AmoebaNetConfig, ImagesConfig, PaperLearningRateConfig, RMSPropConfig
from gpipe_cli.config.settings import BenchSettings, EvaluateSettings, ExportSettings, PlanSettings, TrainConfig
from gpipe_cli.config.slurm import LaunchSettings
from gpipe_cli.config.typed import Within, settings
from gpipe_cli.system.files import FolderLock

SECONDS = 120.0  # for one command line; a machine may be busy
GRACE_SECONDS = 3.0  # for what a command has started to end with it
OWN_PROGRAM = 20  # every so many-th line is started as a program
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: processes whose parent has ended become our children
TRAINS = ("train", "plan", "check", "bench")  # the commands that have all settings of a training
CHOICES = {
    "model": AmoebaNetConfig, "dataset": ImagesConfig, "optimizer": RMSPropConfig,
    "learning_rate": PaperLearningRateConfig,
}  # fmt: skip
TINY = [
    "model.normal_cells=3", "model.filters=4", "dataset=synthetic_images", "dataset.image_size=16",
    "dataset.num_classes=4", "dataset.train_samples=16", "dataset.test_samples=4", "batch_size=8", "partitions=1",
    "data_workers=0", "threads=1", "max_steps=2", "device=cpu", "hardware=cpu",
]  # fmt: skip


@dataclass(frozen=True)
class Line:
    kind: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        typed = shlex.join(self.arguments).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        return ascii(f"{variables}gpipe {typed if len(typed) < 300 else typed[:300] + '...'}")[1:-1]


# --- the folder in which they are typed

DEEP = "[" * 100_000 + "]" * 100_000
BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{key}: &{key} [{','.join([f'*{before}'] * 9)}]\n" for before, key in zip("abcdefgh", "bcdefghi", strict=True)
)
# of a list of defaults, and of Hydra's own settings
ITEMS = ("{3: a}", "[a]", "{dataset: 3}", "{dataset: digits, model: x}", "{}", "null", "{dataset: [3]}", "'???'", "1.5",
         "'${x}'", "override dataset: digits", "train@", "{override hydra/launcher: 3}")  # fmt: skip
HYDRA = ("3", "null", "[]", "{run: 3}", "{sweeper: 3}", "{mode: 3}", "{searchpath: [nowhere]}", "{callbacks: {a: 3}}",
         "{job: 3}", "{verbose: 3}")  # fmt: skip
FILES = {
    "empty": b"", "text": b"some words\n" * 3, "binary": bytes(range(256)), "deep": DEEP.encode(), "list": b"- a\n",
    "huge": b"a: 1\n" * 2**22, "aliases": BOMB.encode(), "number": b"seed: " + b"1" * 5000, "latin1": b"a: \xfc\n",
    "object": b'{"command": {"train": [1e999]}, "status": 3, "config": [], "format": "1", "arguments": [3]}',
    "empty.csv": b"", "words.csv": b"some,words\n", "binary.csv": bytes(range(256)), "huge.csv": b"0F0,0B0\n" * 2**22,
    "arabic.csv": "\u0660F\u0660\n".encode(), "latin1.csv": b"0F0,\xfc\n", "quote.csv": b'"0F0,' + b"x" * 200_000,
    "digits.csv": b"0F" + b"0" * 5000 + b"\n", "stages.csv": b"0F0,0B0\n", "forward.csv": b"0F0\n1F0\n",
    "twice.csv": b"0F0,0F0,0B0\n1F0,1B0\n", "stuck.csv": b"0B0,0F0\n1F0,1B0\n", "far.csv": b"999999F999999\n",
    "no_text/a.txt": b" \n", "latin1.txt": "Gr\u00fc\u00dfe\n".encode("latin-1"),
    "two.tsv": b"a\tb\n", "languages.tsv": b"a\tb\tgerman\n", "empty_side.tsv": b"a\t\tde-en\n",
    "latin1.tsv": "\u00fc\tb\tde-en\n".encode("latin-1"),
    "broken.py": b"def build(:\n", "raises.py": b"def build():\n    raise RuntimeError('two\\nlines')\n",
    "number.py": b"def build():\n    return 3\n", "leaves.py": b"import sys\n\ndef build():\n    sys.exit(7)\n",
    "conf/self.yaml": b"defaults: [self, _self_]\n", "conf/empty.yaml": b"", "conf/bomb.yaml": BOMB.encode(),
    "conf/deep.yaml": f"a: {DEEP}\n".encode(), "conf/binary.yaml": bytes(range(256)),
    "conf/latin1.yaml": "output: \u00fc\n".encode("latin-1"), "conf/tab.yaml": b"a:\n\t- b\n",
    "conf/list.yaml": b"- a\n- b\n", "conf/word.yaml": b"word\n", "conf/number.yaml": b"3\n",
    "conf/tag.yaml": b"a: !!python/object/apply:os.getcwd []\n", "conf/other.yaml": b"other: 3\n",
    "conf/defaults.yaml": b"defaults: 3\n", "conf/missing.yaml": b"defaults: [nothing]\n",
    "conf/cut.yaml": b"a: [1,\n", "conf/twice.yaml": b"defaults: [train, _self_]\nseed: 1\nseed: abc\n",
    "conf/wrong.yaml": b"defaults: [train, _self_]\nseed: many\n",
    "conf/interpolated.yaml": b"defaults: [train, _self_]\nseed: ${nowhere}\n",
    "conf/digits.yaml": b"defaults: [train, _self_]\nseed: " + b"1" * 5000, "conf/unit.yaml": b"seed: !!int many\n",
    "conf/circle.yaml": b"defaults: [train, _self_]\nseed: ${batch_size}\nbatch_size: ${seed}\n",
}  # fmt: skip
FILES |= {
    f"conf/wrong_{number}.yaml": f"defaults: [train, _self_{wrong}\nseed: abc\n".encode()
    for number, wrong in enumerate([f", {item}]" for item in ITEMS] + [f"]\nhydra: {value}" for value in HYDRA])
}
# contents of a file that is to be read
BAD = ("empty", "binary", "deep", "list", "fifo", "folder", "huge", "aliases", "number", "latin1", "object")


def furnish() -> FolderLock:
    """Makes a run, and files and folders that are not what they should be; returns the lock of `locked`."""
    run_child(lambda: gpipe_with(["train", *TINY, "run_folder=run"]), Path.cwd())
    folders = "folder", "locked", "no_text", "no_images/train", "one_class/train/a", "conf/folder.yaml", "folder.csv"
    for folder in folders:
        Path(folder).mkdir(parents=True)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    for name in ("fifo", "conf/fifo.yaml", "fifo.csv", "fifo.safetensors"):
        os.mkfifo(name)
    for name, target in (("loop", "loop"), ("zero", "/dev/zero"), ("zero.csv", "/dev/zero")):
        Path(name).symlink_to(target)
    for bad in BAD:
        for name in ("index", "result"):
            shutil.copytree("run", f"{name}_{bad}", symlinks=True)
        (index,) = Path(f"index_{bad}/checkpoints").glob("step_*/index.json")
        for name in ("run", "sweep"):
            Path(f"{name}_{bad}").mkdir()
        files = (
            Path(f"run_{bad}/config.yaml"),
            Path(f"sweep_{bad}/sweep.json"),
            Path(f"result_{bad}/result.json"),
            index,
        )
        for file in files:
            file.unlink(missing_ok=True)
            match bad:
                case "fifo":
                    os.mkfifo(file)
                case "folder":
                    file.mkdir()
                case _:
                    shutil.copy(bad, file)
    Path("sweep_list/sweep.json").write_text(json.dumps({"command": 3, "arguments": {}, "options": 5, "runs": "x"}))
    return FolderLock(Path("locked"))


# --- kinds of mistakes: those made up from the settings of a command


def keys_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting that is no group, with its type."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        inner = CHOICES.get(name, hint) if not prefix else hint
        if hasattr(inner, "__dataclass_fields__"):
            yield from keys_of(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


def bare(hint: Any) -> Any:
    """A type without `| None`."""
    if get_origin(hint) in (UnionType, Union):
        return bare(next(one for one in get_args(hint) if one is not type(None)))
    return hint


KEYS = dict(keys_of(TrainConfig))
ALL_KEYS = settings(TrainConfig)
OF_A_RUN = {key: KEYS[key] | None for key in OF_THE_RUN if key in KEYS}  # null: as it was trained
# The settings that a command has beside or in place of those of a training.
OWN: dict[str, dict[str, Any]] = {
    "train": {},
    "check": {},
    "plan": dict(keys_of(PlanSettings)),
    "bench": dict(keys_of(BenchSettings)),
    "launch slurm": dict(keys_of(LaunchSettings)),
    "evaluate run=run": OF_A_RUN | dict(keys_of(EvaluateSettings)),
    "export run=run": OF_A_RUN | dict(keys_of(ExportSettings)),
}
CONTROLS = ["\n", "\r", "\x1b[31m", "\x7f", "\x01", "a\nb", "\x85", "\udcff", "caf\udce9", "\n\n\nx"]
Arguments = tuple[str, ...]


def one_of(pick: random.Random, suits: Callable[[Any], bool] = lambda hint: True) -> tuple[Arguments, str, Any]:
    """A command, a setting of it with a type that suits, and that type."""
    while True:
        command, own = pick.choice(list(OWN.items()))
        keys = own if "run=run" in command or (own and pick.random() < 0.5) else KEYS
        if fitting := [key for key in keys if suits(keys[key])]:
            key = pick.choice(fitting)
            return tuple(command.split()), key, keys[key]


def has_bounds(hint: Any) -> bool:
    return get_origin(bare(hint)) is Annotated and isinstance(get_args(bare(hint))[1], Within)


def unknown_setting(pick: random.Random) -> Arguments:
    key = pick.choice(ALL_KEYS)
    at = pick.randrange(len(key))
    changed = [key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key + "s", f"model.{key}", key + ".x"]
    wrong = pick.choice(changed)
    if wrong in ALL_KEYS or not wrong or wrong[0] == "." or wrong[-1] == ".":
        wrong = "nothing_like_it"
    setting = f"{pick.choice(['', '', '', '+', '++'])}{wrong}={pick.choice(['3', 'abc', '[1,2]', 'null'])}"
    return *pick.choice([*OWN, "reproduce"]).split(), setting


def wrong_type(pick: random.Random) -> Arguments:
    command, key, optional = one_of(pick)
    hint = bare(optional)
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    values = {
        int: ["abc", "1.5", "true", "[1]", "{a:1}", "1e3", "'4'", "1_x"],
        float: ["abc", "true", "[0.5]", "{a:1}", "'0.5'", "1,5"],
        bool: ["3", "maybe", "[true]", "'true'", *(["null"] if hint is optional else [])],
        str: ["{a:1}", "[a,b]", "3", "true", "1.5"],
    }
    other = ["sideways", "{a:1}", "-7"] if get_origin(hint) in (Literal, tuple) else ["3", "[{a:1}]"]
    return *command, f"{key}={pick.choice(values.get(kind, other))}"


def out_of_range(pick: random.Random) -> Arguments:
    command, key, hint = one_of(pick, has_bounds)
    kind, bounds = get_args(bare(hint))
    values = ["nan", "inf", "-inf", "9" * 400, "-" + "9" * 400, "9" * 5000, "1e400", "-1e308"]
    step = 1 if kind is int else max(abs(bounds.least), 1.0)
    values += [str(kind(bounds.least - step)), str(kind(bounds.most) + (0 if bounds.below else kind(bounds.most)))] * 3
    return *command, f"{key}={pick.choice(values)}"


def empty(pick: random.Random) -> Arguments:
    command, key, _ = one_of(pick)
    key = pick.choice([key, key, key, "model", "dataset", "optimizer", "hardware"])
    typed = [f"{key}=", f"{key}=''", f'{key}=""', key, f"={key}", "=", "", " ", f"{key}=???", f"+={key}", f"{key}= "]
    return *command, pick.choice(typed)


def syntax(pick: random.Random) -> Arguments:
    command, key, _ = one_of(pick)
    value = pick.choice(
        ["[1,2", "{a:1", "'3", '"3', "[4,[8]", "3)", "$(", "{b:[c}", "[" * 500, "[" * 50_000, "a:b:c{", "]", "choice(",
         "${", "${nowhere}", "${oc.env:GPIPE_NOTHING}", f"${{{key}}}", "${oc.decode:'['}", "${now:}",
         "${oc.create:{a:1}}", "range(1)", "glob(*)", "sort(3,1)", "int(abc)", "extend_list(1)", "\\", "a=b=c",
         "${..}", "${oc.env:}", f"${{oc.decode:{'9' * 5000}}}"]
    )  # fmt: skip
    return *pick.choice([command, ("reproduce",)]), f"{key}={value}"


def control(pick: random.Random) -> Arguments:
    odd, command = pick.choice(CONTROLS), pick.choice([name for name in COMMANDS if name != "help"])
    key = pick.choice(
        ["output", "run_folder", "resume", "init_from", "run", "seed", "model", "dataset", "dataset.root", "schedule",
         "logger", "time", "sbatch.comment", "file", "write_schedule", "format"]
    )  # fmt: skip
    typed = pick.choice([f"{key}={odd}", f'{key}="{odd}"', f"{key}='x{odd}y'", f"{odd}={odd}", f"{key}{odd}=3", odd])
    return pick.choice([(command, typed), (odd,), (command + odd, "seed=1")])


def torchrun(pick: random.Random) -> Line:
    whole = {
        "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }  # fmt: skip
    number = pick.choice(
        ["abc", "-1", "1e3", "", "0x2", "99999999999999999999", "\u0662", "1.5", " 2", "nan", "9" * 5000]
    )
    environment = pick.choice(
        [{"RANK": number}, {"WORLD_SIZE": number}, {"RANK": "5", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0"},
         whole | {"LOCAL_WORLD_SIZE": number}, whole | {"RANK": number}, whole | {"MASTER_ADDR": ""},
         whole | {"MASTER_PORT": "abc"}]
    )  # fmt: skip
    commands = ["train partitions=2", "train -m seed=1,2", "compare run", "list models", *OWN]
    return Line("", tuple(pick.choice(commands).split()), environment)


def mistyped_command(pick: random.Random) -> Arguments:
    command = pick.choice([name for name in COMMANDS if name != "help"])  # `gpipe --help` is none
    at = pick.randrange(len(command))
    wrong = [command[:at] + command[at + 1 :], command.upper(), command + "x", f"--{command}", f"{command}=1"]
    return pick.choice([(pick.choice(wrong), "seed=1"), phrase("mistyped command", pick)])


# --- kinds of mistakes: those that are written here, as one would type them; `<word>` is one of WORDS

ODD = ("fifo", "empty", "text", "binary", "folder", "missing", "/dev/null", "/dev/zero", "loop", "run/config.yaml",
       "huge", "zero", "/proc/self/mem", "a" * 300)  # fmt: skip
WORDS: dict[str, Sequence[str]] = {
    "trains": TRAINS,
    "reads": ("plan", "compare run", "diff run run", "list models", "list runs run", "list"),
    "sweeps": ("train", "bench"),
    "any": tuple(COMMANDS),
    "recipe": ("table1_amoebanet", "breakdown", "consistency", "transfer_cifar10", "multilingual_400m"),
    "odd": ODD,
    "unwritable": ("fifo", "text", "text/below", "/dev/null", "/proc/here", "loop", "loop/below", "a" * 300),
    "bad": BAD,
    "data": ("fifo", "empty", "text", "binary", "folder", "missing", "/dev/null"),
    "tsv": ("two.tsv", "languages.tsv", "empty_side.tsv", "latin1.tsv"),
    "yaml": (*(name[5:-5] for name in FILES if name.endswith(".yaml")), "fifo", "folder", "nothing", "../text", "''"),
    "hydra": (
        "run=3",
        "sweep=3",
        "sweeper=3",
        "job=3",
        "mode=3",
        "searchpath=[nowhere]",
        "launcher=3",
        "callbacks=3",
        "verbose=3",
        "help=3",
        "job.chdir=3",
        "output_subdir=3",
        "runtime=3",
        "env=3",
        "x=3",
    ),
    "tiny": (" ".join(TINY),),
    "surrogate": ("\udcff",),
    "control": CONTROLS,
    "schedules": (*(name for name in FILES if name.endswith(".csv")), "fifo.csv", "zero.csv", "folder.csv", "gone.csv"),
    "plans": (*TRAINS, "launch slurm"),
    "time": (
        "1:75",
        "abc",
        "24",
        "0:00",
        "-1:00",
        "1-",
        "99999:00",
        "1:00:00:00",
        "0:04",
        "1:00h",
        "\u0661:00",
        "1.5",
        "1:0",
        "1000-00:00",
        ":30",
        "1-2",
        "24:00:60",
        "UNLIMITED",
        "null:00",
        "9" * 5000,
    ),
    "option": (
        "time=1:00",
        "nodes=2",
        "wrap=ls",
        "array=1-3",
        "test_only=true",
        "partiton=gpu",
        "x=",
        "mem={a:1}",
        "mem=[]",
        "nodelist=[a,[b]]",
        "Partition=gpu",
        "-p=gpu",
        "signal=KILL",
        "signal=USR1@999999",
        "signal=USR1@",
        "signal=B:USR1@60",
        "signal=[USR1]",
        "signal=\u0661",
        "requeue=true",
        "no_requeue=true",
        "ntasks=4",
        "ntasks-per-node=4",
        "help=true",
        "wait=true",
        "mem=''",
        "mem={}",
        "a.b=c",
        "mem=[null]",
        "cpus_per_tsk=4",
    ),
    "logger": (
        "tensorbord",
        "[tensorboard,wanddb]",
        "[[mlflow]]",
        "3",
        "null",
        "[3]",
        "csv",
        "true",
        "{mlflow:1}",
        "[mlflow",
        "mlflow]",
        "''",
        "[null]",
        "Mlflow",
        "tensorboard+mlflow",
        "wandb",
    ),
    "costs": (
        "[-1]",
        "[nan]",
        "[a]",
        "{a:1}",
        "costs.csv",
        "3x",
        "[]",
        "[0,0]",
        "[1,2,3]",
        "[1e400]",
        "[[1]]",
        "[null]",
        "true",
        "'[1,2]'",
        "[1,2",
    ),
    "form": ("xml", "JSON", "json,csv", "[json]", "''", "null", "\u0661", "table.csv"),
}
PHRASES = {
    "group": """
        <trains> model=nothing | <trains> dataset=../digits | <trains> model=3 | <trains> model=[amoebanet]
        <trains> learning_rate=0.1 | <trains> optimizer=null | <trains> hardware=cpu9 | <trains> model.depth=50
        <trains> dataset.root=x | <trains> model@x=amoebanet | <trains> dataset=digits dataset=cldr
        <trains> model=transformer_lm dataset=digits | <trains> model=resnet dataset=python_docs | <trains> model=null
        <trains> +model=resnet | <trains> dataset=cifar10 | <trains> dataset=image_folder | <trains> optimizer={a:1}
        <trains> dataset=text_files model=transformer_lm | <trains> model=custom | <trains> model=timm
        <trains> model=timm model.name=no_such_network | <trains> model=custom model.target=os
        <trains> model=custom model.target=nothing:here | <trains> model=custom model.target=os:nothing
        <trains> ~dataset | <trains> ~model.filters | <trains> ~nothing | <trains> presets=x | <trains> hydra=x
        <trains> model=custom model.target=broken:build | <trains> model=custom model.target=raises:build
        <trains> model=custom model.target=number:build | <trains> model=custom model.target=leaves:build
        <trains> model=custom model.target=os:getcwd | <trains> hydra.x=3 | <trains> model=amoebanet/x
        <trains> optimizer=sgd optimizer.nesterov=true optimizer.momentum=0 | <trains> hydra/launcher=nothing
        <trains> model=resnet model.depth=19 | <trains> dataset=synthetic_images dataset.root=x
    """,
    "files": """
        train resume=<odd> | train resume=run_<bad> | train resume=index_<bad> | train resume=sweep_<bad>
        train <tiny> init_from=<odd> | train <tiny> init_from=run_<bad> | train <tiny> init_from=index_<bad>
        evaluate run=<odd> | evaluate run=run_<bad> | evaluate run=index_<bad>
        <trains> run_folder=<unwritable> | <trains> run_folder=run | <trains> run_folder=locked
        <trains> output=<unwritable> | train -m seed=1,2 hydra.sweep.dir=<unwritable>
        train -m seed=1,2 hydra.sweep.dir=locked | train model=transformer_lm dataset=text_files dataset.root=fifo
        train model=transformer_lm dataset=text_files dataset.root=empty
        train model=transformer_lm dataset=text_files dataset.root=no_text
        train model=transformer_lm dataset=text_files dataset.root=latin1.txt
        train model=transformer_lm dataset=text_files dataset.root=/dev/zero
        train model=transformer_nmt dataset=parallel_text dataset.root=<data>
        train model=transformer_nmt dataset=parallel_text dataset.root=<tsv>
        train dataset=image_folder dataset.root=fifo | train dataset=image_folder dataset.root=no_images
        train dataset=image_folder dataset.root=one_class | train dataset=cifar10 dataset.root=<data>
        train model=timm model.name=resnet10t model.weights=fifo
        train model=timm model.name=resnet10t model.weights=binary
        train model=timm model.name=resnet10t model.weights=folder
        train model=timm model.name=resnet10t model.weights=loop
    """,
    "configuration": """
        <trains> -cd conf -cn <yaml> | <trains> -cd conf -cn <yaml> | <trains> -cd conf -cn <yaml>
        <trains> -cd missing -cn <yaml> | <trains> -cd text -cn <yaml> | <trains> -cp conf -cn <yaml>
        <trains> --config-dir -cn <yaml> | <sweeps> -m hydra.<hydra> seed=abc | <trains> hydra.<hydra> seed=abc
        <trains> hydra/launcher=3 | <sweeps> -m hydra/sweeper=3 seed=1,2 | <trains> ~dataset=3
    """,
    "together": """
        train batch_size=4 batch_tokens=8 | train resume=run init_from=run
        train partition.costs=[1] cost=measured | train micro_batches=64 batch_size=8 | train init_head=new
        train partition.balance=[1,2,3] | train freeze=[taken] | train batch_size=null batch_tokens=64
        plan dry_run=true | plan resume=run | plan -m seed=1,2 | plan solve=nothing
        check partitions=auto | check dry_run=true | check batch_size=9999
        bench epochs=3 | bench rounds=2 | bench resume=run | bench max_steps=3
        evaluate | evaluate -m run=run | evaluate run=run partitions=99 | evaluate run=run batch_size=0
        evaluate run=run decode.beam=3 | evaluate run=run micro_batches=99 batch_size=8
        evaluate run=run dataset=digits | evaluate run=run checkpoint=worst
        train partitions=20 | train resume=run model=resnet | train resume=run batch_size=4 epochs=0
        train resume=run optimizer=adam | train resume=run epochs=1 max_steps=1 | train steps=3 | train solve=x
        train partitions=5000 micro_batches=100000 batch_size=100000 | train batch_size=1000000
        train freeze=[no_such_layer] | train dataset.classes=[1,1] | train dataset.classes=[99] | train device=cuda
        train executor=in_process device=cuda | train hardware.memory_gib=0.0001 recompute=auto
        train partition.costs=[0,0] | train partition.costs=[1,2,3] | train dataset=synthetic_text
        train model=transformer_lm model.heads=3 model.width=8 | train model=transformer_lm dataset.vocabulary=100
        train dry_run=true partitions=99 | train run_folder=run
        <plans> partition.costs=<costs> | <plans> partition.costs=<costs> | <plans> partition.balance=[5,5] partitions=3
        <plans> precision=float16 | <plans> precision=[bfloat16] | <plans> compile=auto | <plans> replicas=33
        <plans> replicas=4 micro_batches=16 | <plans> replicas=many | <plans> stages_per_process=3 | <plans> replicas=0
        <plans> stages_per_process=auto | <plans> stages_per_process=2 executor=in_process
        <plans> compile=true schedule=zero_bubble | <plans> compile=true model.drop_path=0.1
        <plans> compile=true model=transformer_nmt | <trains> logger=<logger> | <trains> logger=<logger>
        train resume=auto | train resume=auto run_folder=conf | train resume=auto run_folder=locked
        train resume=auto run_folder=<unwritable> | train resume=auto run_folder=run_<bad> | train resume=Auto
        train resume=auto -m seed=1,2 run_folder=x | bench resume=auto run_folder=x | check resume=auto run_folder=x
        train max_restarts=-1 | train freeze=[] init_head=keep | train init_from=auto
    """,
    "schedule file": """
        <plans> schedule=<schedules> | <plans> schedule=<schedules> | <plans> schedule=<schedules>
        <plans> schedule=text | <plans> schedule=.csv | <plans> schedule=GPIPE | <plans> schedule=[gpipe]
        <plans> schedule=3 | <plans> schedule=../1f1b | <plans> schedule=null | <plans> schedule=words.CSV
        <plans> schedule=interleaved partitions=2 | plan write_schedule=text | plan write_schedule=missing/x.csv
        plan write_schedule=<schedules>/x.csv | plan write_schedule=empty.csv | plan write_schedule=
        plan write_schedule=fifo.csv | plan write_schedule=[a.csv] | train write_schedule=x.csv | plan write_schedule=3
        plan -m partitions=1,2 write_schedule=x.csv | plan write_schedule=x.csv partitions=99
    """,
    "launch": """
        launch slurm time=<time> | launch slurm time=<time> | launch slurm sbatch.<option>
        launch slurm sbatch.<option> | launch slurm 'sbatch.comment="<control>"' | launch | launch slrum
        launch slurm x | launch SLURM seed=1 | launch slurm sbatch=[a,b] | launch slurm sbatch=gpu
        launch slurm sbatch=null | launch slurm nodes=0 | launch slurm nodes=99999
        launch slurm gpus_per_node=2 processes_per_node=3
        launch slurm device=cpu | launch slurm device=cuda gpus_per_node=0 | launch slurm resume=run
        launch slurm resume=auto | launch slurm dry_run=true | launch slurm partitions=20 | launch slurm steps=3
        launch slurm run_folder=<unwritable> | launch slurm run_folder=conf | launch slurm output=<unwritable>
        launch slurm init_from=<odd> | launch slurm -m time=1:00,2:00 | launch slurm -m nodes=1,2
        launch slurm -m seed=1
        launch slurm -m seed=1,2 run_folder=x | launch slurm -m | launch slurm -m seed=1,2 hydra.sweep.dir=<unwritable>
        launch slurm hydra.sweep.dir=x | launch slurm hydra/launcher=joblib | launch slurm hydra.verbose=true
        launch slurm -m partitions=1,99 | launch slurm -m seed=1,abc | launch slurm -m hydra/sweeper=optuna seed=1,2
        launch slurm -m 'seed=interval(1,2)'
        launch slurm requeue=maybe
        launch slurm nodes=3 gpus_per_node=1 partitions=2 | launch slurm cost=measured nodes=2 partitions=2
        launch slurm --submit | launch slurm submit=yes time=1:75 | launch slurm -cd conf -cn <yaml>
    """,
    "export": """
        export | export run=<odd> | export run=run_<bad> | export run=index_<bad> | export run=run format=<form>
        export run=run file=x.bin | export run=run file=missing/x.safetensors | export run=run file=folder
        export run=run file=x.pt | export run=run file=fifo.safetensors | export run=run file=
        export run=run file=<odd>
        export run=run file=run/config.yaml format=torch | export run=run averages=maybe | export -m run=run
        export run=run checkpoint=worst | export run=run overwrite=3 | export run=run partitions=99
        export run=run batch_size=0 | export run=run dataset=digits | export run=run model=resnet | export run=
        export run=run decode.beam=1 | export run=run evaluate=1 | export run=run hydra.x=3 | export run run
        export run=run,run | export run=run format=onnx file=x.pt | export run=run dataset.root=missing batch_size=x
    """,
    "search": """
        train -m hydra/sweeper=optuna dry_run=true seed=1,2 | <sweeps> -m hydra/sweeper=nothing seed=1,2
        <sweeps> -m hydra/sweeper=optuna 'seed=interval(a,b)' | <sweeps> -m 'seed=interval(1,2)'
        <sweeps> -m hydra/sweeper=optuna hydra.sweeper.n_trials=x 'seed=choice(1,2)'
        <sweeps> -m hydra/sweeper=optuna hydra.sweeper.n_trials=1 hydra.sweeper.direction=sideways 'seed=choice(1,2)'
        <sweeps> -m hydra/sweeper=optuna hydra/sweeper/sampler=nothing 'seed=choice(1,2)'
        <sweeps> -m hydra/sweeper=optuna 'partitions=range(50,90)' hydra.sweeper.n_trials=2
        <sweeps> -m hydra/sweeper=optuna 'batch_size=interval(5,1)' | <sweeps> -m hydra/sweeper=optuna hydra.sweeper.x=3
        <sweeps> hydra/sweeper=[optuna] -m seed=1,2 | plan -m hydra/sweeper=optuna 'seed=interval(1,2)'
    """,
    "formats": """
        <reads> format=<form> | <reads> format=<form> | <reads> fromat=csv | plan -m seed=1,2 format=<form>
        diff | diff run | diff <odd> run | diff run <odd> | diff run_<bad> run | diff run result_<bad> | diff '' run
        diff run run run | diff run run output=x | diff --csv run run | list nothing | list models a b | list runs <odd>
        list datasets x | list '' | list runs '' | list runs folder | list models '' | list --all
        list models <surrogate> | help '' | help model.filterz | help <surrogate> | help = | help =x | help x=
        compare result_<bad> | compare run_<bad> | compare run format=csv output=x | list runs run x
        list format=json x
    """,
    "mistyped command": """
        lists | --vers | -x | '' | seed=1 <any> | -m | halp | <any> --no-such-option | train --partitions 4
        train --partitions=4 | train -q | plan -h -x | train -cn | train train | evaluate run | train --cfg
        train --cfg nothing | train --info x | compare --csv | compare -m run | reproduce --scale desk
        train -- epochs | list nothing | list models no_such_network | list runs missing | help nothing_at_all
        diff run | diff run missing | diff run run run | diff fifo run
    """,
    "sweep": """
        <sweeps> -m partitions=0,-1 | <sweeps> -m partitions=1,abc | <sweeps> -m model=nothing,amoebanet
        <sweeps> -m run_folder=x seed=1,2 | <sweeps> seed=1,2 | <sweeps> -m 'seed=range(0,-5)'
        <sweeps> -m 'seed=choice()' | <sweeps> -m epochs=${nowhere} seed=1,2 | <sweeps> -m nothing=1,2
        <sweeps> -m seed=1,2 model.depth=50 | <sweeps> -m lr=0.1,0.2 | <sweeps> -m dataset=cldr,cldr
        <sweeps> -m seed=1,-1 | <sweeps> -m hydra.sweep.dir=text seed=1,2 | <sweeps> -m seed=1, batch_size=x
        <sweeps> -m seed=1,2 -cn nothing | <sweeps> -m resume=sweep_list | <sweeps> resume=sweep_list
        <sweeps> -m micro_batches=1,2,inf | <sweeps> -m output=,x | <sweeps> -m seed=1,2 hydra.run.dir=x
    """,
    "compare": """
        compare | compare <odd> | compare run_<bad> | compare result_<bad> | compare run format=csv output=x
        compare run output=<unwritable> | compare run output=locked | compare run output= | compare run format=
        compare run outptu=x | compare seed=1 | compare run<surrogate> | compare fifo folder missing | compare ''
    """,
    "reproduce": """
        reproduce <recipe>x | reproduce <recipe> scale=huge | reproduce <recipe> nothing=3
        reproduce breakdown batch_size=x | reproduce <recipe> <recipe> | reproduce <recipe> ~seed
        reproduce <recipe> -m | reproduce <recipe> run_folder=x | reproduce <recipe> output=<unwritable>
        reproduce <recipe> seed=1,2 | reproduce <recipe> dry_run=true | reproduce seed=1 | reproduce <recipe> scale=
        reproduce <recipe> resume=run | reproduce <recipe> batch_size=[1 | reproduce ../train | reproduce ''
        reproduce <recipe> output= | reproduce table1_amoebanet partitions=2 | reproduce <recipe> =3
        reproduce <recipe> model.filters=abc scale=desk | reproduce <recipe> --help=3
    """,
}


def phrase(kind: str, pick: random.Random) -> Arguments:
    written = pick.choice(re.split(r"[|\n]", PHRASES[kind].strip()))
    return tuple(shlex.split(re.sub(r"<(\w+)>", lambda word: pick.choice(WORDS[word[1]]), written)))


KINDS: dict[str, Callable[[random.Random], Arguments | Line]] = {
    "unknown setting": unknown_setting, "wrong type": wrong_type, "out of range": out_of_range, "empty": empty,
    "syntax": syntax, "control characters": control, "torchrun": torchrun,
    **{kind: partial(phrase, kind) for kind in PHRASES}, "mistyped command": mistyped_command,
}  # fmt: skip


def lines(count: int, seed: int) -> list[Line]:
    """As many different command lines, of all kinds in turns."""
    pick, found = random.Random(seed), dict[str, Line]()
    for kind in (kind for _ in range(100 * count) for kind in KINDS):
        made = KINDS[kind](pick)
        line = Line(kind, made.arguments, made.environment) if isinstance(made, Line) else Line(kind, made)
        found.setdefault(str(line), line)
        if len(found) == count:
            return list(found.values())
    raise SystemExit(f"--lines {count}: there are only {len(found)}")


# --- what becomes of them


def gpipe_with(arguments: list[str]) -> int:
    sys.argv = ["gpipe", *arguments]
    return gpipe()


def run_child(work: Callable[[], int], folder: Path) -> tuple[int | str, str, str]:
    """Does `work` in a child that is in a folder of its own; returns exit code, stdout and stderr.

    In place of the exit code: why there is none.
    """
    outputs = [os.memfd_create(name) for name in ("stdout", "stderr")]
    number = os.fork()
    if number == 0:
        code: Any = 70
        try:
            os.setsid()
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for output, descriptor in zip(outputs, (1, 2), strict=True):
                os.dup2(output, descriptor)
            try:
                code = work()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
            except BaseException:  # as the interpreter would end
                sys.excepthook(*sys.exc_info())
                code = 1
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    ended = os.pidfd_open(number)
    in_time = bool(select.select([ended], [], [], SECONDS)[0])
    os.close(ended)
    if not in_time:
        os.killpg(number, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    said = []
    for output in outputs:
        os.lseek(output, 0, os.SEEK_SET)
        with open(output, encoding="utf-8", errors="replace") as file:
            said.append(file.read())
    return status if in_time else f"still at work after {SECONDS:g} s", said[0], said[1]


def orphans() -> list[int]:
    """Processes that a child has left, once they had time to end; they are ended."""
    until = time.monotonic() + GRACE_SECONDS
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [int(one) for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        if not left or time.monotonic() > until:
            break
        time.sleep(0.01)
    for one in left:
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
        os.waitpid(one, 0)
    return left


def listing(*folders: Path) -> set[str]:
    """All that lies in them, without the folder for compiled code that torch makes for each user."""
    found = (
        os.path.join(at, name) for folder in folders for at, below, names in os.walk(folder) for name in below + names
    )
    return {path for path in found if "/torchinductor_" not in path}


def names(line: Line, error: str) -> bool:
    """Whether the error is about the line: it has an argument, a variable or a word of one in it."""
    typed = [*line.environment, *line.arguments[bool(line.arguments) and line.arguments[0] in COMMANDS :]]
    words = [*typed, *re.findall(r"[^\W\d]\w+", " ".join(typed), re.ASCII)]
    return not words or any(word[:20] in error or ascii(word[:20])[1:-1] in error for word in words)


def fault(line: Line, own: bool, place: Path, temporary: Path) -> str | None:
    """What is wrong with what becomes of a line; None: nothing."""
    before = listing(place, temporary)

    def work() -> int:
        os.environ.update(line.environment)
        if own:
            os.execv(sys.executable, [sys.executable, "-m", "gpipe_cli", *line.arguments])
        return gpipe_with(list(line.arguments))

    code, _, err = run_child(work, place)
    processes, after = orphans(), listing(place, temporary)
    for path in sorted(after - before, reverse=True):
        os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    wrong = []
    if code != 2:
        wrong.append(f"exit code {code}")
    if err.count("\n") != 1 or "Traceback" in err or not err.startswith("gpipe"):
        wrong.append(f"stderr is {err[-600:]!r}")
    elif not names(line, err.partition(": ")[2]):
        wrong.append(f"names nothing of what was typed: {err!r}")
    if processes:
        wrong.append(f"{len(processes)} processes left")
    if after != before:
        wrong.append(f"left or removed: {sorted(after ^ before)[:3]}")
    return "; ".join(wrong) or None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="each line as it is tried")
    options = parser.parse_args(arguments)
    count, seed = options.lines, options.seed
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in [name for name in os.environ if name.startswith(("GPIPE_", "LOCAL_", "MASTER_", "RANK", "WORLD_"))]:
        del os.environ[name]
    sys.path.append(".")  # where custom models are looked for
    # once, and not in every child
    for module in (
        *("commands.compare", "commands.diff", "commands.list", "commands.reproduce"),
        *("launch.check_run", "launch.export_run", "launch.plan_run", "launch.slurm_check", "launch.training_run"),
        *("launch.worker", "models.timm_models"),
    ):
        importlib.import_module(f"gpipe_cli.{module}")

    began, counts, faults = time.monotonic(), Counter[str](), []
    folder = tempfile.mkdtemp()  # not TemporaryDirectory, which every child would clear away at its end
    try:
        place, temporary = Path(folder, "place"), Path(folder, "tmp")
        for path in (place, temporary):
            path.mkdir()
        os.environ |= {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(Path(folder, "cache"))}
        os.chdir(place)
        lock = furnish()
        for number, line in enumerate(lines(count, seed)):
            if line.arguments[:1] and line.arguments[0] in TRAINS:
                line = Line(line.kind, (*line.arguments, *options.settings), line.environment)
            counts[line.kind] += 1
            if found := fault(line, number % OWN_PROGRAM == 0, place, temporary):
                faults.append((line, found))
            if options.show:
                print(f"{line.kind}: {line}{f': {found}' if found else ''}", flush=True)
        lock.release()
    finally:
        os.chdir("/")
        shutil.rmtree(folder)
    wrong = Counter(line.kind for line, _ in faults)
    for kind in KINDS:
        print(f"{kind:<20}{counts[kind]:>5} lines{wrong[kind]:>5} failed")
    seconds = time.monotonic() - began
    print(f"{'all':<20}{count:>5} lines{len(faults):>5} failed    seed {seed}, {math.ceil(seconds)} s")
    for line, found in faults:
        print(f"\n{line}\n  {found}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
