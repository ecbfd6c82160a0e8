"""Malformed command lines, made up from a seed: what `gpipe` makes of each.

Each must end with exit code 2 and one line on stderr, within a time limit, and leave no file and no process behind.
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
from gpipe_cli.config.groups import AmoebaNetConfig, ImagesConfig, PaperLearningRateConfig, RMSPropConfig
from gpipe_cli.config.settings import TrainConfig
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
FILES = {
    "empty": b"", "text": b"some words\n" * 3, "binary": bytes(range(256)), "deep": DEEP.encode(), "list": b"- a\n",
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
    "conf/circle.yaml": b"defaults: [train, _self_]\nseed: ${batch_size}\nbatch_size: ${seed}\n",
}  # fmt: skip
BAD = ("empty", "binary", "deep", "list", "fifo", "folder")  # contents of a file that is to be read


def furnish() -> FolderLock:
    """Makes a run, and files and folders that are not what they should be; returns the lock of `locked`."""
    run_child(lambda: gpipe_with(["train", *TINY, "run_folder=run"]), Path.cwd())
    for folder in ("folder", "locked", "no_text", "no_images/train", "one_class/train/a", "conf/folder.yaml"):
        Path(folder).mkdir(parents=True)
    for name, content in FILES.items():
        Path(name).write_bytes(content)
    for name in ("fifo", "conf/fifo.yaml"):
        os.mkfifo(name)
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
    Path("loop").symlink_to("loop")
    return FolderLock(Path("locked"))


# --- kinds of mistakes: those made up from the settings of a training


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
    key: get_args(bare(hint))[:2]
    for key, hint in KEYS.items()
    if get_origin(bare(hint)) is Annotated and isinstance(get_args(bare(hint))[1], Within)
}
CONTROLS = ["\n", "\r", "\x1b[31m", "\x7f", "\x01", "a\nb", "\x85", "\udcff", "caf\udce9", "\n\n\nx"]
Arguments = tuple[str, ...]


def unknown_setting(pick: random.Random) -> Arguments:
    key = pick.choice(ALL_KEYS)
    at = pick.randrange(len(key))
    changed = [key[:at] + key[at + 1 :], key[:at] + "x" + key[at:], key.upper(), key + "s", f"model.{key}", key + ".x"]
    wrong = pick.choice(changed)
    if wrong in ALL_KEYS or not wrong or wrong[0] == "." or wrong[-1] == ".":
        wrong = "nothing_like_it"
    setting = f"{pick.choice(['', '', '', '+', '++'])}{wrong}={pick.choice(['3', 'abc', '[1,2]', 'null'])}"
    return pick.choice([*TRAINS, "evaluate", "reproduce"]), setting


def wrong_type(pick: random.Random) -> Arguments:
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
    return pick.choice(TRAINS), f"{key}={pick.choice(values.get(kind, other))}"


def out_of_range(pick: random.Random) -> Arguments:
    key = pick.choice(list(NUMBERS))
    kind, bounds = NUMBERS[key]
    values = ["nan", "inf", "-inf", "9" * 400, "-" + "9" * 400, "9" * 5000, "1e400", "-1e308"]
    step = 1 if kind is int else max(abs(bounds.least), 1.0)
    values += [str(kind(bounds.least - step)), str(kind(bounds.most) + (0 if bounds.below else kind(bounds.most)))] * 3
    return pick.choice(TRAINS), f"{key}={pick.choice(values)}"


def empty(pick: random.Random) -> Arguments:
    key = pick.choice([*KEYS, "model", "dataset", "optimizer", "hardware"])
    typed = [f"{key}=", f"{key}=''", f'{key}=""', key, f"={key}", "=", "", " ", f"{key}=???", f"+={key}", f"{key}= "]
    return pick.choice([*TRAINS, "evaluate"]), pick.choice(typed)


def syntax(pick: random.Random) -> Arguments:
    key = pick.choice(list(KEYS))
    value = pick.choice(
        ["[1,2", "{a:1", "'3", '"3', "[4,[8]", "3)", "$(", "{b:[c}", "[" * 500, "[" * 50_000, "a:b:c{", "]", "choice(",
         "${", "${nowhere}", "${oc.env:GPIPE_NOTHING}", f"${{{key}}}", "${oc.decode:'['}", "${now:}",
         "${oc.create:{a:1}}", "range(1)", "glob(*)", "sort(3,1)", "int(abc)", "extend_list(1)", "\\", "a=b=c",
         "${..}", "${oc.env:}"]
    )  # fmt: skip
    return pick.choice([*TRAINS, "evaluate", "reproduce"]), f"{key}={value}"


def control(pick: random.Random) -> Arguments:
    odd, command = pick.choice(CONTROLS), pick.choice([*TRAINS, "evaluate", "reproduce", "compare"])
    key = pick.choice(
        ["output", "run_folder", "resume", "init_from", "run", "seed", "model", "dataset", "dataset.root"]
    )
    typed = pick.choice([f"{key}={odd}", f'{key}="{odd}"', f"{key}='x{odd}y'", f"{odd}={odd}", f"{key}{odd}=3", odd])
    return pick.choice([(command, typed), (odd,), (command + odd, "seed=1")])


def torchrun(pick: random.Random) -> Line:
    whole = {
        "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }  # fmt: skip
    number = pick.choice(["abc", "-1", "1e3", "", "0x2", "99999999999999999999", "\u0662", "1.5", " 2", "nan"])
    environment = pick.choice(
        [{"RANK": number}, {"WORLD_SIZE": number}, {"RANK": "5", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "0"},
         whole | {"LOCAL_WORLD_SIZE": number}, whole | {"RANK": number}, whole | {"MASTER_ADDR": ""},
         whole | {"MASTER_PORT": "abc"}]
    )  # fmt: skip
    commands = ["train partitions=2", "evaluate run=run", "plan", "check", "bench", "train -m seed=1,2"]
    return Line("", tuple(pick.choice(commands).split()), environment)


def mistyped_command(pick: random.Random) -> Arguments:
    command = pick.choice([name for name in COMMANDS if name != "help"])  # `gpipe --help` is none
    at = pick.randrange(len(command))
    wrong = [command[:at] + command[at + 1 :], command.upper(), command + "x", f"--{command}", f"{command}=1"]
    return pick.choice([(pick.choice(wrong), "seed=1"), phrase("mistyped command", pick)])


# --- kinds of mistakes: those that are written here, as one would type them; `<word>` is one of WORDS

ODD = ("fifo", "empty", "text", "binary", "folder", "missing", "/dev/null", "/dev/zero", "loop", "run/config.yaml",
       "a" * 300)  # fmt: skip
WORDS: dict[str, Sequence[str]] = {
    "trains": TRAINS,
    "sweeps": ("train", "bench"),
    "any": tuple(COMMANDS),
    "recipe": ("table1_amoebanet", "breakdown", "consistency", "transfer_cifar10", "multilingual_400m"),
    "odd": ODD,
    "unwritable": ("fifo", "text", "text/below", "/dev/null", "/proc/here", "loop", "loop/below", "a" * 300),
    "bad": BAD,
    "data": ("fifo", "empty", "text", "binary", "folder", "missing", "/dev/null"),
    "tsv": ("two.tsv", "languages.tsv", "empty_side.tsv", "latin1.tsv"),
    "yaml": (*(name[5:-5] for name in FILES if name.endswith(".yaml")), "fifo", "folder", "nothing", "../text", "''"),
    "tiny": (" ".join(TINY),),
    "surrogate": ("\udcff",),
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
        <trains> --config-dir -cn <yaml>
    """,
    "together": """
        train batch_size=4 batch_tokens=8 | train partitions=2 partitions=3 | train resume=run init_from=run
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
        *("commands.compare", "commands.reproduce"),
        *("launch.check_run", "launch.training_run", "launch.worker"),
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
