"""Malformed command lines, made up from a seed: what `gpipe` makes of each.

Each must end with exit code 2 and one line on stderr, within a time limit, and leave no file and no process behind.
Each runs in a child of this process, which has imported what takes long; every twentieth as a program of its own.
Prints how many there were of each kind, and those that failed; exit code 1 if one did.

    python recipes/measurements/malformed_command_lines.py [--lines 400] [--seed 0] [setting=value ...]
"""

import atexit
import ctypes
import json
import math
import os
import random
import select
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from runs import command_line

from gpipe_cli.__main__ import main as gpipe
from gpipe_cli.cli import COMMANDS
from gpipe_cli.config.dataset import ImagesConfig
from gpipe_cli.config.model import AmoebaNetConfig
from gpipe_cli.config.optimizer import PaperLearningRateConfig, RMSPropConfig
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import Within, settings
from gpipe_cli.system.files import FolderLock

SECONDS = 40.0  # for one command line; a machine may be busy
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
    "data_workers=0", "threads=1", "max_steps=2", "device=cpu",
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


# --- what lies in the folder in which they are typed


def furnish() -> FolderLock:
    """Makes a run, and files and folders that are not what they should be; returns the lock of `locked`."""
    run_child(lambda: gpipe_with(["train", *TINY, "run_folder=run"]), Path.cwd())
    os.mkfifo("fifo")
    for folder in ("folder", "locked", "no_text", "no_images/train", "one_class/train/a", "conf", "conf/folder.yaml"):
        Path(folder).mkdir(parents=True)
    deep = "[" * 100_000 + "]" * 100_000
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{key}: &{key} [{','.join([f'*{before}'] * 9)}]\n" for before, key in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for name, content in {
        "empty": b"", "text": b"some words\n" * 3, "binary": bytes(range(256)), "deep.json": deep.encode(),
        "no_text/a.txt": b" \n", "latin1.txt": "Gr\u00fc\u00dfe\n".encode("latin-1"),
        "two.tsv": b"a\tb\n", "languages.tsv": b"a\tb\tgerman\n", "empty_side.tsv": b"a\t\tde-en\n",
        "latin1.tsv": "\u00fc\tb\tde-en\n".encode("latin-1"),
        "broken.py": b"def build(:\n", "raises.py": b"def build():\n    raise RuntimeError('two\\nlines')\n",
        "number.py": b"def build():\n    return 3\n", "leaves.py": b"import sys\n\ndef build():\n    sys.exit(7)\n",
        "conf/self.yaml": b"defaults: [self, _self_]\n", "conf/empty.yaml": b"", "conf/bomb.yaml": bomb.encode(),
        "conf/deep.yaml": f"a: {deep}\n".encode(), "conf/binary.yaml": bytes(range(256)),
        "conf/latin1.yaml": "output: \u00fc\n".encode("latin-1"), "conf/tab.yaml": b"a:\n\t- b\n",
        "conf/list.yaml": b"- a\n- b\n", "conf/word.yaml": b"word\n", "conf/number.yaml": b"3\n",
        "conf/tag.yaml": b"a: !!python/object/apply:os.getcwd []\n", "conf/other.yaml": b"other: 3\n",
        "conf/defaults.yaml": b"defaults: 3\n", "conf/missing.yaml": b"defaults: [nothing]\n",
        "conf/cut.yaml": b"a: [1,\n", "conf/twice.yaml": b"defaults: [train, _self_]\nseed: 1\nseed: abc\n",
        "conf/wrong.yaml": b"defaults: [train, _self_]\nseed: many\n",
        "conf/interpolated.yaml": b"defaults: [train, _self_]\nseed: ${nowhere}\n",
        "conf/circle.yaml": b"defaults: [train, _self_]\nseed: ${batch_size}\nbatch_size: ${seed}\n",
    }.items():  # fmt: skip
        Path(name).write_bytes(content)
    os.mkfifo("conf/fifo.yaml")
    for name, config in {
        "empty": "empty",
        "binary": "binary",
        "deep": "conf/deep.yaml",
        "list": "conf/list.yaml",
    }.items():
        Path(f"run_{name}").mkdir()
        shutil.copy(config, f"run_{name}/config.yaml")
        shutil.copytree("run", f"index_{name}", symlinks=True)
        (index,) = Path(f"index_{name}/checkpoints").glob("step_*/index.json")
        shutil.copy("deep.json" if name == "deep" else config, index)
        shutil.copytree("run", f"result_{name}", symlinks=True)
        shutil.copy("deep.json" if name == "deep" else config, f"result_{name}/result.json")
        Path(f"sweep_{name}").mkdir()
        shutil.copy("deep.json" if name == "deep" else config, f"sweep_{name}/sweep.json")
    for name in ("run", "sweep"):
        Path(f"{name}_fifo").mkdir()
        Path(f"{name}_folder/{'config.yaml' if name == 'run' else 'sweep.json'}").mkdir(parents=True)
    os.mkfifo("run_fifo/config.yaml")
    os.mkfifo("sweep_fifo/sweep.json")
    shutil.copytree("run", "result_fifo", symlinks=True)
    Path("result_fifo/result.json").unlink()
    os.mkfifo("result_fifo/result.json")
    Path("sweep_list/sweep.json").write_text(json.dumps({"command": 3, "arguments": {}, "options": 5, "runs": "x"}))
    Path("loop").symlink_to("loop")
    return FolderLock(Path("locked"))


# --- kinds of mistakes


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
NUMBERS = {
    key: (get_args(bare(hint))[0], get_args(bare(hint))[1])
    for key, hint in KEYS.items()
    if get_origin(bare(hint)) is Annotated and isinstance(get_args(bare(hint))[1], Within)
}
RUNS = [f"run_{name}" for name in ("empty", "binary", "deep", "list", "fifo", "folder")]
SWEEPS = [f"sweep_{name}" for name in ("empty", "binary", "deep", "list", "fifo", "folder")]
TSV = ["two.tsv", "languages.tsv", "empty_side.tsv", "latin1.tsv"]
INDEXES = [f"index_{name}" for name in ("empty", "binary", "deep", "list")]
ODD = [
    "fifo",
    "empty",
    "text",
    "binary",
    "folder",
    "missing",
    "/dev/null",
    "/dev/zero",
    "loop",
    "run/config.yaml",
    "a" * 300,
]
UNWRITABLE = ["fifo", "text", "text/below", "/dev/null", "/proc/here", "loop", "loop/below", "a" * 300]
CONTROLS = ["\n", "\r", "\x1b[31m", "\x7f", "\x01", "a\nb", "\x85", "\udcff", "caf\udce9", "\n\n\nx"]


def unknown_setting(pick: random.Random) -> Line:
    key = pick.choice(ALL_KEYS)
    at = pick.randrange(len(key))
    wrong = pick.choice(
        [key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key + "s", f"model.{key}", key + ".x"]
    )
    if wrong in ALL_KEYS or not wrong or wrong[0] == "." or wrong[-1] == ".":
        wrong = "nothing_like_it"
    sign = pick.choice(["", "", "", "+", "++"])
    return Line(
        "",
        (
            pick.choice([*TRAINS, "evaluate", "reproduce"]),
            f"{sign}{wrong}={pick.choice(['3', 'abc', '[1,2]', 'null'])}",
        ),
    )


def wrong_type(pick: random.Random) -> Line:
    key = pick.choice(list(KEYS))
    hint = bare(KEYS[key])
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    values = {
        int: ["abc", "1.5", "true", "[1]", "{a:1}", "1e3", "'4'", "1_x"],
        float: ["abc", "true", "[0.5]", "{a:1}", "'0.5'", "1,5"],
        bool: ["3", "maybe", "[true]", "'true'", "null"],
        str: ["{a:1}", "[a,b]", "3", "true", "1.5"],
    }
    other = ["sideways", "{a:1}", "-7"] if get_origin(hint) in (Literal, tuple) else ["3", "[{a:1}]"]
    return Line("", (pick.choice(TRAINS), f"{key}={pick.choice(values.get(kind, other))}"))


def out_of_range(pick: random.Random) -> Line:
    key = pick.choice(list(NUMBERS))
    kind, bounds = NUMBERS[key]
    values = ["nan", "inf", "-inf", "9" * 400, "-" + "9" * 400, "9" * 5000, "1e400", "-1e308"]
    step = 1 if kind is int else max(abs(bounds.least), 1.0)
    values += [str(kind(bounds.least - step)), str(kind(bounds.most) + (0 if bounds.below else kind(bounds.most)))] * 3
    return Line("", (pick.choice(TRAINS), f"{key}={pick.choice(values)}"))


def empty(pick: random.Random) -> Line:
    key = pick.choice([*KEYS, "model", "dataset", "optimizer", "hardware"])
    typed = pick.choice(
        [f"{key}=", f"{key}=''", f'{key}=""', key, f"={key}", "=", "", " ", f"{key}=???", f"+={key}", f"{key}= "]
    )
    return Line("", (pick.choice([*TRAINS, "evaluate"]), typed))


def syntax(pick: random.Random) -> Line:
    key = pick.choice(list(KEYS))
    value = pick.choice(
        ["[1,2", "{a:1", "'3", '"3', "[4,[8]", "3)", "$(", "{b:[c}", "[" * 500, "[" * 50_000, "a:b:c{", "]",
         "choice(", "${",
         "${nowhere}", "${oc.env:GPIPE_NOTHING}", f"${{{key}}}", "${oc.decode:'['}", "${now:}", "${oc.create:{a:1}}",
         "range(1)", "glob(*)", "sort(3,1)", "int(abc)", "extend_list(1)", "\\", "a=b=c", "${..}", "${oc.env:}"]
    )  # fmt: skip
    return Line("", (pick.choice([*TRAINS, "evaluate", "reproduce"]), f"{key}={value}"))


def group(pick: random.Random) -> Line:
    return Line("", (pick.choice(TRAINS), *pick.choice(
        ["model=nothing", "dataset=../digits", "model=3", "model=[amoebanet]", "learning_rate=0.1", "optimizer=null",
         "hardware=cpu9", "model.depth=50", "dataset.root=x", "model@x=amoebanet", "dataset=digits dataset=cldr",
         "model=transformer_lm dataset=digits", "model=resnet dataset=python_docs", "+model=resnet", "model=null",
         "dataset=cifar10", "dataset=image_folder", "dataset=text_files model=transformer_lm", "optimizer={a:1}",
         "model=custom", "model=timm", "model=timm model.name=no_such_network", "model=custom model.target=os",
         "model=custom model.target=nothing:here", "model=custom model.target=os:nothing", "~dataset", "~model.filters",
         "model=custom model.target=broken:build", "model=custom model.target=raises:build", "~nothing", "presets=x",
         "model=custom model.target=number:build", "model=custom model.target=leaves:build", "hydra=x", "hydra.x=3",
         "model=amoebanet/x", "optimizer=sgd optimizer.nesterov=true optimizer.momentum=0", "hydra/launcher=nothing",
         "model=custom model.target=os:getcwd", "model=resnet model.depth=19",
          "dataset=synthetic_images dataset.root=x"]
    ).split()))  # fmt: skip


def control(pick: random.Random) -> Line:
    odd, command = pick.choice(CONTROLS), pick.choice([*TRAINS, "evaluate", "reproduce", "compare"])
    key = pick.choice(
        ["output", "run_folder", "resume", "init_from", "run", "seed", "model", "dataset", "dataset.root"]
    )
    typed = pick.choice([f"{key}={odd}", f'{key}="{odd}"', f"{key}='x{odd}y'", f"{odd}={odd}", f"{key}{odd}=3", odd])
    return pick.choice([Line("", (command, typed)), Line("", (odd,)), Line("", (command + odd, "seed=1"))])


def files(pick: random.Random) -> Line:
    command = pick.choice(TRAINS)
    text, pairs = ["model=transformer_lm", "dataset=text_files"], ["model=transformer_nmt", "dataset=parallel_text"]
    places = {
        ("train", "resume"): [*ODD, *RUNS, *INDEXES, *SWEEPS],
        ("train", *TINY, "init_from"): [*ODD, *RUNS, *INDEXES],
        ("evaluate", "run"): [*ODD, *RUNS, *INDEXES],
        (command, "run_folder"): [*UNWRITABLE, "run", "locked"],
        (command, "output"): UNWRITABLE,
        ("train", "-m", "seed=1,2", "hydra.sweep.dir"): [*UNWRITABLE, "locked"],
        ("train", *text, "dataset.root"): [
            "fifo",
            "empty",
            "binary",
            "no_text",
            "missing",
            "/dev/zero",
            "latin1.txt",
            "loop",
        ],
        ("train", *pairs, "dataset.root"): ["fifo", "empty", "text", "binary", "folder", "missing", "/dev/null", *TSV],
        ("train", "dataset=image_folder", "dataset.root"): ["fifo", "empty", "no_images", "one_class", "missing"],
        ("train", "dataset=cifar10", "dataset.root"): ["fifo", "folder", "missing", "text"],
        ("train", "model=timm", "model.name=resnet10t", "model.weights"): [
            "fifo",
            "binary",
            "folder",
            "missing",
            "loop",
        ],
    }
    line = pick.choice(list(places))
    return Line("", (*line[:-1], f"{line[-1]}={pick.choice(places[line])}"))


def configuration(pick: random.Random) -> Line:
    name = pick.choice([*(path.stem for path in Path("conf").iterdir()), "nothing", "../text", ""])
    place = pick.choice(
        [("-cd", "conf")] * 12 + [("-cd", "missing"), ("-cd", "text"), ("-cp", "conf"), ("--config-dir",)]
    )
    return Line("", (pick.choice(TRAINS), *place, "-cn", name))


def torchrun(pick: random.Random) -> Line:
    whole = {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    number = pick.choice(["abc", "-1", "1e3", "", "0x2", "99999999999999999999", "\u0662", "1.5", " 2", "nan"])
    environment = pick.choice(
        [{"RANK": number}, {"WORLD_SIZE": number}, {"RANK": "5", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0"},
         whole | {"LOCAL_WORLD_SIZE": number}, whole | {"RANK": number}, whole | {"MASTER_ADDR": ""},
         whole | {"MASTER_PORT": "abc"}]
    )  # fmt: skip
    command = pick.choice(
        [
            ("train", "partitions=2"),
            ("evaluate", "run=run"),
            ("plan",),
            ("check",),
            ("bench",),
            ("train", "-m", "seed=1,2"),
        ]
    )
    return Line("", command, environment)


def together(pick: random.Random) -> Line:
    return Line("", tuple(pick.choice(
        ["train batch_size=4 batch_tokens=8", "train partitions=2 partitions=3", "train resume=run init_from=run",
         "train partition.costs=[1] cost=measured", "train micro_batches=64 batch_size=8", "train init_head=new",
         "train partition.balance=[1,2,3]", "train freeze=[taken]", "train batch_size=null batch_tokens=64",
         "plan dry_run=true", "plan resume=run", "check partitions=auto", "check dry_run=true", "bench epochs=3",
         "bench rounds=2", "bench resume=run", "bench max_steps=3", "evaluate run=run decode.beam=3", "evaluate",
         "evaluate -m run=run", "evaluate run=run partitions=99", "evaluate run=run batch_size=0", "plan -m seed=1,2",
         "evaluate run=run micro_batches=99 batch_size=8", "evaluate run=run dataset=digits", "train partitions=20",
         "evaluate run=run checkpoint=worst", "train resume=run model=resnet", "train resume=run batch_size=4 epochs=0",
         "train resume=run optimizer=adam", "train resume=run epochs=1 max_steps=1", "train steps=3", "train solve=x",
         "train partitions=5000 micro_batches=100000 batch_size=100000", "train batch_size=1000000",
          "check batch_size=9999",
         "plan solve=nothing", "train freeze=[no_such_layer]", "train dataset.classes=[1,1]",
          "train dataset.classes=[99]",
         "train device=cuda", "train executor=in_process device=cuda",
          "train hardware.memory_gib=0.0001 recompute=auto",
         "train partition.costs=[0,0]", "train partition.costs=[1,2,3]", 
         "train dataset=synthetic_text", "train model=transformer_lm model.heads=3 model.width=8",
         "train model=transformer_lm dataset.vocabulary=100", "train dry_run=true partitions=99",
          "train run_folder=run"]
    ).split()))  # fmt: skip


def mistyped_command(pick: random.Random) -> Line:
    command = pick.choice(list(COMMANDS))
    at = pick.randrange(len(command))
    wrong = pick.choice(
        [command[:at] + command[at + 1 :], command.upper(), command + "x", f"--{command}", f"{command}=1"]
    )
    return Line("", pick.choice([
        (wrong, "seed=1"), ("list",), ("--vers",), ("-x",), ("",), ("seed=1", command), ("-m",), ("help",),
         (command, "--no-such-option"),
        ("train", "--partitions", "4"), ("train", "--partitions=4"), ("train", "-q"), ("plan", "-h", "-x"), ("train",
         "-cn"),
        ("train", "train"), ("evaluate", "run"), ("train", "--cfg"), ("train", "--cfg", "nothing"), ("train",
         "--info", "x"),
        ("compare", "--csvv"), ("compare", "-m", "run"), ("reproduce", "--scale", "desk"), ("train", "--", "epochs"),
    ]))  # fmt: skip


def sweeps(pick: random.Random) -> Line:
    command = pick.choice(["train", "bench"])
    return Line("", tuple(pick.choice(
        ["{} -m partitions=0,-1", "{} -m partitions=1,abc", "{} -m model=nothing,amoebanet",
         "{} -m run_folder=x seed=1,2",
         "{} seed=1,2", "{} -m seed=range(0,-5)", "{} -m seed=choice()", "{} -m epochs=${{nowhere}} seed=1,2",
         "{} -m nothing=1,2", "{} -m seed=1,2 model.depth=50", "{} -m lr=0.1,0.2", "{} -m dataset=cldr,cldr",
         "{} -m seed=1,-1", "{} -m hydra.sweep.dir=text seed=1,2", "{} -m seed=1, batch_size=x",
          "{} -m seed=1,2 -cn nothing",
         "{} -m resume=sweep_list", "{} resume=sweep_list", "{} -m micro_batches=1,2,inf", "{} -m output=,x",
          "{} -m seed=1,2 hydra.run.dir=x"]
    ).format(command).split()))  # fmt: skip


def compared(pick: random.Random) -> Line:
    results = [f"result_{name}" for name in ("empty", "binary", "deep", "list", "fifo")]
    return Line("", pick.choice([
        ("compare",), ("compare", pick.choice([*ODD, *RUNS])), ("compare", pick.choice(results)), ("compare", "run",
         "--csv", "--output", "x"),
        ("compare", "run", "--output", pick.choice([*UNWRITABLE, "locked"])), ("compare", "run", "--output"),
         ("compare", "run", "--output", ""),
        ("compare", "run", "--outptu", "x"), ("compare", "seed=1"), ("compare", "run\udcff"), ("compare", "fifo",
         "folder", "missing"), ("compare", ""),
    ]))  # fmt: skip


def reproduced(pick: random.Random) -> Line:
    name = pick.choice(["table1_amoebanet", "breakdown", "consistency", "transfer_cifar10", "multilingual_400m"])
    return Line("", ("reproduce", *pick.choice(
        [[name + "x"], [name, "scale=huge"], [name, "nothing=3"], ["breakdown", "batch_size=x"], [name, name],
         [name, "~seed"],
         [name, "-m"], [name, "run_folder=x"], [name, f"output={pick.choice(UNWRITABLE)}"], [name, "seed=1,2"],
          [name, "dry_run=true"],
         ["seed=1"], [name, "scale="], [name, "resume=run"], [name, "batch_size=[1"], ["../train"], [""],
          [name, "output="],
         ["table1_amoebanet", "partitions=2"], [name, "model.filters=abc", "scale=desk"], [name, "=3"],
          [name, "--help=3"]]
    )))  # fmt: skip


KINDS: dict[str, Callable[[random.Random], Line]] = {
    "unknown setting": unknown_setting, "wrong type": wrong_type, "out of range": out_of_range, "empty": empty,
    "syntax": syntax, "group": group, "control characters": control, "files": files, "configuration": configuration,
    "torchrun": torchrun, "together": together, "mistyped command": mistyped_command, "sweep": sweeps,
    "compare": compared, "reproduce": reproduced,
}  # fmt: skip


def lines(count: int, seed: int) -> list[Line]:
    """As many different command lines, of all kinds in turns."""
    pick, found = random.Random(seed), dict[str, Line]()
    for kind in (kind for _ in range(100 * count) for kind in KINDS):
        made = KINDS[kind](pick)
        line = Line(kind, made.arguments, made.environment)
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
    if processes:
        wrong.append(f"{len(processes)} processes left")
    if after != before:
        wrong.append(f"left or removed: {sorted(after ^ before)[:3]}")
    return "; ".join(wrong) or None


def main(count: int, seed: int, given: list[str], show: bool) -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GPIPE_FULL_ERROR",
    ):
        os.environ.pop(name, None)
    sys.path.append(".")  # where custom models are looked for
    import gpipe_cli.commands.compare
    import gpipe_cli.commands.reproduce
    import gpipe_cli.launch.checking
    import gpipe_cli.launch.training_run
    import gpipe_cli.launch.worker
    import gpipe_cli.reporting.compare.report  # noqa: F401

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
                line = Line(line.kind, (*line.arguments, *given), line.environment)
            counts[line.kind] += 1
            if found := fault(line, number % OWN_PROGRAM == 0, place, temporary):
                faults.append((line, found))
            if show:
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
    parser = command_line(__doc__)
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="each line as it is tried")
    options = parser.parse_args()
    sys.exit(main(options.lines, options.seed, options.settings, options.show))
