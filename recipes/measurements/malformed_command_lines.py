"""How `gpipe` answers malformed command lines, which are generated from a seed.

Every line must end within a time limit with exit code 2 and one line on stderr that repeats something of what was
typed, and must leave no file and no process behind. The program prints the number of lines of each kind and of those
that failed; its exit code is 1 if one failed.

    python recipes/measurements/malformed_command_lines.py [--lines 400] [--seed 0] [setting=value ...]
"""

import argparse
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from PIL import Image

from gpipe_cli.cli import COMMANDS
from gpipe_cli.config.schema import Range
from gpipe_cli.config.settings import BenchSettings, PlanSettings, TrainConfig

SECONDS = 120.0  # the limit for one command line; a machine may be busy
TRAIN = {"train": TrainConfig, "plan": PlanSettings, "bench": BenchSettings}
TINY = ["model.normal_cells=3", "model.filters=4", "dataset=synthetic_images", "dataset.image_size=16",
        "dataset.num_classes=4", "dataset.train_samples=16", "dataset.test_samples=4", "batch_size=8", "partitions=1",
        "data_workers=0", "threads=1", "max_steps=2", "device=cpu", "hardware=cpu"]  # fmt: skip
ENDLESS = "1" * 5000
FILES = {
    "empty": b"", "text": b"some words\n" * 3, "binary": bytes(range(256)), "words.csv": b"some,words\n",
    "stuck.csv": b"0B0,0F0\n1F0,1B0\n", "twice.csv": b"0F0,0F0,0B0\n1F0,1B0\n", "latin1.csv": b"0F0,\xfc\n",
    "stages.csv": b"0F0,0B0\n", "broken.py": b"def build(:\n", "number.py": b"def build():\n    return 3\n",
    "two.tsv": b"a\tb\n", "bad_run/config.yaml": b"- a\n", "bad_run/result.json": b'{"status": 3, "config": []}',
    "conf/list.yaml": b"- a\n", "conf/tag.yaml": b"a: !!python/object/apply:os.getcwd []\n", "conf/cut.yaml": b"a: [1,",
    "conf/wrong.yaml": b"defaults: [train, _self_]\nseed: many\n", "conf/missing.yaml": b"defaults: [nothing]\n",
    "conf/endless.yaml": f"defaults: [train, _self_]\nseed: {ENDLESS}".encode(), "conf/binary.yaml": bytes(range(256)),
    "conf/circle.yaml": b"defaults: [train, _self_]\nseed: ${batch_size}\nbatch_size: ${seed}\n",
}  # fmt: skip
HF_CHANGES: dict[str, dict[str, Any]] = {
    "no_heads": {"n_head": 0},
    "minus_one_layer": {"n_layer": -1},
    "three_heads": {"n_head": 3},
    "no_width": {"n_embd": 0},
    "dropout_3": {"attn_pdrop": 3},
    "words": {"n_layer": "two"},
    "unknown": {"model_type": "mine"},
    "code": {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}},
    "activation": {"activation_function": "gelo"},
    "few_tokens": {"vocab_size": 3},
}
HF: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
FILES |= {
    f"hf/{name}/config.json": json.dumps(HF | changes).encode()
    for name, changes in HF_CHANGES.items()
} | {"hf/list/config.json": b"[]", "hf/cut/config.json": b"{", "hf/nothing/words.txt": b"no model\n",
     "skips.py": b"""from torch import nn
from gpipe_cli.models.skips import Pop, SkipSequential, Stash

def never(): return Sequence(nn.Flatten(), Stash("a"), nn.Linear(768, 4))
def before(): return Sequence(nn.Flatten(), Pop("a"), nn.Linear(768, 4), Stash("a"))
def twice(): return Sequence(nn.Flatten(), Stash("a"), Pop("a", "add"), Pop("a", "add"), nn.Linear(768, 4))
def shapes(): return Sequence(nn.Flatten(), Stash("a"), nn.Linear(768, 7), Pop("a", "add"), nn.Linear(768, 4))
def cat(): return Sequence(Stash("a"), nn.Flatten(), Pop("a"), nn.Linear(768, 4))
def broadcast(): return Sequence(nn.Flatten(), Stash("a"), nn.Linear(768, 1), Pop("a", "add"), nn.Linear(768, 4))
def mul(): return Sequence(nn.Flatten(), Stash("a"), Pop("a", "mul"), nn.Linear(768, 4))
def function(): return Sequence(nn.Flatten(), Stash("a"), Pop("a", abs), nn.Linear(768, 4))
def inside(): return Sequence(nn.Flatten(), nn.Sequential(Stash("a"), Pop("a")), nn.Linear(768, 4))
""",
     "negative.csv": b"0,-1\n", "gap.csv": b"0,2\n", "row.csv": b"0\n0\n"}  # fmt: skip
PICTURES: dict[str, tuple[str, str, tuple[int, int]]] = {  # folder -> its mask: mode, name, size; the image has 16 x 16
    "colours": ("RGB", "a.png", (16, 16)), "small": ("L", "a.png", (8, 16)), "floats": ("F", "a.tif", (16, 16)),
    "classes": ("L", "a.png", (16, 16)), "lost": ("L", "b.png", (16, 16)), "hidden": ("L", "._a.png", (16, 16)),
    "endless": ("L", "a.xyz", (16, 16)),
}  # fmt: skip
Arguments = tuple[str, ...]


def keys_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting that is not a group, with its type."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if hasattr(hint, "__dataclass_fields__"):
            yield from keys_of(hint, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", hint


KEYS = {command: dict(keys_of(kind)) for command, kind in TRAIN.items()}


def one_of(pick: random.Random, suits: Callable[[Any], bool] = lambda hint: True) -> tuple[str, str, Any]:
    """A command, one of its settings whose type suits, and that type."""
    return pick.choice([(c, key, hint) for c, keys in KEYS.items() for key, hint in keys.items() if suits(hint)])


def unknown_setting(pick: random.Random) -> Arguments:
    command, key, _ = one_of(pick)
    at = pick.randrange(len(key))
    wrong = pick.choice([f"{key[:at]}x{key[at:]}", f"{key[:at]}{key[at:].upper()}X", f"{key}ss", f"{key}.x"])
    return command, f"{pick.choice(['', '+', '++'])}{wrong}={pick.choice(['3', 'abc', '[1,2]', 'null'])}"


def wrong_type(pick: random.Random) -> Arguments:
    command, key, hint = one_of(pick, lambda hint: hint in (int, float, bool))
    values = {int: ["1.5", "true", "1e3"], float: ["true", "1,5"], bool: ["3", "maybe"]}[hint]
    return command, f"{key}={pick.choice([*values, 'abc', '[1]', '{a:1}', '1_x'])}"


def out_of_range(pick: random.Random) -> Arguments:
    command, key, hint = one_of(pick, lambda h: get_origin(h) is Annotated and isinstance(get_args(h)[1], Range))
    kind, bounds = get_args(hint)
    below = kind(bounds.minimum - (1 if kind is int else max(abs(bounds.minimum), 1.0)))
    return command, f"{key}={pick.choice([str(below), 'nan', 'inf', '-inf', '-' + '9' * 400, '1e400'])}"


def syntax(pick: random.Random) -> Arguments:
    command, key, _ = one_of(pick)
    value = pick.choice(["[1,2", "{a:1", "'3", '"3', "3)", "$(", "[" * 50_000, "]", "choice(", "${", "${nowhere}",
                         f"${{{key}}}", "${oc.decode:'['}", "${now:}", "range(1)", "glob(*)", "\\", "a=b=c", "${..}",
                         "???", f"${{oc.decode:{ENDLESS}}}"])  # fmt: skip
    return command, pick.choice([f"{key}={value}", f"={key}", "=", key, f"{key}"])


def control_characters(pick: random.Random) -> Arguments:
    odd = pick.choice(["\n", "\r", "\x1b[31m", "\x7f", "a\nb", "\x85", "\udcff", "caf\udce9"])
    key = pick.choice(["seed", "model", "dataset", "schedule", "device", "resume", "init_from", "hardware"])
    command = pick.choice(["train", "plan", "check", "bench"])
    return pick.choice([(command, f"{key}=x{odd}"), (command, f"{odd}={odd}"), (odd,), (command + odd, "seed=1")])


# PHRASES: command lines by kind, separated by `|` or line breaks; `<word>` stands for one of WORDS[word].
WORDS: dict[str, Sequence[str]] = {
    "command": ("train", "plan", "check", "bench"),
    "any": tuple(COMMANDS),
    "odd": ("fifo", "empty", "text", "binary", "folder", "missing", "/dev/zero", "loop", "bad_run", "a" * 300),
    "unwritable": ("text", "text/below", "/dev/null", "/proc/here", "loop/below", "a" * 300),
    "yaml": tuple(name[5:-5] for name in FILES if name.startswith("conf/")),
    "schedule": (*(name for name in FILES if name.endswith(".csv")), "gone.csv", "folder", "text", "GPIPE", "[gpipe]"),
    "form": ("xml", "JSON", "json,csv", "[json]", "''"),
    "hf": tuple(name.split("/")[1] for name in FILES if name.startswith("hf/")),
    "skip": ("never", "before", "twice", "shapes", "cat", "broadcast", "mul", "function", "inside"),
    "placement": ("gone.csv", "diagonal", "V"),
    "masks": (*PICTURES, "nowhere"),
    "recipe": ("table1_amoebanet", "breakdown", "consistency", "multilingual_400m"),
}
PHRASES = {
    "mistyped command": """lists | -x | '' | halp | <any> --no-such-option | train --partitions=4 | plan -h -x |
        train train | evaluate run | list nothing | help nothing_at_all""",
    "group": """<command> model=nothing | <command> dataset=../digits | <command> model=[amoebanet] | <command> ~dataset
        <command> optimizer=null | <command> hardware=cpu9 | <command> model.depth=50 | <command> model@x=amoebanet
        <command> model=transformer_lm dataset=digits | <command> model=custom model.target=broken:build
        <command> model=custom model.target=number:build
        <command> model=timm model.name=none | <command> hydra.x=3""",
    "files": """train resume=<odd> | train init_from=<odd> | evaluate run=<odd> | export run=<odd>
        <command> run_folder=<unwritable> | <command> run_folder=run | <command> output=<unwritable> | compare <odd>
        train model=transformer_nmt dataset=parallel_text dataset.root=two.tsv | list runs missing""",
    "configuration": """<command> -cd conf -cn <yaml> | <command> -cd missing -cn <yaml> | <command> hydra.run=3
        <command> -cd text -cn x | train -m hydra/sweeper=3 seed=1,2 | <command> hydra/launcher=3""",
    "together": """train batch_size=4 batch_tokens=8 | train resume=run init_from=run | plan resume=run
        <command> micro_batches=64 batch_size=8 | <command> partition.balance=[1,2,3] | <command> partitions=20
        train freeze=[no_such_layer] | check partitions=auto | evaluate run=run partitions=99 | train device=cuda
        <command> replicas=33 | train resume=run model=resnet
        <command> compile=true schedule=zero_bubble | train resume=auto | train logger=tensorbord""",
    "schedule file": """<command> schedule=<schedule> | plan write_schedule=text | plan write_schedule=missing/x.csv
        train write_schedule=x.csv | plan -m partitions=1,2 write_schedule=x.csv""",
    "formats": """plan format=<form> | compare run format=<form> | list models format=<form>
        export run=run format=<form> | export run=run file=x.bin | compare run format=csv output=x""",
    "sweep": """train -m partitions=0,-1 | bench -m partitions=1,abc | train -m model=nothing,amoebanet
        train -m 'seed=choice()' | train -m seed=1,2 model.depth=50 | bench -m seed=1,2 hydra.run.dir=x
        train seed=1,2 | train -m 'seed=interval(1,2)'""",
    "reproduce": """reproduce <recipe>x | reproduce <recipe> scale=huge | reproduce <recipe> nothing=3
        reproduce <recipe> ~seed | reproduce <recipe> -m | reproduce <recipe> dry_run=true | reproduce seed=1""",
    "hugging face": """<command> model=hf model.name=hf/<hf> dataset=synthetic_text model.length=12
        <command> model=hf model.name=hf/<hf> dataset=synthetic_text model.length=12 dry_run=true""",
    "skips": """<command> model=custom model.target=skips:<skip> dataset=synthetic_images dataset.image_size=16""",
    "placement": """<command> partitions=2 placement=<placement>
        <command> partitions=2 schedule=zbv placement=looped""",
    "masks": """train model=unet dataset=image_masks dataset.root=masks/<masks> dataset.image_size=16
        train model=unet dataset=image_masks dataset.root=masks/<masks> dataset.image_size=16 partitions=2""",
    "torchrun": """RANK=<number> train partitions=2 | WORLD_SIZE=<number> plan | RANK=5 WORLD_SIZE=2 train seed=1""",
}  # fmt: skip
WORDS["number"] = ("abc", "-1", "1e3", "0x2", "99999999999999999999", "1.5", ENDLESS)


def phrase(kind: str, pick: random.Random) -> Arguments:
    written = pick.choice([one for one in re.split(r"[|\n]", PHRASES[kind]) if one.strip()])
    return tuple(shlex.split(re.sub(r"<(\w+)>", lambda word: pick.choice(WORDS[word[1]]), written)))


KINDS: dict[str, Callable[[random.Random], Arguments]] = {
    "unknown setting": unknown_setting, "wrong type": wrong_type, "out of range": out_of_range, "syntax": syntax,
    "control characters": control_characters, **{kind: partial(phrase, kind) for kind in PHRASES},
}  # fmt: skip


def lines(count: int, seed: int) -> list[tuple[str, Arguments]]:
    """``count`` different command lines with their kinds, taking turns among all kinds."""
    pick, found = random.Random(seed), dict[Arguments, str]()
    for kind in (kind for _ in range(100 * count) for kind in KINDS):
        found.setdefault(KINDS[kind](pick), kind)
        if len(found) == count:
            return [(kind, line) for line, kind in found.items()]
    raise SystemExit(f"--lines {count}: there are only {len(found)}")


def gpipe(line: Arguments, place: Path) -> "subprocess.Popen[str]":
    """Start `gpipe` in a session of its own; leading words may be environment variables, as in a shell."""
    own = [word for word in line if re.match(r"[A-Z_]+=", word)]
    return subprocess.Popen(
        [sys.executable, "-m", "gpipe_cli", *line[len(own) :]], cwd=place / "place", text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
        env=os.environ | {"TMPDIR": str(place / "tmp")} | dict(word.split("=", 1) for word in own),
    )  # fmt: skip


def fault(line: Arguments, place: Path) -> str:
    """What is wrong with the answer to a command line; "" if nothing is."""
    before = set(place.rglob("*"))
    program = gpipe(line, place)
    try:
        error = program.communicate(timeout=SECONDS)[1]
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        return f"still at work after {SECONDS:g} s"
    typed = [one for word in line[line[0] in COMMANDS :] if (one := re.sub(r"[^ -~]", "", word).strip())]
    # a message shows control characters in its own way: what is between them is repeated
    pieces = [piece for word in line[line[0] in COMMANDS :] for piece in re.split(r"[^ -~]+", word) if len(piece) > 1]
    words = [*typed, *pieces, *re.findall(r"[^\W\d]\w+", " ".join(typed), re.ASCII)]
    # a configuration's file or a model's layer is named then, which was not typed
    named_elsewhere = "-cn" in line or any(word.startswith("model.target=skips:") for word in line)
    wrong = [] if program.returncode == 2 else [f"exit code {program.returncode}"]
    if error.count("\n") != 1 or not error.startswith("gpipe"):
        wrong.append(f"stderr is {error[-600:]!r}")
    elif words and not named_elsewhere and not any(word[:20] in error.partition(": ")[2] for word in words):
        wrong.append(f"repeats nothing of what was typed: {error!r}")
    with suppress(ProcessLookupError):  # no process of the session is left
        os.killpg(program.pid, 0)
        time.sleep(3.0)
        os.killpg(program.pid, signal.SIGKILL)
        wrong.append("left a process")
    left = {path for path in place.rglob("*") if not re.search("torchinductor_|__pycache__", str(path))} - before
    return "; ".join([*wrong, *([f"left {sorted(map(str, left))[:3]}"] if left else [])])


def write_masks(root: Path) -> None:
    """Folders of images whose masks cannot be used: of class 9, if of the right form."""
    for name, (mode, file, size) in PICTURES.items():
        for split in ("train", "test"):
            for kind in ("images", "masks"):
                (root / name / split / kind).mkdir(parents=True)
            Image.new("RGB", (16, 16)).save(root / name / split / "images" / "a.png")
            Image.new(mode, size, 9).save(root / name / split / "masks" / file, format="TIFF" if mode == "F" else "PNG")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="settings of train, plan and bench")
    parser.add_argument("--lines", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    began, counts, faults = time.monotonic(), Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name in ("tmp", "place", "place/folder"):
            Path(folder, name).mkdir()
        for name, content in FILES.items():
            file = Path(folder, "place", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        write_masks(Path(folder, "place", "masks"))
        os.mkfifo(Path(folder, "place", "fifo"))
        Path(folder, "place", "loop").symlink_to("loop")
        made = gpipe(("train", *TINY, "run_folder=run"), Path(folder))  # the command lines refer to this run
        if error := made.communicate()[1]:
            raise SystemExit(error)
        for kind, line in lines(options.lines, options.seed):
            counts[kind] += 1
            if found := fault((*line, *(options.settings if line[0] in TRAIN else [])), Path(folder)):
                faults.append(kind)
                print(f"{ascii(shlex.join(line))[1:300]}\n  {found}", flush=True)
    wrong = Counter(faults)
    for kind in KINDS:
        print(f"{kind:<20}{counts[kind]:>5} lines{wrong[kind]:>5} failed")
    seconds = time.monotonic() - began
    print(f"{'all':<20}{options.lines:>5} lines{len(faults):>5} failed    seed {options.seed}, {seconds:.0f} s")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
